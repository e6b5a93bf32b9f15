"""A real Slurm whose controller or node is killed, which ends a job, or which forgets it while nobody looks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from command_line import Cli
from slurm_daemons import SlurmDaemons, slurm_daemons
from ssh_world import WAITS, HereClient, config, describe, ended, running
from world import argv

from mlflow_batchai.tracking import runs

AWAY = "Slurm's controller doesn't answer on this machine"

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmDaemons]:
    """Its commands need 1 or 2 s to find out that the controller is away, not 9 or 18."""
    with slurm_daemons(4, SlurmdTimeout="5", MessageTimeout="2") as made:
        yield made


@pytest.fixture
def here(world: Any, monkeypatch: pytest.MonkeyPatch) -> HereClient:
    return HereClient(world, monkeypatch)


def describe_slurm(world: Any, slurm: SlurmDaemons) -> None:
    world.environment["SLURM_CONF"] = str(slurm.config)
    describe(world, {"engine": "slurm", "root": str(world.root / "node roots"), "exclusive": True})


@pytest.fixture
def cluster(world: Any, slurm: SlurmDaemons) -> Iterator[SlurmDaemons]:
    """Its four nodes; afterwards all daemons run again, and no job."""
    describe_slurm(world, slurm)
    names = list(slurm.daemons)
    yield slurm
    for name in names:
        if name not in slurm.daemons:
            slurm.start(name)
    slurm.ask("scancel", "--me")
    slurm.wait_idle()


def go(world: Any) -> None:
    """Let the ranks end."""
    (world.root / "share" / "go").touch()


def shown(slurm: SlurmDaemons, run: Any, field: str) -> str:
    """A field (of ``squeue -o``) of a run's job; empty if Slurm knows it no more."""
    lines = [line.split("|") for line in slurm.ask("squeue", "-h", "-t", "all", "-o", f"{field}|%k").splitlines()]
    return next((value for value, folder in lines if folder == runs.tags_of(run)["batchai.folder"]), "")


def agent(world: Any, run: Any, node: int) -> psutil.Process:
    words = {f"--node={node}", f"--folder={runs.tags_of(run)['batchai.folder']}"}
    (found,) = [process for process in world.agents() if words <= set(argv(process))]
    return found


def crash(slurm: SlurmDaemons, name: str) -> None:
    """The power of a node fails: its slurmd and all that it has started, agents among it, are gone at once."""
    steps = [(step, step.children(recursive=True)) for step in slurm.steps(name)]
    slurm.kill(name)
    for step, children in steps:
        for process in [step, *children]:
            process.kill()


def test_the_controller_is_away_for_a_minute(world: Any, cluster: SlurmDaemons, here: HereClient) -> None:
    """Meanwhile one job loses a node, and another one the slurmd of a node: each ends right, the first before it is back."""
    project = world.project(WAITS, batchai=config(2))
    loses = here.submit(project)
    running(world)
    stays = here.submit(project)
    running(world)
    nodes = {name: part for run in (loses, stays) for part, name in ((run, shown(cluster, run, "%N")),)}
    assert set(nodes) == {"n[0-1]", "n[2-3]"}
    began = time.monotonic()
    cluster.kill("slurmctld")
    lost, crippled = ("n1", "n3") if nodes["n[0-1]"] is loses else ("n3", "n1")
    crash(cluster, lost)
    cluster.kill(crippled)
    run = ended(world, loses)
    assert (run.info.status, run.data.tags["batchai.errorCode"]) == ("FAILED", "NodeLost")
    assert run.data.tags["batchai.reason"].startswith("node-1 has not been heard of for ")
    assert time.monotonic() - began > 60 and world.client.get_run(stays.info.run_id).info.status == "RUNNING"
    for name in ("slurmctld", crippled):
        cluster.start(name)
    world.wait(lambda: shown(cluster, stays, "%T") == "RUNNING")
    go(world)
    assert ended(world, stays).info.status == "FINISHED" and world.points("loss", stays) == [(0, 0.5), (1, 0.25)]
    world.wait(lambda: not cluster.ask("squeue", "-h"), what="Slurm's job of the first goes on")


@pytest.mark.parametrize("away", [False, True])
def test_the_first_node_is_lost(world: Any, cluster: SlurmDaemons, here: HereClient, away: bool) -> None:
    """Nobody is left on the nodes who could give the verdict: Slurm is believed. One that is away ends its job afterwards."""
    here.submit(world.project(WAITS, batchai=config(2)))
    run = running(world)
    first = shown(cluster, run, "%B")
    if away:
        cluster.kill("slurmctld")
    crash(cluster, first)
    run = ended(world, run)
    reason = run.data.tags["batchai.reason"]
    assert (run.info.status, run.data.tags["batchai.errorCode"]) == ("FAILED", "NodeLost"), reason
    assert reason.startswith("node-0 was lost: it has not been heard of for ")
    assert (AWAY if away else "has lost a node: of 2 it has 1 (n") in reason
    if away:
        world.wait(lambda: AWAY in world.client.get_run(run.info.run_id).data.tags.get("batchai.notes", ""))
        cluster.start("slurmctld")
        world.wait(lambda: shown(cluster, run, "%T") not in ("", "RUNNING"), what="Slurm's job goes on")
    world.wait(lambda: not cluster.ask("squeue", "-h"), what="Slurm's job goes on")


