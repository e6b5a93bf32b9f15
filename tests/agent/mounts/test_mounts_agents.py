"""Whole agents with volumes: what ranks write on an rclone mount is on the share when the job has its verdict."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from azure_server import AzureServer
from mount_world import blob_volume, files_volume, needs_fuse, needs_root
from node_world import Cluster, Job, python39
from waiting import freeze, wait_for

from mlflow_batchai.agent.api import host
from mlflow_batchai.agent.mounts import mountpoints
from mlflow_batchai.agent.processes import proc

pytestmark = [needs_fuse, needs_root]


def submit(cluster: Cluster, command: str, volumes: list[dict[str, Any]], *credentials: dict[str, str], **changes: Any) -> Job:
    control = {
        "scope": "cluster",
        "path": "share",
        "source": str(cluster.share),
        "share": cluster.share.as_uri(),
        "kind": "link",
    }
    opens = {n: {**given, "endpoint": volumes[n - 1]["endpoint"]} if given else {} for n, given in enumerate(credentials, 1)}
    told = {"volumes": {str(index): given for index, given in opens.items()}}
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return cluster.submit(command, volumes=[control, *volumes], told=told, environment=path, **changes)


def assert_nothing_left(cluster: Cluster, job: Job) -> None:
    assert mountpoints.below(str(cluster.folder)) == []
    assert job.processes() == set()
    for root in cluster.roots:
        assert not (root / "jobs").exists() or os.listdir(root / "jobs") == []


def test_two_nodes_write_to_shares(cluster: Cluster, azure: AzureServer) -> None:
    files, blobs = azure.share("out"), azure.container("results")
    (files / "there").write_text("read me")
    (blobs / "there").write_text("and me")
    azure.fail(rate=0.1)
    try:
        job = submit(
            cluster,
            'cd "$AZ_BATCHAI_JOB_MOUNT_ROOT"; cat data/there blobs/there; mkdir -p data/sub;'
            " for i in 1 2 3; do echo line $i >> data/sub/log-$BATCHAI_RANK; done;"
            ' head -c 5000000 /dev/zero > blobs/model-$BATCHAI_RANK.h5; cp blobs/model-$BATCHAI_RANK.h5 "$AZ_BATCHAI_OUTPUT_MODEL"',
            [files_volume(azure, files.name, path="data"), blob_volume(azure, "results", path="blobs")],
            {"sas": azure.sas(files.name)},
            {"key": azure.key},
            nodes=2,
            python=python39() or sys.executable,
            outputDirectories=[{"id": "MODEL", "pathPrefix": "$AZ_BATCHAI_JOB_MOUNT_ROOT/data", "pathSuffix": None}],
            logCopyPrefix={"volume": 1, "path": "logs"},
        )
        verdict = job.wait()
    finally:
        azure.fail(0)
    assert verdict["executionState"] == "succeeded", job.said()
    outputs = files / job.plan.segment / "outputs"
    for rank in (0, 1):
        assert (files / "sub" / f"log-{rank}").read_text() == "line 1\nline 2\nline 3\n"
        assert (blobs / f"model-{rank}.h5").stat().st_size == 5000000
        assert (outputs / f"model-{rank}.h5").stat().st_size == 5000000
    # Copied at the very end, and drained too.
    copied = (files / "logs" / job.plan.segment / "stdouterr" / "stdout.txt").read_text()
    assert "[0] read meand me" in copied
    assert "2 volume(s) mounted in " in job.log("execution-node-1.log")
    assert_nothing_left(cluster, job)
    for file in cluster.folder.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            assert azure.key.encode() not in data, file
            assert b"sig=" not in data.replace(b"sig=***", b""), file


def test_a_mount_that_fails_ends_the_job_everywhere(cluster: Cluster, azure: AzureServer) -> None:
    azure.share("data")
    volumes = [files_volume(azure), files_volume(azure, "none")]
    verdict = submit(cluster, "echo never", volumes, {"key": azure.key}, {"key": azure.key}, nodes=2).wait()
    assert (verdict["executionState"], verdict["exitCode"]) == ("failed", -1)
    [error] = verdict["errors"]
    assert (error["code"], error["message"]) == ("AZFMountError", "An Azure file share could not be mounted")
    assert "volume 'none' (file share devaccount/none) can't be mounted on node-" in verdict["reason"]
    assert mountpoints.below(str(cluster.folder)) == []


def test_results_that_do_not_fit_fail_the_job(cluster: Cluster, azure: AzureServer) -> None:
    azure.share("small")
    azure.quota("small", 1000)
    command = 'head -c 5000 /dev/zero > "$AZ_BATCHAI_JOB_MOUNT_ROOT/small/model.h5"'
    job = submit(cluster, command, [files_volume(azure, "small")], {"key": azure.key})
    verdict = job.wait()
    assert (verdict["executionState"], verdict["errors"][0]["code"]) == ("failed", "AZFMountError")
    assert "1 file(s) (model.h5) could not be written to it: the share is full" in verdict["reason"]
    assert_nothing_left(cluster, job)


@pytest.mark.parametrize("who", ["end", "the next job"])
def test_what_a_killed_agent_left_is_cleared(cluster: Cluster, azure: AzureServer, who: str) -> None:
    folder = azure.share("data")
    (folder / "precious").write_text("x")
    volumes = [files_volume(azure), files_volume(azure, path="all", scope="cluster")]
    credentials = [{"key": azure.key}] * 2
    job = submit(cluster, "echo go; exec sleep 600", volumes, *credentials)
    wait_for(lambda: job.log("stdout.txt"), what=job.said)
    root = str(cluster.roots[0])
    assert len(mountpoints.below(root)) == 2
    rclones = job.running("rclone")
    assert len(rclones) == 2
    for pid in proc.pids():
        with contextlib.suppress(OSError):
            assert azure.key not in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    job.agents[0].kill()
    job.agents[0].wait()
    if who == "end":
        assert host.end(job.mark, [[root, ""]], 5.0) == {"left": []}
        assert mountpoints.below(root) == []
    else:
        following = submit(cluster, 'cat "$AZ_BATCHAI_MOUNT_ROOT/all/precious"', volumes, *credentials)
        assert following.wait()["executionState"] == "succeeded", following.said()
        assert following.log("stdout.txt") == "x\n"
        assert_nothing_left(cluster, following)
    assert [proc.start_time(pid) for pid in rclones] == [None, None]
    assert (folder / "precious").exists()


def test_logs_are_not_copied_where_nothing_is_mounted(cluster: Cluster, azure: AzureServer) -> None:
    """They would lie on the node's disk, and the next job could not mount there."""
    azure.share("data")
    volumes = [files_volume(azure, "bad"), files_volume(azure, "data", path="logs", scope="cluster")]
    job = submit(cluster, "echo never", volumes, {}, {"key": azure.key}, logCopyPrefix={"volume": 2, "path": "x"})
    assert "no key or SAS was given for it" in job.wait()["reason"]
    assert not (cluster.roots[0] / "mounts" / "logs").exists()
    # Nor is a traceback made of a mount that has died.
    volumes = [files_volume(azure, "none", path="logs", scope="cluster")]
    job = submit(cluster, "echo never", volumes, {"key": azure.key}, logCopyPrefix={"volume": 1, "path": "x"})
    assert "there is no such share" in job.wait()["reason"]
    assert "Traceback" not in job.said()
    assert_nothing_left(cluster, job)


def test_a_frozen_mount_does_not_hold_up_a_cancel(cluster: Cluster, azure: AzureServer) -> None:
    """It is waited for once, given up, and gone with the rest."""
    azure.share("frozen")
    patch = "ending.LAST_DRAIN_SECONDS = 0.5"
    job = submit(cluster, "echo go; exec sleep 600", [files_volume(azure, "frozen")], {"key": azure.key}, patch=patch)
    wait_for(lambda: job.log("stdout.txt"), what=job.said)
    [pid] = job.running("rclone")
    freeze(pid)
    job.cancel("me", "enough")
    assert job.wait()["reason"] == "terminated by me: enough"
    assert job.log("execution.log").count("what rclone holds (timed out) could not be written to it: ") == 1
    assert_nothing_left(cluster, job)
