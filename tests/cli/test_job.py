"""``batchai job show|wait|attach|terminate|delete``: what each says and exits with, whatever has become of the job."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from command_line import Cli
from plans import bare_plan

from mlflow_batchai.client import lookup, runner
from mlflow_batchai.errors import JobDetachedError, ShareError
from mlflow_batchai.follower import detached
from mlflow_batchai.job.lease import LeaseState, LeaseView
from mlflow_batchai.job.states import JobState
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.tracking import runs

TAGS = {
    runs.TAG_JOB: "toy-1",
    runs.TAG_CLUSTER: "local",
    runs.TAG_WORKSPACE: "default",
    runs.TAG_SHARE: "file:///nowhere",
    runs.TAG_FOLDER: "workspaces/default/experiments/Default/jobs/toy-1/0123456789",
    runs.TAG_STATE: "running",
    runs.TAG_NODES: "2",
}


@pytest.fixture
def run(cli: Cli):
    """The run of a job."""
    return runs.create(cli.world.client, "0", TAGS, {}, None, None)


@pytest.fixture
def job(cli: Cli, run, monkeypatch, tmp_path):
    """A job that the run's tags name, as far as the command line looks into it."""
    made = SimpleNamespace(
        is_trusted=True, name="toy-1", plan=bare_plan(), folder="logs/seg", share=DirectoryShare(tmp_path / "share"), calls=[]
    )
    made.current, made.ended = JobState("running"), JobState("succeeded", 0)
    made.follower = LeaseView(LeaseState.FREE, 0, None, {})
    made.state = lambda ending=True: made.current
    found = detached.Submitted(made, run.info.run_id, None)

    def wait(found, say, news=None):
        made.calls.append("wait")
        return made.ended

    def watch(found, console, signals, **options):
        made.calls.append(options)
        if isinstance(made.ended, Exception):
            raise made.ended
        return made.ended

    monkeypatch.setattr(lookup, "of_run", lambda run, tracking: found)
    monkeypatch.setattr(detached, "ensure_follower", lambda found: made.calls.append("follower") or made.follower)
    monkeypatch.setattr(runner, "cancel", lambda found, why: made.calls.append(f"cancel: {why}"))
    monkeypatch.setattr(runner, "wait", wait)
    monkeypatch.setattr(runner, "watch", watch)
    return made


def lose_folder(monkeypatch, run):
    """Have the job's folder be gone, as ``lookup`` finds it."""

    def of_run(run, tracking):
        raise lookup.NoFolderError(run, "file:///share")

    monkeypatch.setattr(lookup, "of_run", of_run)


def end_run(cli, run, status, **tags):
    for name, value in tags.items():
        cli.world.client.set_tag(run.info.run_id, f"batchai.{name}", value)
    cli.world.client.set_terminated(run.info.run_id, status)


@pytest.mark.parametrize("verb", ["show", "wait", "attach", "terminate", "delete", "logs"])
def test_an_unknown_job_is_one_sentence_and_exit_code_3(cli, run, verb):
    assert cli("job", verb, "nope") == (3, "", "batchai: there is no job 'nope'; the newest are: toy-1\n")


ENDS = [
    (JobState("succeeded", 0), 0, "batchai: job toy-1 succeeded\n"),
    (JobState("failed", 7, reason="rank 0 died"), 7, "batchai: job toy-1 failed: rank 0 died\n"),
    (JobState("failed", None, terminated=True), 1, "is KILLED)\n"),
    (JobState("failed", None, ({"code": "NodeLost"},), reason="node-1 was lost"), 1, "job toy-1 failed: node-1 was lost\n"),
]


