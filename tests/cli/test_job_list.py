"""``batchai job list``: what runs' tags say, newest first, a page at a time, with no look at a share."""

from __future__ import annotations

import pytest
from command_line import Cli

from mlflow_batchai.client import jobview
from mlflow_batchai.cluster.workspaces import arm_id
from mlflow_batchai.tracking import experiments, index, runs

# Column titles of `az batchai job list` (azure-cli-batchai 0.4.10, _format.py).
TITLES = ["Name", "Cluster", "Cluster RG", "Cluster Workspace", "Tool", "Nodes", "State", "Exit code"]


def tags(name: str, **changes: str) -> dict[str, str]:
    """What a submitter writes of a job."""
    given = {"cluster": "local", "workspace": "default", "executionState": "queued", "nodes": "2", "tool": "horovod", **changes}
    found = {f"batchai.{key}": value for key, value in given.items()}
    folder = f"logs/workspaces/{given['workspace']}/experiments/Default/jobs/{name}/0123456789"
    return {runs.TAG_JOB: name, runs.TAG_FOLDER: folder, runs.TAG_SHARE: "file:///share", **found}


@pytest.fixture
def made(cli: Cli):
    """Makes the run of a job, each a second after the one before."""
    began = [1_700_000_000_000]

    def make(name: str, status: str = "SCHEDULED", experiment: str = "0", **changes: str) -> str:
        began[0] += 1000
        run = cli.world.client.create_run(experiment, began[0], tags(name, **changes))
        cli.world.client.update_run(run.info.run_id, status=status)
        if status in ("FINISHED", "FAILED", "KILLED"):
            cli.world.client.set_terminated(run.info.run_id, status, began[0] + 500)
        return str(run.info.run_id)

    return make


def names(said) -> list[str]:
    return [row["name"] for row in said]


def test_an_empty_list_says_where_it_looked(cli):
    assert cli("job", "list") == (0, "[]\n", f"batchai: no jobs in {cli.world.uri}\n")
    assert cli("job", "list", "-c", "nc6", "-o", "table") == (0, "", f"batchai: no such jobs in {cli.world.uri}\n")


def test_a_new_store_is_made_without_a_word_of_mlflow(cli, tmp_path):
    uri = f"sqlite:///{tmp_path}/new.db"
    assert cli("job", "list", MLFLOW_TRACKING_URI=uri) == (0, "[]\n", f"batchai: no jobs in {uri}\n")


def test_the_table_is_batch_ais(cli, made):
    made("done", "FINISHED", executionState="succeeded", exitCode="0")
    made("broken", "FAILED", executionState="failed", exitCode="3", errorCode="JobFailed")
    made("ended", "KILLED", executionState="failed", errorCode="JobTerminated")
    made("waits", clusterId=arm_id("rg.one", "vision", "clusters", "nc6"), cluster="nc6")
    cli.world.client.create_run("0")  # another's run
    table = cli("job", "list", "-o", "table").out.splitlines()
    starts = [table[1].index("-")] + [at + 2 for at in range(len(table[1])) if table[1][at : at + 2] == "  "]
    cells = [[line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)] for line in table]
    assert cells[0] == TITLES
    assert cells[2:] == [
        ["waits", "nc6", "rg.one", "vision", "horovod", "2", "queued", ""],
        ["ended", "local", "batchai", "default", "horovod", "2", "failed (terminated)", ""],
        ["broken", "local", "batchai", "default", "horovod", "2", "failed", "3"],
        ["done", "local", "batchai", "default", "horovod", "2", "succeeded", "0"],
    ]


