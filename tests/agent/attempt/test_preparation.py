"""Job preparation that may be kept runs once per content on a node; what a failed or killed one left is never used."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from node_world import Cluster, Job
from waiting import wait_for

PREPARE = 'echo once >> "$BATCHAI_PREPARATION_DIR/made"; ls -A -I .venv "$BATCHAI_PREPARATION_DIR"; echo $TOOLS'
USE = 'cat "$BATCHAI_PREPARATION_DIR/made"'


def submit(cluster: Cluster, preparation: str = PREPARE, cache: str | None = "0123456789abcdef", **changes: Any) -> Job:
    return cluster.submit(changes.pop("command", USE), preparation=preparation, preparationCache=cache, **changes)


def prepared(cluster: Cluster, *arguments: Any, **changes: Any) -> tuple[str, str]:
    """What a job's command, and its preparation, said, when it has succeeded."""
    job = submit(cluster, *arguments, **changes)
    assert job.wait()["executionState"] == "succeeded", job.said()
    return job.log("stdout.txt"), job.log("stdout-job_prep.txt")


def kept(cluster: Cluster) -> Path:
    return cluster.roots[0] / "prepared" / "0123456789abcdef"


def test_it_runs_once_for_a_content(cluster: Cluster) -> None:
    variables = [{"name": "TOOLS", "value": "$BATCHAI_PREPARATION_DIR/tools"}]
    assert prepared(cluster, environmentVariables=variables) == ("once\n", f"made\n{kept(cluster)}/tools\n")
    assert prepared(cluster) == ("once\n", "")
    assert prepared(cluster, cache="f" * 16) == ("once\n", "made\n\n")
    # Of another version of the interpreter.
    (kept(cluster) / ".complete").write_text("3.4 /usr/bin/python3.4\n")
    assert prepared(cluster) == ("once\n", "made\n\n")


# An environment without pip, which takes seconds to unpack.
BARE = """
start = runtime.Runtime.start
def bare(self, task, argv, *more, **named):
    start(self, task, [*argv, "--without-pip"] if "venv" in argv else argv, *more, **named)
runtime.Runtime.start = bare
"""


def test_it_runs_again_for_an_environment_that_was_built_anew(cluster: Cluster) -> None:
    """What it had installed there has gone with the old one."""
    environment = {"manager": "virtualenv", "python": None, "buildDependencies": [], "dependencies": [], "hash": "e1"}
    folder = cluster.roots[0] / "envs" / "e1"
    prepare = 'python -c \'import sys; open(sys.prefix + "/installed", "w")\'; echo prepared'
    logs = []
    for built in ("at first", "before", "anew"):
        if built == "anew":
            shutil.rmtree(folder)
        logs.append(prepared(cluster, prepare, command="true", python_env=environment, patch=BARE)[1])
        assert (kept(cluster) / ".venv" / "installed").exists() and not (folder / "installed").exists()
    assert logs == ["prepared\n", "", "prepared\n"]


# A package that needs no build, a program of it, and what it says of itself.
INSTALL = """
mkdir -p pkg/own-1.0.dist-info; cd pkg; echo 'def main(): print("ours")' > own.py
printf 'Metadata-Version: 2.1\\nName: own\\nVersion: 1.0\\n' > own-1.0.dist-info/METADATA
printf 'Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n' > own-1.0.dist-info/WHEEL
printf '[console_scripts]\\nown = own:main\\n' > own-1.0.dist-info/entry_points.txt
printf 'own.py,,\\nown-1.0.dist-info/METADATA,,\\nown-1.0.dist-info/WHEEL,,\\nown-1.0.dist-info/RECORD,,\\n' > own-1.0.dist-info/RECORD
python -m zipfile -c own-1.0-py3-none-any.whl own.py own-1.0.dist-info
pip install -q --no-index ./own-1.0-py3-none-any.whl; pip3 uninstall -qy numpy; command -v pip
"""
LOOK = "own; python -c 'import sys, own, numpy; print(sys.prefix); print(numpy.__file__)'; command -v own pytest"


