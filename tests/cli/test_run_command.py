"""``batchai run``: a command of a folder as a job."""

from __future__ import annotations

import json

import pytest

SCRIPT = """
import json, os, sys
print(json.dumps([os.environ.get("HOROVOD_RANK", "none"), *sys.argv[1:]]))
"""


@pytest.fixture
def folder(cli):
    """The folder where the user stands, with a script."""
    (cli.world.cwd / "train.py").write_text(SCRIPT)
    return cli.world.cwd


@pytest.mark.timeout(400)
def test_a_command_is_a_job(cli, folder):
    """Every word arrives as it was typed, on each node's rank; arguments are the run's parameters."""
    words = ["--lr", "0.1", "--note", "it's {a} $HOME *", "--debug"]
    said = cli(
        *("run", "--nodes", "2", "-e", "mine", "--run-name", "first", "--", "python", "train.py", *words),
        MLFLOW_EXPERIMENT_ID="0",
    )
    assert said.code == 0, said
    client = cli.world.client
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert run.data.params == {"lr": "0.1", "note": "it's {a} $HOME *", "debug": "true"}
    printed = [json.loads(line.partition(" ")[2]) for line in said.out.splitlines() if line.startswith("[")]
    assert sorted(printed) == [[rank, *words] for rank in ("0", "1")]
    assert f"job {run.data.tags['batchai.job']} succeeded" in said.err


@pytest.mark.timeout(400)
def test_a_failing_command_fails_as_itself(cli, folder):
    (folder / "batchai.yaml").write_text("properties: {environmentVariables: [{name: CODE, value: '5'}]}\n")
    theirs = cli.world.client.create_experiment("theirs", (cli.world.root / "theirs").as_uri())
    variables = {"MLFLOW_EXPERIMENT_ID": theirs, "MLFLOW_EXPERIMENT_NAME": "other"}
    assert cli("run", "bash", "-c", "exit $CODE", **variables).code == 5
    assert len(cli.world.client.search_runs([theirs])) == 1, "the id is MLflow's first choice"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--", "python", "nope.py"], 1, "the command runs 'nope.py', which is not in the project"),
        (["python", "nope.py", "--debug"], 1, "the command runs 'nope.py', which is not in the project"),
        (["python train.py"], 2, "is one word"),
        (["--backend-config", "nope.yaml", "ls"], 2, "--backend-config nope.yaml"),
        (["--nodes", "99", "ls"], 1, "has 2 node(s)"),
        (["--cluster", "nope", "ls"], 3, "there is no cluster 'nope'"),
        ([], 2, "Missing argument"),
    ],
)
def test_what_can_not_be_run_is_one_sentence(cli, folder, words, code, said):
    found = cli("run", *words)
    assert (found.code, found.out) == (code, "") and said in found.err, found
    assert cli.world.runs() == []
