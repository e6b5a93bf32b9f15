"""The control share is unmounted in the midst of a job, and mounted again: nothing is lost, nothing lies below its mount point."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from netns import Machines, Setup, unavailable
from node_world import Cluster, Job
from ssh_world import HereClient, config, describe, ended, on_machines, running
from waiting import wait_for

pytestmark = [
    pytest.mark.skipif(unavailable() is not None, reason=unavailable() or ""),
    pytest.mark.timeout(200),
]

AWAY_SECONDS = 15.0
STEPS = 220
# Every rank reports and writes a line ten times a second, for longer than the share is away.
REPORTS = f"""
    import time
    from mlflow_batchai.training import report
    print("up", flush=True)
    for step in range({STEPS}):
        print("line", step, flush=True)
        report.log(step=step, loss=1.0)
        time.sleep(0.1)
"""
LINES = [f"line {step}" for step in range(STEPS)]
TALKS = "trap 'exit 0' TERM; echo up; while :; do echo line; sleep 0.1; done"
HASTY = """
mounted.HEARTBEAT_SECONDS = 0.5
from mlflow_batchai.agent.share import sharefiles
sharefiles.AWAY_SECONDS = 8.0
"""


@pytest.fixture
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A share that is mounted here."""
    folder = tmp_path_factory.mktemp("mounted")
    behind, place = folder / "behind", folder / "mnt"
    behind.mkdir()
    place.mkdir()
    done = subprocess.run(["mount", "--bind", str(behind), str(place)], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=False)


@pytest.fixture
def machines(tmp_path_factory: pytest.TempPathFactory, mount: Path) -> Iterator[Machines]:
    with Machines(tmp_path_factory.mktemp("netns"), [Setup(share=mount)] * 3) as made:
        yield made


@pytest.fixture
def here(world: Any, machines: Machines, mount: Path, monkeypatch: pytest.MonkeyPatch) -> HereClient:
    describe(world, on_machines(machines, world, range(3)), share=str(mount))
    (world.root / ".ssh").mkdir()
    (world.root / ".ssh" / "config").write_text("Host *\n  ConnectTimeout 3\n")
    monkeypatch.setenv("HOME", str(world.root))
    return HereClient(world, monkeypatch)


def test_node_0_and_the_client_lose_it_for_a_while(world: Any, here: HereClient, machines: Machines, mount: Path) -> None:
    node = machines[0]
    run = here.submit(world.project(REPORTS, batchai=config(3)))
    running(world, 3)
    wait_for(lambda: "line 9\n" in world.log("stdout-0.txt"))
    node.run(["umount", "-l", node.share], check=True)
    subprocess.run(["umount", "-l", str(mount)], check=True)
    time.sleep(AWAY_SECONDS)
    assert node.run(["ls", "-A", node.share], check=True).stdout == ""
    # What is mounted anew may be another folder to the system.
    behind = mount.with_name("behind")
    assert os.listdir(mount) == []
    subprocess.run(["mount", "--bind", str(behind), str(mount)], check=True)
    node.run(["mount", "--bind", str(behind), node.share], check=True)
    run = ended(world, run, 90)
    assert run.info.status == "FINISHED", run.data.tags
    points = world.client.get_metric_history(run.info.run_id, "loss")
    assert [point.step for point in points] == list(range(STEPS))
    lines = world.artifact("logs/stdout.txt", run).splitlines()
    for rank in range(3):
        assert world.log(f"stdout-{rank}.txt", run).splitlines() == ["up", *LINES]
        assert [line[4:] for line in lines if line.startswith(f"[{rank}]")] == ["up", *LINES]
    assert "batchai.notes" not in run.data.tags, run.data.tags["batchai.notes"]
    world.wait_gone()


@contextlib.contextmanager
def own_mounts() -> Iterator[int]:
    """A process with a mount table of its own."""
    holder = subprocess.Popen(["unshare", "--mount", "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout and holder.stdout.readline()
        yield holder.pid
    finally:
        holder.kill()
        holder.communicate()


def test_a_node_that_has_lost_it_for_good(agents: Callable[..., Cluster], mount: Path) -> None:
    """It is waited for as a share that stalls; then the node says where it is missing."""
    cluster = agents(mount)
    with own_mounts() as pid:
        inside = ["nsenter", f"--mount=/proc/{pid}/ns/mnt"]
        job: Job = cluster.submit(TALKS, nodes=2, patch=HASTY, enter=[inside, []], lossSeconds=4.0, terminateSeconds=2.0)
        wait_for(lambda: job.log("stdout.txt").count("up") == 2, what=job.said)
        subprocess.run([*inside, "umount", "-l", str(mount)], check=True)
        begun = time.monotonic()
        job.agents[1].wait(60)
        job.agents[0].wait(60)
        assert time.monotonic() - begun > 8.0
        said = job.logs[0].read_text()
        assert "node-0: the share could not be used for " in said, said
        assert f"(the control share is not mounted at {mount})" in said, said
        assert os.listdir(f"/proc/{pid}/root{mount}") == []
        assert not job.processes()


def test_all_have_lost_it_when_the_job_ends(agents: Callable[..., Cluster], mount: Path, tmp_path: Path) -> None:
    """The last line, and the verdict, wait for longer than for a share that refuses them."""
    patch = "ending.DRAIN_SECONDS = sharefiles.PATIENCE_SECONDS = 0.5"
    end = tmp_path / "end"
    job = agents(mount).submit(f"echo up; until [ -e {end} ]; do sleep 0.1; done; echo the last line", nodes=2, patch=patch)
    wait_for(lambda: job.log("stdout.txt").count("up") == 2, what=job.said)
    subprocess.run(["umount", "-l", str(mount)], check=True)
    end.touch()
    time.sleep(5.0)
    assert os.listdir(mount) == []
    assert all(agent.poll() is None for agent in job.agents)
    subprocess.run(["mount", "--bind", str(mount.with_name("behind")), str(mount)], check=True)
    assert job.wait()["executionState"] == "succeeded"
    assert job.log("stdout.txt").count("the last line\n") == 2
    assert not job.processes()
