"""Jobs in containers: real agents, a real Apptainer, toy ranks; whatever happens, nothing of the container is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import apptainer_engine
import pytest
from apptainer_engine import Apptainer
from argument_watch import watch
from image_registry import image_registry
from node_world import SAVES, Cluster, Job
from waiting import wait_for

from mlflow_batchai.agent.processes import proc

SECRET = "s3cret-of-the-job $(id) `id`\nits second line"
PASSWORD = "p4ssword-of-the-registry"


@pytest.fixture(scope="module")
def apptainer() -> Iterator[Apptainer]:
    with apptainer_engine.apptainer() as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test may leave a process of Apptainer's."""
    yield
    wait_for(lambda: not instances(), what=instances)


def instances() -> list[str]:
    lines = [" ".join(proc.command_line(pid)) for pid in proc.pids()]
    return [line for line in lines if line.startswith(("Apptainer ", "appinit"))]


def submit(cluster: Cluster, apptainer: Apptainer, command: str, container: dict | None = None, **changes) -> Job:
    environment = {**apptainer.environment, **changes.pop("environment", {})}
    image = {"image": str(apptainer.image), "engine": "apptainer", **(container or {})}
    return cluster.submit(command, container=image, environment=environment, **changes)


def test_all_of_a_job_runs_in_one_container(cluster: Cluster, apptainer: Apptainer, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "in.txt").write_text("from the node\n")
    with watch(SECRET[:17]):
        job = submit(
            cluster,
            apptainer,
            'cat /made-by-preparation; echo "[$SECRET] $CONSTANT"; cat /data/in.txt; touch /data/out ~/at-home; pwd;'
            ' echo "$PATH|$LD_LIBRARY_PATH|$HOME"; python -c "import sys; print(sys.executable)";'
            ' cat "$AZ_BATCHAI_MOUNT_ROOT/share/seen"; id -u; hostname; echo "[$CANARY]"; touch "$AZ_BATCHAI_JOB_TEMP/mine";'
            " ls -d /work /usr/bin/podman 2>/dev/null; exit 3",
            container={"volumes": [f"{data}:/data"], "environment": {"CONSTANT": "constant", "LD_LIBRARY_PATH": "/of/the/job"}},
            preparation="echo made > /made-by-preparation; echo prepared",
            environmentVariables=[{"name": "PATH", "value": "$PATH:/more"}],
            secrets={"SECRET": SECRET},
            environment={"CANARY": "leaked"},
        )
        (cluster.share / "seen").write_text("through the mount\n")
        verdict = job.wait()
    assert (verdict["executionState"], verdict["exitCode"]) == ("failed", 3), job.said()
    root = cluster.roots[0]
    temp, own = root / "jobs" / job.plan.job / "temp", root / "jobs" / job.plan.job / "bin"
    path = f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{own}:/more"
    assert job.log("stdout.txt").splitlines() == [
        "made",
        *f"[{SECRET}] constant".splitlines(),
        "from the node",
        f"{temp}/code",
        f"{path}|/of/the/job:/.singularity.d/libs|/root",
        "/usr/bin/python3",
        "through the mount",
        "0",
        os.uname().nodename,
        "[]",
    ]
    assert job.log("stderr.txt") == ""
    assert job.log("stdout-job_prep.txt") == "prepared\n"
    assert (data / "out").exists() and not Path("/root/at-home").exists()
    assert job.processes() == set()
    assert not (root / "container.json").exists()
    assert os.listdir(root / "jobs") == []


def test_cancel_asks_first_and_then_ends_all(cluster: Cluster, apptainer: Apptainer) -> None:
    job = submit(cluster, apptainer, SAVES, terminateSeconds=30.0)
    wait_for(lambda: "started" in job.log("stdout.txt"), what=job.said)
    job.cancel("ann", "enough")
    assert job.wait()["terminated"], job.said()
    assert job.log("stdout.txt") == "started\nsaving\nsaved\n"
    assert job.processes() == set()


def test_what_runs_in_the_container_ends_with_its_agent(cluster: Cluster, apptainer: Apptainer) -> None:
    job = submit(cluster, apptainer, "trap '' TERM; echo go; while :; do sleep 0.05; done")
    wait_for(lambda: "go" in job.log("stdout.txt"), what=job.said)
    assert job.processes() and instances()
    os.kill(job.agents[0].pid, signal.SIGKILL)
    wait_for(lambda: not job.processes(), what="ranks have outlived their agent")


def test_without_a_pid_namespace_nobody_else_is_ended(cluster: Cluster, apptainer: Apptainer, tmp_path: Path) -> None:
    """The agent lives in a namespace of the test's own, whose other process stands for all others of the node."""
    other = f'sleep 600 & "$@"; kill $!; wait $!; echo $? >{tmp_path}/other'
    enter = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", other, "sh"]
    job = submit(cluster, apptainer, "echo never", environment=apptainer.without_pid_namespaces(tmp_path), enter=[enter])
    assert job.wait()["reason"].endswith(
        "on node-0: Apptainer gives it no PID namespace of its own, with which all that runs in it would end: the nodes'"
        " administrator must set 'allow pid ns = yes' in apptainer.conf"
    )
    assert (tmp_path / "other").read_text() == f"{128 + signal.SIGTERM}\n"


def test_an_image_of_a_registry_that_knows_its_users(cluster: Cluster, apptainer: Apptainer, tmp_path: Path) -> None:
    if shutil.which("mksquashfs") is None:
        pytest.skip("there is no mksquashfs on this machine (apt-get install squashfs-tools)")
    layer = small_layer(tmp_path)
    with image_registry(layer, "team/toy", ["FROM=the image"], "ada", PASSWORD) as server, watch(PASSWORD):
        container = {"image": f"{server}/team/toy:1", "server": server, "credentials": True}
        wrong = submit(cluster, apptainer, "echo never", container, told={"registry": {"username": "bob", "password": "x"}})
        verdict = wrong.wait()
        assert (
            f"the container of image {server}/team/toy:1 on node-0: it can't be pulled: Unable to handle" in verdict["reason"]
        )
        login = {"username": "ada", "password": PASSWORD}
        job = submit(cluster, apptainer, 'echo "$FROM"', container, told={"registry": login})
        assert job.wait()["executionState"] == "succeeded", job.said()
    assert job.log("stdout.txt") == "the image\n"
    assert PASSWORD not in job.log("execution.log")


def test_what_is_missing_is_said(cluster: Cluster, apptainer: Apptainer) -> None:
    job = submit(cluster, apptainer, "echo never", {"image": "/nowhere/toy.sif"})
    assert job.wait()["reason"].endswith(
        "the container of image /nowhere/toy.sif on node-0: /nowhere/toy.sif can't be read: No such file or directory; correct"
        " its path"
    )
    job = submit(cluster, apptainer, "echo never", environment={"PATH": "/usr/bin:/bin"})
    verdict = job.wait()
    assert verdict["errors"][0]["code"] == "FailedStartingContainer"
    assert "node-0: Apptainer does not work (apptainer is not on PATH), and the cluster document says" in verdict["reason"]


def small_layer(folder: Path) -> Path:
    """A layer with a shell and two programs, and the libraries that they need."""
    root = folder / "small"
    for name in ("etc", "proc", "sys", "dev", "tmp"):
        (root / name).mkdir(parents=True)
    for program in ("/bin/sh", "/bin/cat", "/bin/ls"):
        needed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout.split()
        for file in [program, *(word for word in needed if word.startswith("/"))]:
            target = root / file[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    layer = folder / "small.tar"
    subprocess.run(["tar", "-C", str(root), "-cf", str(layer), "."], check=True)
    return layer