def test_a_row_has_batch_ais_shape(cli, made):
    begun = "2023-11-14T22:13:21.200+00:00"
    run_id = made("toy", "KILLED", executionState="failed", errorCode="JobTerminate", startTime=begun, reason="by me")
    (row,) = cli.json("job", "list")
    assert row["type"] == "Microsoft.BatchAI/workspaces/experiments/jobs"
    assert row["creationTime"] == "2023-11-14T22:13:21+00:00"
    # Batch AI: a job that a person has ended has failed, with this error and without an exit code.
    assert (row["executionState"], row["executionStateTransitionTime"]) == ("failed", "2023-11-14T22:13:21.500000+00:00")
    assert row["executionInfo"] == {
        "startTime": "2023-11-14T22:13:21.200000+00:00",
        "endTime": "2023-11-14T22:13:21.500000+00:00",
        "exitCode": None,
        "errors": [
            {"code": "JobTerminate", "message": "The specified job has been terminated by the user", "details": []},
        ],
    }
    assert row["jobOutputDirectoryPathSegment"] == "workspaces/default/experiments/Default/jobs/toy/0123456789"
    assert (row["runId"], row["runStatus"], row["errorCode"], row["reason"]) == (run_id, "KILLED", "JobTerminate", "by me")
    assert jobview.is_terminated(row)
    made("waits")
    waits = cli.json("job", "list")[0]
    assert (waits["executionInfo"], waits["executionState"], waits["runStatus"]) == (None, "queued", "SCHEDULED")


def test_filters(cli, made):
    cli.world.client.create_experiment("digits")
    digits = cli.world.client.get_experiment_by_name("digits").experiment_id
    made("a", "FINISHED", executionState="succeeded")
    made("b", "RUNNING", executionState="running", cluster="nc6")
    made("c", "FAILED", executionState="failed", workspace="vision")
    made("d", "KILLED", experiment=digits, executionState="failed", workspace="vision", cluster="nc6")
    assert names(cli.json("job", "list")) == ["d", "c", "b", "a"]
    assert names(cli.json("job", "list", "-w", "vision")) == ["d", "c"]
    assert names(cli.json("job", "list", BATCHAI_WORKSPACE="vision")) == ["d", "c"]
    assert names(cli.json("job", "list", "-e", "digits")) == ["d"]
    assert names(cli.json("job", "list", "-c", "nc6")) == ["d", "b"]
    assert names(cli.json("job", "list", "--cluster", arm_id("g", "w", "clusters", "nc6"))) == ["d", "b"]
    assert names(cli.json("job", "list", "--state", "failed")) == ["d", "c"]
    assert names(cli.json("job", "list", "--state", "terminated")) == ["d"]
    assert names(cli.json("job", "list", "--state", "terminated", "-c", "local")) == []
    assert names(cli.json("job", "list", "-w", "vision", "-c", "nc6", "--state", "failed", "-e", "digits")) == ["d"]
    assert names(cli.json("job", "list", "-c", 'it\'s "here"')) == []
    assert cli.json("job", "list", "--query", "[?runStatus=='KILLED'].name") == ["d"]
    assert cli("job", "list", "-e", "nope").code == 3
    assert cli("job", "list", "-w", "nope").code == 3
    assert cli("job", "list", "--state", "nope").code == 2
    # Who asks for one thing is not shown another's.
    assert cli("job", "show", "a", "-w", "vision").code == 3


def test_pages(cli, made, monkeypatch):
    for number in range(5):
        made(f"toy-{number}")
    said = cli("job", "list", "-n", "2", "--query", "[].name", "-o", "tsv")
    assert said.out == "toy-4\ntoy-3\n" and "--all" in said.err
    assert cli("job", "list", "-n", "0").code == 2
    assert cli("job", "list", "-n", "5").err == ""
    monkeypatch.setattr(index, "PAGE", 2)
    assert names(cli.json("job", "list", "--all")) == [f"toy-{number}" for number in (4, 3, 2, 1, 0)]
    newest = made("toy-0")
    assert index.find(cli.world.client, "toy-0").info.run_id == newest, "of several of one name the newest is meant"


def test_runs_that_have_not_ended(cli, made):
    ended = [made("a", "FINISHED"), made("b", "FAILED"), made("c", "KILLED")]
    going = {made("d", "RUNNING"), made("e")}
    found = {run.info.run_id for run in index.running(cli.world.client, ["0"])}
    assert found == going and not found & set(ended)


def test_deleted_runs_of_all_experiments(cli, made, monkeypatch):
    """Of deleted ones, too, however many pages there are of them."""
    monkeypatch.setattr(experiments, "PAGE", 1)
    store, found = cli.world.client, set()
    for name in ("one", "two"):
        run = store.create_run(store.create_experiment(name), tags={"batchai.job": name})
        found.add(run.info.run_id)
        store.delete_run(run.info.run_id)
    store.delete_experiment(run.info.experiment_id)
    made("kept")
    assert index.deleted(store) == found
