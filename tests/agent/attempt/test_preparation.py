"""Job preparation that may be kept runs once per content on a node; what a failed or killed one left is never used."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from node_world import Cluster, Job
from waiting import wait_for

PREPARE = 'echo once >> "$BATCHAI_PREPARATION_DIR/made"; ls -A "$BATCHAI_PREPARATION_DIR"; echo $TOOLS'
USE = 'cat "$BATCHAI_PREPARATION_DIR/made"'


def submit(cluster: Cluster, preparation: str = PREPARE, cache: str | None = "0123456789abcdef", **changes: Any) -> Job:
    return cluster.submit(changes.pop("command", USE), preparation=preparation, preparationCache=cache, **changes)


def kept(cluster: Cluster) -> Path:
    return cluster.roots[0] / "prepared" / "0123456789abcdef"


def test_it_runs_once_for_a_content(cluster: Cluster) -> None:
    variables = [{"name": "TOOLS", "value": "$BATCHAI_PREPARATION_DIR/tools"}]
    first = submit(cluster, environmentVariables=variables)
    assert first.wait()["executionState"] == "succeeded", first.said()
    assert first.log("stdout.txt") == "once\n"
    assert first.log("stdout-job_prep.txt") == f"made\n{kept(cluster)}/tools\n"
    second = submit(cluster)
    assert second.wait()["executionState"] == "succeeded", second.said()
    assert (second.log("stdout.txt"), second.log("stdout-job_prep.txt")) == ("once\n", "")
    assert "job preparation: done before (0123456789abcdef)" in second.log("execution.log")
    other = submit(cluster, cache="f" * 16)
    assert other.wait()["executionState"] == "succeeded", other.said()
    assert other.log("stdout-job_prep.txt") == "made\n\n"


def test_it_runs_again_for_another_version_of_the_interpreter(cluster: Cluster) -> None:
    assert submit(cluster).wait()["executionState"] == "succeeded"
    (kept(cluster) / ".complete").write_text("3.4 /usr/bin/python3.4\n")
    job = submit(cluster)
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert (job.log("stdout.txt"), job.log("stdout-job_prep.txt")) == ("once\n", "made\n\n")


def test_it_runs_again_for_an_environment_that_was_built_anew(cluster: Cluster) -> None:
    """What it had installed there has gone with the old one."""
    environment = {"manager": "virtualenv", "python": None, "buildDependencies": [], "dependencies": [], "hash": "e1"}
    folder = cluster.roots[0] / "envs" / "e1"
    prepare = 'python -c \'import sys; open(sys.prefix + "/installed", "w")\'; echo prepared'
    logs = []
    for round in range(3):
        if round == 2:
            shutil.rmtree(folder)
        # A wheel of pip is unpacked into each environment, which takes seconds.
        job = submit(cluster, prepare, command="true", python_env=environment)
        assert job.wait()["executionState"] == "succeeded", job.said()
        assert (folder / "installed").exists()
        logs.append(job.log("stdout-job_prep.txt"))
    assert logs == ["prepared\n", "", "prepared\n"]


def test_without_the_key_it_runs_for_every_job(cluster: Cluster) -> None:
    for _ in range(2):
        job = submit(cluster, "echo [$BATCHAI_PREPARATION_DIR]", None, command="echo [$BATCHAI_PREPARATION_DIR]")
        assert job.wait()["executionState"] == "succeeded", job.said()
        assert (job.log("stdout-job_prep.txt"), job.log("stdout.txt")) == ("[]\n", "[]\n")
    assert not (cluster.roots[0] / "prepared").exists()


def test_a_failed_one_is_wiped(cluster: Cluster) -> None:
    failed = submit(cluster, PREPARE + "; exit 3").wait()
    assert (failed["errors"][0]["code"], failed["exitCode"]) == ("JobPreparationFailed", 3)
    assert not kept(cluster).exists()
    job = submit(cluster)
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert job.log("stdout.txt") == "once\n"


def test_a_killed_one_is_wiped(cluster: Cluster) -> None:
    killed = submit(cluster, PREPARE + "; sleep 600")
    wait_for(lambda: (kept(cluster) / "made").exists())
    os.kill(killed.agents[0].pid, signal.SIGKILL)
    killed.agents[0].wait()
    job = submit(cluster)
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert (job.log("stdout.txt"), job.log("stdout-job_prep.txt")) == ("once\n", "made\n\n")


def test_another_agent_on_the_disk_is_waited_for(cluster: Cluster) -> None:
    kept(cluster).parent.mkdir(parents=True)
    with open(f"{kept(cluster)}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = submit(cluster)
        wait_for(lambda: "waiting for another job's agent that makes the same job preparation" in waiting.log("execution.log"))
        waiting.cancel("ann", "enough")
        assert waiting.wait()["terminated"]
        job = submit(cluster)
        wait_for(lambda: "waiting for another" in job.log("execution.log"))
        kept(cluster).mkdir()
        (kept(cluster) / "made").write_text("by the other\n")
        ours = f"{sys.version_info[0]}.{sys.version_info[1]} {os.path.realpath(sys.executable)}"
        (kept(cluster) / ".complete").write_text(f"{ours}\n")
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert job.log("stdout.txt") == "by the other\n"


def test_a_place_that_can_t_be_written_is_a_sentence(cluster: Cluster) -> None:
    cluster.roots[0].mkdir(parents=True)
    (cluster.roots[0] / "prepared").touch()
    job = submit(cluster)
    verdict = job.wait()
    assert verdict["errors"][0]["code"] == "NodeSetupFailed"
    assert verdict["reason"].startswith(f"job preparation on node-0 ({socket.gethostname()}) can't use the disk: [Errno 17]"), (
        job.said()
    )


def test_a_full_disk_is_a_sentence(cluster: Cluster) -> None:
    folder = kept(cluster).parent
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=1", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("no small disk can be mounted here")
    try:
        job = submit(cluster)
        reason = job.wait()["reason"]
    finally:
        subprocess.run(["umount", folder], check=True)
    assert reason.startswith(f"a disk of node-0 ({socket.gethostname()}) was full while job preparation: make space"), (
        job.said()
    )


def test_the_cluster_s_python_may_be_a_name(cluster: Cluster) -> None:
    program = cluster.folder / "own" / "python9"
    program.parent.mkdir()
    program.symlink_to(sys.executable)
    own = {"PATH": f"{os.environ['PATH']}:{program.parent}"}
    job = cluster.submit("echo ${PATH%%:*}", environment=own, trainer="python9")
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert job.log("stdout.txt") == f"{program.parent}\n"
    assert f"training interpreter: {program}\n" in job.log("execution.log")


def test_a_python_that_is_not_there(cluster: Cluster) -> None:
    job = cluster.submit("true", trainer="~/none/python9", preparation="echo begun")
    verdict = job.wait()
    assert verdict["errors"][0]["code"] == "NodeSetupFailed"
    assert verdict["reason"] == (
        f"there is no program ~/none/python9 on node-0 ({socket.gethostname()}): install it there, or set python: in the cluster"
        " document to the interpreter that trains"
    )
    assert job.log("stdout-job_prep.txt") == ""
