"""Who ends a job on a real Slurm decides what becomes of it: a person, the time limit, or a job that is more urgent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from slurm_daemons import SlurmDaemons, slurm_daemons
from ssh_world import WAITS, HereClient, config, describe, ended, running

RETRIED = json.dumps({**json.loads(config(2)), "retries": 1})


@pytest.fixture
def here(world: Any, slurm: SlurmDaemons, monkeypatch: pytest.MonkeyPatch) -> Any:
    world.environment["SLURM_CONF"] = str(slurm.config)
    yield HereClient(world, monkeypatch)
    world.wait(lambda: not slurm.ask("squeue", "-h"), what="jobs are left")


def cluster(world: Any, **changes: Any) -> None:
    describe(world, {"engine": "slurm", "root": str(world.root / "node roots"), "exclusive": True, **changes})


def test_scancel_ends_the_job(world: Any, here: HereClient, slurm: SlurmDaemons) -> None:
    """One that would start again if it had failed stays ended; the ranks get their SIGTERM."""
    cluster(world)
    here.submit(world.project(WAITS, batchai=RETRIED))
    run = running(world)
    number = slurm.ask("squeue", "-h", "-o", "%i").strip()
    slurm.ask("scancel", number)
    run = ended(world, run)
    assert (run.info.status, run.data.tags["batchai.reason"]) == ("KILLED", f"Slurm job {number} was cancelled (scancel)")
    verdict = world.folder() / "batchai" / "attempts" / "1" / "verdict" / "verdict.json"
    assert '"by":"agent-0"' in verdict.read_text() and "batchai.attempt" not in run.data.tags


def test_scancel_of_a_job_that_waits(world: Any, here: HereClient, slurm: SlurmDaemons) -> None:
    """No agent ever was there: the follower gives the verdict."""
    cluster(world, options=["--hold"])
    run = here.submit(world.project(WAITS, batchai=RETRIED))
    number = slurm.ask("squeue", "-h", "-o", "%i").strip()
    slurm.ask("scancel", number)
    run = ended(world, run)
    assert (run.info.status, run.data.tags["batchai.reason"]) == ("KILLED", f"Slurm job {number} was cancelled (scancel)")


def test_a_prolog_that_fails(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm cancels the job, as a person would, though node 0 has its task already: the job starts again."""
    prolog, flag = world.root / "prolog", world.root / "broken"
    # Time enough for node 0's agent to come, if srun let it.
    prolog.write_text(f"#!/bin/sh\n[ $SLURMD_NODENAME != n1 ] || [ ! -e '{flag}' ] || {{ sleep 2; exit 1; }}\n")
    prolog.chmod(0o755)
    flag.touch()
    with slurm_daemons(2, Prolog=str(prolog)) as slurm:
        world.environment["SLURM_CONF"] = str(slurm.config)
        cluster(world)
        run = HereClient(world, monkeypatch).submit(world.project("print('trained')", batchai=RETRIED))
        world.wait(lambda: "Prolog error" in slurm.ask("sinfo", "-h", "-R"), what="the prolog fails")
        flag.unlink()
        slurm.ask("scontrol", "update", "NodeName=n1", "State=RESUME")
        run = ended(world, run)
        assert run.info.status == "FINISHED" and run.data.tags["batchai.attempt"] == "2"
        world.wait(lambda: not slurm.ask("squeue", "-h"), what="jobs are left")
        world.wait(lambda: not world.followers(), what="a follower still asks Slurm")


def test_slurms_time_limit(world: Any, here: HereClient, slurm: SlurmDaemons) -> None:
    """Its end would be the same the next time."""
    cluster(world)
    here.submit(world.project(WAITS, batchai=RETRIED))
    run = running(world)
    number = slurm.ask("squeue", "-h", "-o", "%i").strip()
    slurm.ask("scontrol", "update", f"jobid={number}", "EndTime=now+5")
    run = ended(world, run)
    assert run.info.status == "FAILED"
    assert run.data.tags["batchai.reason"].startswith(f"Slurm job {number} has reached Slurm's time limit: raise constraints")