@pytest.mark.parametrize(("ended", "code", "words"), [*ENDS, (JobDetachedError("left; job toy-1 goes on"), 1, "goes on\n")])
def test_the_exit_code_is_the_jobs_and_never_0_for_one_that_failed(cli, job, ended, code, words):
    job.ended = ended
    watches = [("attach toy-1", {"from_start": True}), ("attach -n toy-1 --new", {"from_start": False})]
    if not isinstance(ended, Exception):
        watches.append(("wait -n toy-1 --interval 15", "wait"))
    for verb, call in watches:
        job.calls.clear()
        said = cli(f"job {verb}")
        assert (said.code, said.out, job.calls) == (code, "", ["follower", call])
        assert said.err.endswith(words)


def test_attach_is_about_one_job_or_all(cli):
    for words, sentence in [
        ("--all toy-1", "it can't stand with toy-1"),
        ("--all -n toy-1", "it can't stand with toy-1"),
        ("--all --new", "it can't stand with --new"),
        ("--all -e digits", "it can't stand with -e"),
        ("toy-1 --wait", "--wait belongs to --all"),
        ("", "the name of the job is missing: -n NAME (or --all, for all of yours)"),
    ]:
        code, out, err = cli("job", "attach", *words.split())
        assert (code, out) == (2, "")
        assert sentence in err


@pytest.mark.parametrize(
    ("status", "tags", "code", "words"),
    [
        ("FINISHED", {"executionState": "succeeded", "exitCode": "0"}, 0, "job toy-1 succeeded"),
        ("FAILED", {"executionState": "failed", "exitCode": "5", "reason": "rank 0"}, 5, "job toy-1 failed: rank 0"),
        ("KILLED", {"executionState": "failed", "errorCode": "JobTerminate", "reason": "by me"}, 1, "was terminated: by me"),
    ],
)
def test_a_job_whose_folder_is_gone_is_what_its_run_says(cli, run, monkeypatch, status, tags, code, words):
    end_run(cli, run, status, **tags)
    lose_folder(monkeypatch, run)
    said = cli("job", "wait", "toy-1")
    assert (said.code, said.out) == (code, "")
    assert words in said.err
    said = cli("job", "show", "toy-1")
    assert said.err == "batchai: the folder of job toy-1 is gone; this is what its run says\n"
    shown = json.loads(said.out)
    assert (shown["runStatus"], shown["executionState"]) == (status, tags["executionState"])


def test_a_job_without_a_folder_that_has_not_ended_is_an_error(cli, run, monkeypatch):
    cli.world.client.update_run(run.info.run_id, status="RUNNING")
    lose_folder(monkeypatch, run)
    for verb in ("show", "wait", "attach"):
        said = cli("job", verb, "toy-1")
        assert (said.code, said.out) == (1, "")
        assert said.err.startswith("batchai: job toy-1 has no job folder: ")


def test_ctrl_c_leaves_a_job_that_is_waited_for(cli, job, monkeypatch):
    def wait(found, say, news):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "wait", wait)
    assert cli("job", "wait", "toy-1") == (1, "", "\nbatchai: interrupted; jobs that run go on\n")


@pytest.mark.parametrize(
    ("verb", "current", "options", "calls"),
    [
        ("terminate", "running", "", ["cancel: batchai job terminate", "follower", "wait"]),
        # Who waited for it before may be gone.
        ("terminate", "running", "--no-wait", ["cancel: batchai job terminate", "follower"]),
        # Its run may not have ended.
        ("terminate", "succeeded", "", ["follower", "wait"]),
        ("delete", "running", "", ["cancel: batchai job delete", "follower", "wait"]),
        ("delete", "running", "--no-wait", ["cancel: batchai job delete", "follower"]),
        ("delete", "succeeded", "", ["follower", "wait"]),
        ("delete", "succeeded", "--no-wait", []),
    ],
)
def test_terminate_and_delete(cli, job, run, verb, current, options, calls):
    """What runs is ended first; a deleted run goes to MLflow's trash, its files stay; afterwards there is no such job."""
    job.current = JobState(current)
    job.ended = JobState("failed", reason="terminated by me", terminated=True)
    said = cli(f"job {verb} toy-1 -y {options}")
    assert (said.code, said.out, job.calls) == (0, "", calls)
    assert deleted(cli, run) == (verb == "delete")
    if verb == "delete":
        assert f"its files stay at {job.share.root}/logs/seg until `batchai gc`" in said.err
        assert f"mlflow runs restore --run-id {run.info.run_id}" in said.err
        assert {cli("job", "show", name).code for name in ("toy-1", run.info.run_id)} == {3}
        assert cli.json("job list") == []
    elif not options:
        assert ("terminated by me" if current == "running" else "has ended already") in said.err


