"""One job of two nodes, seen while it runs and afterwards: its shape, files, output, nodes; and its end waited for."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

from mlflow_batchai.cluster.workspaces import arm_id
from mlflow_batchai.tracking import runs

TRAIN = """
import os, sys, time
rank = os.environ["HOROVOD_RANK"]
print("Größe 你好 of", rank, flush=True)
print("trouble of", rank, file=sys.stderr, flush=True)
out = os.environ["AZ_BATCHAI_OUTPUT_MODEL"]
if rank == "0":
    os.makedirs(out + "/deep/er", exist_ok=True)
    open(out + "/weights.bin", "w").write("x" * 100)
    open(out + "/deep/er/a b.txt", "w").write("a")
    open(out + "/ready", "w").close()
while not os.path.exists(out + "/go"):
    time.sleep(0.02)
print("the end")
"""
DOCUMENT = """
name: toy-1
wait: false
properties:
  nodeCount: 2
  horovodSettings: {}
  jobPreparation: {commandLine: "true"}
  outputDirectories:
  - {id: MODEL, pathPrefix: $AZ_BATCHAI_MOUNT_ROOT/share, pathSuffix: models}
  - {id: FAR, pathPrefix: $AZ_BATCHAI_MOUNT_ROOT/share, pathSuffix: far}
  environmentVariables: [{name: A, value: b}]
  secrets: [{name: S, value: s3cr3t-canary}]
  constraints: {maxWallClockTime: PT2H}
"""


@pytest.fixture(scope="module")
def cli(shared_cli: Cli) -> Cli:
    """The command in a world where the job runs."""
    world = shared_cli.world
    submitted = world.run(world.project(TRAIN, batchai=DOCUMENT))
    assert submitted.returncode == 0, submitted.stderr
    world.wait(lambda: (outputs(world) / "ready").exists(), 90, "the ranks don't run")
    logs = [world.folder() / "stdouterr" / name for name in ("stdout.txt", "stderr.txt")]
    # Ranks may have written before the agent has.
    world.wait(lambda: [path.exists() and path.read_bytes().count(b"\n") for path in logs] == [2, 2], 90, "no output")
    world.wait(lambda: world.last.info.status == "RUNNING", 90, "the run says that it waits")
    return shared_cli


def outputs(world: Any) -> Path:
    """The output directory MODEL."""
    return Path(world.folder() / "outputs" / "models")


@pytest.fixture(scope="module")
def ended(cli: Cli) -> dict[str, Any]:
    """What was seen while the job ended: all tests that want it running come before the first that asks for this."""
    seen: dict[str, Any] = {}
    following = Cli(cli.world)
    # In this process only one command at a time has standard output: one follows, `wait` is another process.
    waiting = cli.world.start([str(Path(cli.world.command("x")[0]).with_name("batchai")), "job", "wait", "-n", "toy-1"])
    seen["told"] = waiting.stderr.readline()
    timer = threading.Timer(0.5, (outputs(cli.world) / "go").touch)
    timer.start()
    seen["stream"] = following("job", "file", "stream", "-j", "toy-1", "-f", "stdout-1.txt")
    timer.join()
    seen["wait"] = waiting.communicate(timeout=120), waiting.returncode
    return seen


def test_show_imports_no_mlflow(cli):
    """It costs 1 s of CPU; MLflow's import alone costs 4."""
    code = "import sys, atexit; from mlflow_batchai.cli import main; atexit.register(lambda: print('mlflow' in sys.modules)); main()"
    done = cli.world.call([sys.executable, "-c", code, "job", "show", "toy-1", "--query", "name"])
    assert (done.stdout, done.stderr) == ('"toy-1"\nFalse\n', "")