def test_the_time_limit(world: Any, cluster: SlurmDaemons, here: HereClient) -> None:
    """The ranks get their SIGTERM and the agents give the verdict; Slurm looks every half a minute whose time is up."""
    train = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
        print("up", flush=True)
        time.sleep(600)
    """
    here.submit(world.project(train, batchai=config(2)))
    run = running(world)
    cluster.ask("scontrol", "update", f"JobId={shown(cluster, run, '%i')}", "EndTime=now+5")
    run = ended(world, run)
    assert run.info.status == "FAILED" and shown(cluster, run, "%T") == "TIMEOUT"
    assert world.log(run=run).count("saved") == 2
    world.wait(lambda: not list((world.root / "node roots").iterdir()), what="the nodes' folders go")


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_controller_dies_during_a_submit(
    world: Any, cluster: SlurmDaemons, here: HereClient, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Before it has the job, or before it could say so: one sentence, the run FAILED; no job runs once it is back."""
    # An sbatch that kills it; the one that only asks (--test-only) does not.
    real, controller = shutil.which("sbatch"), cluster.daemons["slurmctld"].pid
    lost = f'"{real}" "$@" >/dev/null; kill {controller}; echo "sbatch: error: Socket timed out" >&2; exit 1'
    kills = {"before": f'kill -9 {controller}; exec "{real}" "$@"', "after": lost}[when]
    (world.root / "bin").mkdir()
    sbatch = world.root / "bin" / "sbatch"
    sbatch.write_text(f'#!/bin/sh\ncase " $* " in *" --test-only "*) exec "{real}" "$@" ;; esac\n{kills}\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent), prepend=":")
    try:
        with pytest.raises(Exception, match=AWAY) as raised:
            here.submit(world.project("print('ran')", batchai=config(2)))
    finally:
        cluster.daemons.pop("slurmctld").wait()
    assert "Traceback" not in str(raised.value) and "\n" not in str(raised.value)
    (run,) = world.runs()
    assert run.info.status == "FAILED" and AWAY in run.data.tags["batchai.reason"]
    if when == "before":
        assert AWAY in here.refused(1) and len(world.runs()) == 1
    secrets = [path for path in (world.root / "share" / ".batchai").glob("slurm-*/batchai-*") if path.suffix != ".out"]
    assert secrets == []
    cluster.start("slurmctld")
    cluster.wait_idle()
    world.wait(lambda: not cluster.ask("squeue", "-h"), what="jobs are left")
    assert bool(shown(cluster, run, "%T")) == (when == "after")
    assert not list((world.root / "share").rglob("stdout.txt")), "no agent has begun"


@pytest.mark.parametrize("accounting", [False, True])
def test_a_job_that_slurm_has_forgotten(world: Any, here: HereClient, cli: Cli, accounting: bool) -> None:
    """``mlflow run`` and the followers are killed; one job ends, another one dies; later both are attached."""
    with slurm_daemons(2, accounting, MinJobAge="2") as slurm:
        describe_slurm(world, slurm)
        project = world.project(WAITS, batchai=config(1))
        client = world.start(world.command(project))
        dies = running(world, 1)
        ends = here.submit(project)
        running(world, 1)
        client.kill()
        client.wait()
        assert world.lose_followers() == 1
        agent(world, dies, 0).kill()
        go(world)
        number = shown(slurm, ends, "%i")
        world.wait(lambda: not slurm.ask("squeue", "-h", "-t", "all"), what="Slurm forgets them")
        assert number and {world.client.get_run(run.info.run_id).info.status for run in (dies, ends)} == {"RUNNING"}
        for run in (dies, ends):
            cli("job", "attach", run.data.tags["batchai.job"])
        found, lost = ended(world, ends), ended(world, dies)
        assert found.info.status == "FINISHED" and world.points("loss", ends) == [(0, 0.5), (1, 0.25)]
        assert (lost.info.status, lost.data.tags["batchai.errorCode"]) == ("FAILED", "NodeLost")
        told = " but FAILED" if accounting else ""
        assert f"has ended, and Slurm remembers no more of it{told}" in lost.data.tags["batchai.reason"]
        assert accounting or "but" not in lost.data.tags["batchai.reason"]
        assert not list((world.root / "share" / ".batchai").glob("slurm-*/batchai-*-1"))
        world.wait(lambda: not list((world.root / "node roots").iterdir()), what="the nodes' folders go")
        world.wait(lambda: not world.followers(), what="a follower still asks Slurm")
