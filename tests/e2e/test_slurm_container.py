"""Whole jobs in containers on a real Slurm, by a real Apptainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apptainer_engine
import pytest
from apptainer_engine import Apptainer
from command_line import Cli
from slurm_daemons import SlurmDaemons, slurm_daemons
from ssh_world import HereClient, config, describe, ended, running

from mlflow_batchai.agent.processes import proc

SECRET = "s3cr3t-canary-of-the-document"

TRAIN = """
    import os, sys
    from mlflow_batchai.training import report
    where = os.environ["APPTAINER_CONTAINER"], sys.executable
    print("node", os.environ["BATCHAI_NODE"], *where, "token", len(os.environ["TOKEN"]), "sees", os.environ["CUDA_VISIBLE_DEVICES"])
    report.log(step=0, loss=0.5)
"""

# Slurm and the agent each send it a SIGTERM.
SAVES = """
    import signal, sys, time
    def save(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(2)
        print("saved", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    print("up", flush=True)
    while True:
        time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def apptainer() -> Iterator[Apptainer]:
    with apptainer_engine.apptainer() as made:
        yield made


@pytest.fixture
def slurm(apptainer: Apptainer, tmp_path: Path) -> Iterator[SlurmDaemons]:
    """Its nodes have Apptainer on their PATH while ``loaded`` is there, as a site's module would have it."""
    (tmp_path / "loaded").touch()
    path = f'"export PATH={apptainer.environment["PATH"]}"'
    prolog = tmp_path / "prolog"
    prolog.write_text(f"#!/bin/sh\n[ ! -e '{tmp_path}/loaded' ] || echo {path}\n")
    prolog.chmod(0o755)
    with slurm_daemons(2, TaskProlog=str(prolog)) as made:
        yield made


def test_a_job_on_two_nodes(
    world: Any, slurm: SlurmDaemons, apptainer: Apptainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The image's Python trains; without Apptainer ``doctor`` and the job say so; nothing stays on the nodes."""
    world.environment["SLURM_CONF"] = str(slurm.config)
    here, cli = HereClient(world, monkeypatch), Cli(world)
    # The nodes' own Python has no framework: it is not what trains.
    roots = world.root / "node roots"
    keys = {"engine": "slurm", "root": str(roots), "python": "/usr/bin/python3", "exclusive": True, "gpusPerNode": 2}
    settings = {"imageSourceRegistry": {"image": str(apptainer.image)}}
    secrets = [{"name": "TOKEN", "value": SECRET}]
    batchai = config(2, horovod=False, pyTorchSettings={}, containerSettings=settings, secrets=secrets)
    describe(world, keys)
    project = world.project(TRAIN, batchai=batchai)
    with pytest.raises(Exception, match="needs containers: apptainer in the cluster document"):
        here.submit(project)
    assert world.runs() == []
    describe(world, {**keys, "containers": "apptainer"})
    run = ended(world, here.submit(project))
    assert run.info.status == "FINISHED", run.data.tags
    lines = sorted(line.split("] ")[-1] for line in world.artifact("logs/stdout.txt").splitlines())
    assert lines == [f"node {node} {apptainer.image} /usr/bin/python3 token {len(SECRET)} sees 0,1" for node in range(2)]
    assert world.points("loss") == [(0, 0.5)]

    def container() -> str:
        checks = json.loads(cli("doctor", "nc6", "-o", "json").out)["checks"]
        return {check["name"]: check["text"] for check in checks}["container"]

    assert container() == "Apptainer is there"
    (tmp_path / "loaded").unlink()
    sentence = (
        "Apptainer does not work (apptainer is not on PATH), and the cluster document says containers: apptainer: install it"
    )
    assert container().startswith(sentence)
    run = ended(world, here.submit(project))
    assert run.info.status == "FAILED" and sentence in run.data.tags["batchai.reason"]
    world.wait(lambda: not [path for path in roots.iterdir() if path.is_dir()], what="the nodes' folders go")
    world.wait(lambda: not slurm.ask("squeue", "-h"), what="jobs are left")
    world.wait(lambda: not world.followers(), what="a follower still asks Slurm")


def test_scancel_lets_ranks_save(
    world: Any, slurm: SlurmDaemons, apptainer: Apptainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's SIGTERM reaches Apptainer's own processes, too."""
    world.environment["SLURM_CONF"] = str(slurm.config)
    roots = world.root / "node roots"
    describe(
        world,
        {"engine": "slurm", "root": str(roots), "python": "/usr/bin/python3", "exclusive": True, "containers": "apptainer"},
    )
    settings = {"imageSourceRegistry": {"image": str(apptainer.image)}}
    batchai = config(2, horovod=False, pyTorchSettings={}, containerSettings=settings)
    HereClient(world, monkeypatch).submit(world.project(SAVES, batchai=batchai))
    run = running(world)
    inside = containers()
    assert len(inside) >= 2
    slurm.ask("scancel", "--me")
    run = ended(world, run)
    assert run.info.status == "KILLED" and "was cancelled (scancel)" in run.data.tags["batchai.reason"]
    assert world.log(run=run).count("saved") == 2
    world.wait(lambda: not inside & containers(), what="containers are left")
    world.wait(lambda: not list(roots.iterdir()), what="the nodes' folders go")
    world.wait(lambda: not slurm.ask("squeue", "-h"), what="jobs are left")
    world.wait(lambda: not world.followers(), what="a follower still asks Slurm")


def containers() -> set[int]:
    """Apptainer's processes on this machine."""
    return {pid for pid in proc.pids() if " ".join(proc.command_line(pid)).startswith(("Apptainer ", "appinit"))}