def test_show_is_batch_ais_shape(cli: Cli) -> None:
    shown = cli.json("job", "show", "toy-1")
    assert shown["id"] == arm_id("batchai", "default", "experiments", "Default", "jobs", "toy-1")
    assert shown["cluster"]["id"] == arm_id("batchai", "default", "clusters", "local")
    assert (shown["name"], shown["toolType"], shown["nodeCount"]) == ("toy-1", "horovod", 2)
    assert (shown["resourceGroup"], shown["workspace"], shown["experimentName"]) == ("batchai", "default", "Default")
    assert (shown["executionState"], shown["provisioningState"]) == ("running", "succeeded")
    assert shown["executionInfo"] == {
        "startTime": shown["executionStateTransitionTime"],
        "endTime": None,
        "exitCode": None,
        "errors": None,
    }
    assert shown["creationTime"] <= shown["executionInfo"]["startTime"]
    # As submitted, with the default that the service filled in, and no secret.
    assert shown["horovodSettings"] == {"processCount": 2}
    assert shown["jobPreparation"] == {"commandLine": "true"}
    assert shown["outputDirectories"][0] == {
        "id": "MODEL",
        "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share",
        "pathSuffix": "models",
    }
    assert (shown["inputDirectories"], shown["mountVolumes"], shown["containerSettings"]) == ([], None, None)
    assert shown["environmentVariables"] == [{"name": "A", "value": "b"}]
    assert shown["secrets"] == [{"name": "S", "value": None}]
    assert shown["constraints"] == {"maxWallClockTime": "PT2H"}
    assert shown["stdOutErrPathPrefix"] == "$AZ_BATCHAI_MOUNT_ROOT/share"
    assert shown["jobOutputDirectoryPathSegment"] == cli.world.plan()["segment"]
    # Ours.
    run = cli.world.last
    assert (shown["runId"], shown["runStatus"], shown["attempt"]) == (run.info.run_id, "RUNNING", 1)
    (follower,) = cli.world.followers()
    assert shown["follower"] == {"state": "relaying", "process": follower.pid, "host": os.uname().nodename, "trouble": None}
    assert [node["id"] for node in shown["nodes"]] == ["node-0", "node-1"]
    assert all(node["host"] and node["address"] and node["exit"] is None for node in shown["nodes"])
    assert (shown["command"], shown["processCount"], shown["queuedBehind"]) == ("python train.py", 2, None)
    assert shown["folder"] == runs.tags_of(run)["batchai.folder"]
    assert Path(shown["files"]["stdout"]).read_text(encoding="utf-8") == cli.world.log()
    assert cli.json("job", "show", run.info.run_id) == shown
    assert cli.json("job", "show", "-n", "toy-1", "--query", "executionState") == "running"


def test_the_list_says_the_same_without_the_share(cli: Cli) -> None:
    shown = cli.json("job", "show", "toy-1")
    (row,) = cli.json("job", "list")
    assert {key: shown[key] for key in row} == row


def test_files(cli: Cli) -> None:
    said = cli("job", "file", "list", "-j", "toy-1", "-o", "table").out.splitlines()
    assert said[0].split() == ["Name", "Type", "Size", "Modified"]
    assert {line.split()[0] for line in said[2:]} >= {"stdout.txt", "stderr.txt", "stdout-0.txt", "execution-node-1.log"}
    listed = cli.json("job", "file", "list", "-j", "toy-1", "-d", "MODEL")
    assert [(file["name"], file["fileType"], file["contentLength"]) for file in listed] == [
        ("deep", "directory", None),
        ("ready", "file", 0),
        ("weights.bin", "file", 100),
    ]
    assert listed[0]["downloadUrl"] is None
    assert listed[2]["downloadUrl"] == (outputs(cli.world) / "weights.bin").as_uri()
    assert listed[2]["lastModified"].endswith("+00:00")
    (file,) = cli.json("job", "file", "list", "-j", "toy-1", "-d", "MODEL", "-p", "./deep/er/", "--expiry", "5")
    assert file["name"] == "a b.txt"
    assert file["downloadUrl"].endswith("/models/deep/er/a%20b.txt")
    assert cli.json("job", "file", "list", "-j", "toy-1", "-d", "MODEL", "-p", "deep/er/a b.txt") == [file]
    # A directory has no size in the table.
    table = cli("job", "file", "list", "-j", "toy-1", "-d", "MODEL", "-o", "table").out.splitlines()
    assert table[2].split()[:2] == ["deep", "directory"] and not table[2].split()[2].isdigit()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-d", "NOPE"], "job toy-1 has no output directory 'NOPE'; it has: stdouterr, MODEL, FAR"),
        (["-d", "MODEL", "-p", "deep/nope"], "there is no 'nope' in MODEL/deep; there is: er"),
        (["-d", "MODEL", "-p", "weights.bin/x"], "MODEL/weights.bin is a file, not a folder"),
        (["-d", "FAR", "-p", "x"], "there is no 'x' in FAR; there is: nothing yet"),
        (["-d", "MODEL", "-p", "../.."], "there is no '..' in MODEL; there is: deep, ready, weights.bin"),
    ],
)
def test_files_that_are_not_there(cli: Cli, arguments: list[str], words: str) -> None:
    assert cli("job", "file", "list", "-j", "toy-1", *arguments) == (3, "", f"batchai: {words}\n")


