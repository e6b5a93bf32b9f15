"""The cluster's setup task on nodes: once a boot and content, its output where people look for it, its failure the job's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from node_world import Cluster, Job
from waiting import wait_for

SECRET = "hush-hush-7"
LOGS = "logs/workspaces/default/clusters/c/0123456789"
COMMAND = 'echo "$WHERE" ${#TOKEN} [$AZ_BATCHAI_JOB_TEMP] $(basename "$PWD"); echo oops >&2; echo once >> count; true'


def submit(cluster: Cluster, command: str = COMMAND, nodes: int = 1, **changes: Any) -> Job:
    """A job that prints how often the node's setup task has run."""
    task = {
        "id": "0123456789",
        "command": command,
        "environmentVariables": [{"name": "WHERE", "value": "$AZ_BATCHAI_MOUNT_ROOT/share"}],
        "secretNames": ["TOKEN"],
        "logs": {"volume": None, "path": LOGS},
        **changes.pop("task", {}),
    }
    show = changes.pop("show", 'cat "$AZ_BATCHAI_MOUNT_ROOT/../setup/0123456789/wd/count"')
    return cluster.submit(show, nodes, setupTask=task, told={"setup": {"TOKEN": SECRET}}, **changes)


def done(cluster: Cluster, *arguments: Any, **changes: Any) -> Job:
    """A job that has succeeded."""
    job = submit(cluster, *arguments, **changes)
    assert job.wait()["executionState"] == "succeeded", job.said()
    return job


def folder(cluster: Cluster, node: int = 0) -> Path:
    return cluster.roots[node] / "setup" / "0123456789"


def log(cluster: Cluster, name: str = "stdout-node-0.txt") -> str:
    return (cluster.share / LOGS / name).read_text(encoding="utf-8")


def test_it_runs_once_a_boot_and_content(cluster: Cluster) -> None:
    first = done(cluster)
    assert first.log("stdout.txt") == "once\n"
    assert log(cluster) == f"{cluster.roots[0]}/mounts/share {len(SECRET)} [] wd\n"
    assert log(cluster, "stderr-node-0.txt") == "oops\n"
    assert "setup task" in [record["phase"] for record in first.records("phase")]
    assert done(cluster).log("stdout.txt") == "once\n"
    (folder(cluster) / "done").write_text("another boot")
    assert done(cluster).log("stdout.txt") == "once\nonce\n"
    assert log(cluster).count("\n") == 2, "the log goes on"
    done(cluster, task={"id": "fedcba9876"}, show="true")
    assert (cluster.roots[0] / "setup" / "fedcba9876" / "wd" / "count").read_text() == "once\n"
    places = [path for path in (*cluster.share.rglob("*"), *cluster.roots[0].rglob("*")) if path.is_file()]
    assert not [path for path in places if SECRET.encode() in path.read_bytes()]


def test_a_failing_one_fails_the_job_and_is_tried_again(cluster: Cluster) -> None:
    command = 'echo once >> count; test "$BATCHAI_NODE" = 0 || { echo no such driver; exit 7; }'
    failed = submit(cluster, command, nodes=2)
    verdict = failed.wait()
    assert (verdict["executionState"], verdict["exitCode"]) == ("failed", 7), failed.said()
    assert verdict["errors"][0]["code"] == "SetupTaskFailed"
    assert verdict["reason"] == "the cluster's setup task on node-1 (node-1) exited with code 7\nno such driver"
    assert log(cluster, "stdout-node-1.txt") == "no such driver\n"
    assert not (folder(cluster, 1) / "done").exists()
    assert failed.records("started") == []
    done(cluster, "echo once >> count", nodes=2)
    counts = sorted((folder(cluster, node) / "wd" / "count").read_text() for node in range(2))
    assert counts in (["once\n", "once\nonce\n"], ["once\nonce\n"] * 2), "node-0 may have been ended before it was marked"


def test_one_that_is_ended_is_not_marked(cluster: Cluster) -> None:
    waiting = submit(cluster, "echo begun; sleep 600")
    said = folder(cluster) / "stdout.txt"
    wait_for(lambda: said.exists() and said.read_text() == "begun\n")
    waiting.cancel("ann", "enough")
    assert waiting.wait()["terminated"], waiting.said()
    assert waiting.processes() == set() and not (folder(cluster) / "done").exists()
    assert log(cluster) == "begun\n"


# While the setup task runs, a quarter of an hour goes by for the job's clock.
SLOW = """
import time, types
from mlflow_batchai.agent.attempt import setup
gone, run = [0.0], setup.SetupTaskRun.run
phases.time = types.SimpleNamespace(monotonic=lambda: time.monotonic() + gone[0])
def slow(self):
    gone[0] = 900.0
    run(self)
setup.SetupTaskRun.run = slow
"""


def test_its_time_is_not_the_jobs_and_has_a_limit(cluster: Cluster) -> None:
    done(cluster, "echo once >> count; sleep 0.3", maxWallClockSeconds=60.0, patch=SLOW)
    limit = "from mlflow_batchai.agent.attempt import setup; setup.SECONDS = 0.3"
    verdict = submit(cluster, "sleep 600", task={"id": "fedcba9876"}, patch=limit).wait()
    assert verdict["errors"][0]["code"] == "SetupTaskFailed" and "took longer than 0 s" in verdict["reason"]


def test_its_logs_on_another_volume(cluster: Cluster, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    control = {"scope": "cluster", "path": "share", "source": str(cluster.share), "share": "file:///", "kind": "link"}
    volume = {**control, "path": "afs", "source": str(other), "name": "afs"}
    task = {"logs": {"volume": 1, "path": "a/b"}}
    done(cluster, volumes=[control, volume], task=task, called="me@[::1]:2201")
    assert (other / "a" / "b" / "stderr-me----1--2201.txt").read_text() == "oops\n"


def test_a_share_that_takes_no_logs_ends_no_job(cluster: Cluster) -> None:
    (cluster.share / "logs").write_text("no folder")
    job = done(cluster)
    assert f"could not all be written to its logs; it lies in {folder(cluster)}: " in job.log("execution.log")
    assert (folder(cluster) / "stderr.txt").read_text() == "oops\n"