@pytest.mark.parametrize("cache", [None, "0123456789abcdef"])
def test_what_it_installs_is_the_job_s_own(cluster: Cluster, cache: str | None) -> None:
    """Preparation and ranks have an environment over the cluster's interpreter, which stays as it was."""
    before = {path.name for path in Path(sys.prefix, "bin").iterdir()}
    job = submit(cluster, INSTALL, cache, command=LOOK)
    assert job.wait()["executionState"] == "succeeded", job.said()
    venv = kept(cluster) / ".venv" if cache else cluster.roots[0] / "jobs" / job.plan.job / "venv"
    said = job.log("stdout.txt").splitlines()
    assert said == ["ours", str(venv), numpy.__file__, f"{venv}/bin/own", f"{venv}/bin/pytest"]
    assert job.log("stdout-job_prep.txt") == f"{venv}/bin/pip\n"
    assert importlib.util.find_spec("own") is None
    assert {path.name for path in Path(sys.prefix, "bin").iterdir()} == before
    if cache:
        assert prepared(cluster, INSTALL, cache, command="own") == ("ours\n", "")
    plain = cluster.submit("echo ${PATH%%:*}")
    assert plain.wait()["executionState"] == "succeeded"
    assert plain.log("stdout.txt") == f"{Path(sys.executable).parent}\n", "without a preparation there is none"


@pytest.mark.parametrize("end", ["exit 3", "sleep 600"])
def test_an_unfinished_one_is_wiped(cluster: Cluster, end: str) -> None:
    job = submit(cluster, f"{PREPARE}; {end}")
    if end == "exit 3":
        verdict = job.wait()
        assert (verdict["errors"][0]["code"], verdict["exitCode"]) == ("JobPreparationFailed", 3)
        assert not kept(cluster).exists()
    else:
        wait_for(lambda: (kept(cluster) / "made").exists())
        job.agents[0].kill()
        job.agents[0].wait()
    assert prepared(cluster) == ("once\n", "made\n\n")


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
        ours = f"venv {sys.version_info[0]}.{sys.version_info[1]} {os.path.realpath(sys.executable)}"
        (kept(cluster) / ".complete").write_text(f"{ours}\n")
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert job.log("stdout.txt") == "by the other\n"


@pytest.mark.parametrize("disk", ["a file", "full"])
def test_a_disk_that_takes_nothing_is_a_sentence(cluster: Cluster, disk: str) -> None:
    folder = kept(cluster).parent
    if disk == "full":
        folder.mkdir(parents=True)
        argv = ["mount", "-t", "tmpfs", "-o", "nr_inodes=1", "tmpfs", str(folder)]
        if subprocess.run(argv, capture_output=True, check=False).returncode != 0:
            pytest.skip("no small disk can be mounted here")
    else:
        folder.parent.mkdir(parents=True)
        folder.touch()
    try:
        verdict = submit(cluster).wait()
    finally:
        if disk == "full":
            subprocess.run(["umount", folder], check=True)
    assert verdict["errors"][0]["code"] == "NodeSetupFailed"
    words = (
        "a disk of node-0 ({}) was full while job" if disk == "full" else "job preparation on node-0 ({}) can't use the disk"
    )
    assert verdict["reason"].startswith(words.format(socket.gethostname()))


def test_a_python_that_is_not_there(cluster: Cluster) -> None:
    job = cluster.submit("true", trainer="~/none/python9", preparation="echo begun")
    verdict = job.wait()
    assert verdict["errors"][0]["code"] == "NodeSetupFailed"
    assert verdict["reason"].startswith(f"there is no program ~/none/python9 on node-0 ({socket.gethostname()}): ")
    assert job.log("stdout-job_prep.txt") == ""