def test_output_so_far(cli: Cli) -> None:
    joined = cli("job", "logs", "toy-1")
    assert joined.code == 0
    assert sorted(joined.out.splitlines()) == ["[0] Größe 你好 of 0", "[1] Größe 你好 of 1"]
    assert cli("job", "logs", "toy-1", "--rank", "1") == (0, "Größe 你好 of 1\n", "")
    assert cli("job", "logs", "-n", "toy-1", "--rank", "0", "--stderr") == (0, "trouble of 0\n", "")
    file = cli.world.folder() / "stdouterr" / "stdout-1.txt"
    text = file.read_bytes()
    file.write_bytes(b"")
    said = "batchai: job toy-1 has written nothing to stdout-1.txt yet; --stderr shows standard error\n"
    assert cli("job", "logs", "toy-1", "--rank", "1") == (0, "", said)
    file.write_bytes(text)
    assert cli("job", "logs", "toy-1", "--rank", "2") == (
        2,
        "",
        "batchai: job toy-1 has no rank 2; it has 2, numbered from 0\n",
    )


def test_nodes(cli: Cli) -> None:
    nodes = cli.json("job", "node", "list", "-j", "toy-1")
    assert [(node["nodeId"], node["name"]) for node in nodes] == [("node-0", "0"), ("node-1", "1")]
    table = cli("job", "node", "list", "-j", "toy-1", "-o", "table").out.splitlines()
    assert [title.strip() for title in table[0].split("  ") if title.strip()] == ["ID", "IP", "SSH Port"]
    assert [line.split() for line in table[2:]] == [["node-0", "127.0.0.1"], ["node-1", "127.0.0.1"]]
    code, _, err = cli("job", "node", "exec", "-j", "toy-1", "-n", "node-7", "--exec", "true")
    assert (code, err.startswith("batchai: job toy-1 has no node 'node-7' now; it has: node-0 (")) == (3, True)


def test_a_command_on_a_node(cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    """It writes to our own terminal; its exit code is ours."""
    assert cli("job", "node", "exec", "-j", "toy-1", "-n", "node-1", "--exec", "echo here; exit 7").code == 7
    assert capfd.readouterr().out == "here\n"


# From here on the job ends.


def test_stream_follows_to_the_very_end(cli: Cli, ended: dict[str, Any]) -> None:
    said = ended["stream"]
    assert (said.code, said.out) == (0, "Größe 你好 of 1\nthe end\n")
    assert said.err == f"batchai: {cli.world.folder()}/stdouterr/stdout-1.txt (Ctrl-C leaves the job running)\n"


def test_wait_ends_with_the_job(ended: dict[str, Any]) -> None:
    (out, err), code = ended["wait"]
    assert ended["told"] == "batchai: job toy-1 is running (attempt 1)\n"
    assert (code, out, err) == (0, "", "batchai: job toy-1 succeeded\n")


@pytest.mark.usefixtures("ended")
def test_what_a_job_was_that_has_ended(cli: Cli) -> None:
    shown = cli.json("job", "show", "toy-1")
    info = shown["executionInfo"]
    assert (shown["executionState"], info["exitCode"], info["errors"]) == ("succeeded", 0, None)
    assert info["startTime"] < info["endTime"] == shown["executionStateTransitionTime"]
    assert [node["exit"]["failure"] for node in shown["nodes"]] == [None, None]
    assert shown["runStatus"] == "FINISHED"
    (row,) = cli.json("job", "list")
    assert {key: shown[key] for key in row} == row
    assert cli.json("job", "node", "list", "-j", "toy-1") == []
    assert cli("job", "node", "exec", "-j", "toy-1", "--exec", "true") == (1, "", "batchai: job toy-1 has no nodes now\n")
    assert cli("job", "terminate", "toy-1", "-y") == (0, "", "batchai: job toy-1 has ended already\n")


@pytest.mark.usefixtures("ended")
def test_a_file_of_a_job_that_has_ended(cli: Cli) -> None:
    assert cli("job", "file", "stream", "-j", "toy-1", "-d", "MODEL", "-f", "a b.txt", "-p", "deep/er").out == "a"
    code, out, err = cli("job", "file", "stream", "-j", "toy-1", "-f", "nope.txt")
    assert (code, out) == (1, "")
    assert err.endswith("batchai: The file nope.txt not found for the completed job.\n")
    assert cli("job", "logs", "-f", "toy-1", "--rank", "0").out == "Größe 你好 of 0\nthe end\n"


@pytest.mark.usefixtures("ended")
def test_no_secret_is_shown(cli: Cli) -> None:
    assert "s3cr3t-canary" not in json.dumps([cli.json("job", "show", "toy-1"), cli.json("job", "list")])


@pytest.mark.usefixtures("ended")
def test_delete_keeps_the_files(cli: Cli) -> None:
    """The last test of this module."""
    folder = cli.world.folder()
    said = cli("job", "delete", "-n", "toy-1", "-y")
    assert (said.code, said.out) == (0, "")
    assert f"its files stay at {folder} until `batchai gc`" in said.err
    assert (folder / "stdouterr" / "stdout.txt").exists()
    assert cli("job", "show", "toy-1").code == 3