@pytest.mark.parametrize("verb", ["terminate", "delete"])
def test_what_cannot_be_undone_is_asked_only_on_a_terminal(cli, job, verb):
    said = cli("job", verb, "toy-1")
    assert (said.code, said.out) == (2, "")
    assert said.err == f"batchai: {verb.capitalize()} job toy-1: this needs -y where there is no terminal to ask on\n"
    assert job.calls == []


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        ("SCHEDULED", 0, "batchai: job toy-1: nothing of it had been started; its run is KILLED\n"),
        ("KILLED", 0, "batchai: job toy-1 has ended already\n"),
        ("RUNNING", 1, "batchai: job toy-1 has no job folder: "),
    ],
)
def test_terminate_what_never_began(cli, run, monkeypatch, status, code, words):
    cli.world.client.update_run(run.info.run_id, status=status)
    lose_folder(monkeypatch, run)
    if status == "SCHEDULED":
        assert cli("job", "terminate", "toy-1").code == 2  # it asks, too
    said = cli("job", "terminate", "toy-1", "-y")
    assert (said.code, said.out) == (code, "")
    assert said.err.startswith(words)
    assert cli.world.client.get_run(run.info.run_id).info.status == ("RUNNING" if code else "KILLED")


def deleted(cli, run):
    return cli.world.client.get_run(run.info.run_id).info.lifecycle_stage == "deleted"


def test_delete_what_has_no_folder(cli, run, monkeypatch):
    lose_folder(monkeypatch, run)
    said = cli("job", "delete", "toy-1", "-y")
    assert (said.code, "nothing of it lies on its share" in said.err) == (0, True)
    assert deleted(cli, run)


def test_delete_where_the_share_is_not_here(cli, run, monkeypatch):
    """A job that may run is not forgotten; one that has ended may be."""

    def of_run(run, tracking):
        raise ShareError("it is not on this machine")

    monkeypatch.setattr(lookup, "of_run", of_run)
    assert cli("job", "delete", "toy-1", "-y") == (1, "", "batchai: it is not on this machine\n")
    assert not deleted(cli, run)
    end_run(cli, run, "FINISHED", executionState="succeeded")
    assert cli("job", "delete", "toy-1", "-y").code == 0
    assert deleted(cli, run)


def test_a_job_is_looked_for_where_a_person_says(cli, run):
    assert cli("job", "show", "toy-1", "-e", "nope").code == 3
    assert "the experiments are: Default" in cli("job", "show", "toy-1", "-e", "nope").err
    assert "the workspaces are: default" in cli("job", "show", "toy-1", "-w", "nope").err
    cli.json("workspace", "create", "vision")
    assert cli("job", "show", "toy-1", "-w", "vision") == (
        3,
        "",
        "batchai: there is no job 'toy-1' in workspace 'vision'; that workspace or experiment has none\n",
    )
    cli.json("experiment", "create", "digits")
    for options, environment in ((("-e", "digits"), {}), ((), {"BATCHAI_EXPERIMENT": "digits"})):
        assert "no job 'toy-1' in experiment 'digits'; that" in cli("job", "show", "toy-1", *options, **environment).err
    # By its run id as well.
    assert cli("job", "show", run.info.run_id, "-w", "vision").code == 3
    # Where it is, it is found: only its share is not on this machine.
    assert cli("job", "show", "toy-1", "-w", "default", "-e", "Default").code == 1
    assert cli("job", "show", "it's").code == 3
