"""The control share of a running job fails for good: it gets full, is made read-only, is deleted, or loses its file system."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from closed_file import read_closed
from loop_disk import fail, fill, loop_disk
from node_world import Cluster, Job
from waiting import wait_for

from mlflow_batchai.agent.api import host
from mlflow_batchai.agent.transport import totals
from mlflow_batchai.job.completeness import missing

QUICK = "mounted.HEARTBEAT_SECONDS = 0.5"
# A rank that writes a line now and then, and saves when it is asked to end (on its own disk: the share takes nothing).
TALKS = (
    "trap 'echo saved > \"$AZ_BATCHAI_JOB_TEMP/../../../saved\"; exit 0' TERM; echo up; while :; do echo line; sleep 0.1; done"
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with loop_disk(tmp_path, 16) as place:
        yield place


def up(cluster: Cluster) -> Job:
    job = cluster.submit(TALKS, nodes=2, patch=QUICK, terminateSeconds=5.0, lossSeconds=3.0)
    wait_for(lambda: job.log("stdout.txt").count("up") == 2, what=job.said)
    return job


def told(cluster: Cluster, job: Job, node: int) -> dict[str, Any]:
    """What a node's agent has said on its own disk."""
    root = str(cluster.roots[int(job.reservation["nodes"][node])])
    found: dict[str, Any] = host.agents.last_report(root, job.reservation["number"])
    return found


def assert_gone(cluster: Cluster, job: Job, words: str) -> None:
    """Every node has said why, its ranks could save, and nothing runs any more."""
    for node, agent in enumerate(job.agents):
        agent.wait(60)
        failure = told(cluster, job, node)["failure"]
        assert failure["code"] == "ShareFailed"
        assert failure["message"].startswith(f"node-{node}: {words}"), failure
        assert words in job.logs[node].read_text(), "the engine's poll shows the end of it"
        assert (cluster.roots[int(job.reservation["nodes"][node])] / "saved").read_text() == "saved\n"
    assert not job.processes()


def test_a_share_that_gets_full(agents: Callable[..., Cluster], disk: Path) -> None:
    """There is still room for the verdict."""
    cluster = agents(disk)
    job = up(cluster)
    fill(disk)
    begun = time.monotonic()
    assert_gone(cluster, job, "the share is full (No space left on device); make room there")
    assert time.monotonic() - begun < 50  # of 60, the patience with a share that may come back
    verdict = job.verdict()
    assert verdict is not None, job.said()
    assert verdict["executionState"] == "failed"
    assert verdict["errors"][0]["code"] == "ShareFailed"
    assert "the share is full (No space left on device)" in verdict["reason"]


def test_a_rank_that_fills_the_share(agents: Callable[..., Cluster], disk: Path) -> None:
    """It fails of it itself, and that is the reason."""
    fills = (
        'echo up; if [ $BATCHAI_RANK = 0 ]; then cat /dev/zero > "$AZ_BATCHAI_MOUNT_ROOT/share/filler"; exit 7; fi; sleep 600'
    )
    job = agents(disk).submit(fills, nodes=2, patch=QUICK, terminateSeconds=2.0, lossSeconds=3.0)
    for agent in job.agents:
        agent.wait(60)
    verdict = job.verdict()
    assert verdict is not None, job.said()
    assert (verdict["exitCode"], verdict["errors"][0]["code"]) == (7, "JobFailed")
    assert re.match(r"rank 0 on node-0 exited with code 7\nup\ncat: .*No space left on device", verdict["reason"])
    assert not job.processes()


def test_a_share_that_was_full_for_a_moment(agents: Callable[..., Cluster], disk: Path) -> None:
    """Nothing is lost, and nobody takes the silence of the others for their end."""
    cluster = agents(disk)
    script = 'for i in $(seq 40); do echo "line $i"; sleep 0.1; done'
    job = cluster.submit(script, nodes=2, patch=QUICK, lossSeconds=5.0)
    wait_for(lambda: "line 5" in job.log("stdout.txt"))
    filler = fill(disk)
    time.sleep(2.0)
    filler.unlink()
    assert job.wait()["executionState"] == "succeeded", job.said()
    lines = [f"line {number}" for number in range(1, 41)]
    for rank in (0, 1):
        assert job.log(f"stdout-{rank}.txt").splitlines() == lines
        assert [line[4:] for line in job.log("stdout.txt").splitlines() if line.startswith(f"[{rank}]")] == lines


def test_a_share_that_becomes_read_only(agents: Callable[..., Cluster], disk: Path) -> None:
    """No verdict can be written: each node tells whoever asks it, and the job ends there."""
    cluster = agents(disk)
    job = up(cluster)
    fail(disk)
    assert_gone(cluster, job, "the share is read-only (Read-only file system); make it writable")
    assert job.verdict() is None


def test_a_job_folder_that_is_deleted(agents: Callable[..., Cluster]) -> None:
    cluster = agents()
    job = up(cluster)
    subprocess.run(["rm", "-rf", str(cluster.share / "workspaces")], check=False)
    assert_gone(cluster, job, "the job's folder is gone from the share (No such file or directory)")
    verdict = read_closed(str(cluster.share / job.paths.verdict_file))
    assert verdict is None or verdict["errors"][0]["code"] == "ShareFailed"


def test_a_share_that_is_full_when_the_job_ends(agents: Callable[..., Cluster], disk: Path, tmp_path: Path) -> None:
    """What the share took no more is counted: lines to the number, points by the rank's own count."""
    end = tmp_path / "end"
    report = "from mlflow_batchai.training import report; report.log(step=%d, loss=1.0)"
    command = (
        f"{sys.executable} -c '{report % 1}'; echo up; until [ -e {end} ]; do sleep 0.1; done; "
        f"{sys.executable} -c '{report % 2}'; seq 40"
    )
    job = agents(disk).submit(command, patch=QUICK, lossSeconds=3.0)
    wait_for(lambda: "up" in job.log("stdout.txt"), what=job.said)
    wait_for(lambda: job.records("report"), what=job.said)
    fill(disk)
    end.touch()
    assert job.wait()["executionState"] == "succeeded", job.said()
    told = totals.of(job.exit(0) or {})
    assert told is not None
    assert told["reports"] == {"0": [2, 2]} and len(job.records("report")) == 1
    # Its own notes have not left it either.
    assert told["unsent"] >= 40
    assert missing({0: told}, {"agent-0": told["segments"]}, {"0": [1, 1]}) == [
        f"missing: {told['unsent']} lines of node-0 that the share did not take before it was given up",
        "missing: 1 of 2 points that rank 0 reported",
    ]
