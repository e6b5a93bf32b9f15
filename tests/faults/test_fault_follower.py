"""Faults that agents can't tell of by the share: the follower brings them into the run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loop_disk import fill, loop_disk
from ssh_world import HereClient

from mlflow_batchai.plan import planning

HANGS = "import os, time; print('up', flush=True)\nwhile True: time.sleep(0.1); print('line', flush=True)"
TWO = "terminateGrace: 2\nproperties: {nodeCount: 2, horovodSettings: {}}"


@pytest.fixture
def here(world: Any, monkeypatch: pytest.MonkeyPatch) -> HereClient:
    """The client; a share that fails is given up in a fifteenth of the time."""
    monkeypatch.setattr(planning, "LOSS_SECONDS", 4.0)
    return HereClient(world, monkeypatch)


@pytest.fixture
def disk(world: Any, tmp_path: Path) -> Iterator[Path]:
    """A small file system as the control share of the cluster ``small``."""
    with loop_disk(tmp_path, 16) as place:
        (world.home / "clusters").mkdir(parents=True)
        (world.home / "clusters" / "small.yaml").write_text(f"share: {place}\n", encoding="utf-8")
        yield place
        world.close()


def running(world: Any, here: HereClient, batchai: str = TWO) -> Any:
    run = here.submit(world.project(HANGS, batchai=batchai))
    world.wait(lambda: (world.folder(run) / "stdouterr/stdout.txt").exists() and world.log(run=run).count("up") == 2)
    return run


def ended(world: Any, run: Any, seconds: float = 120) -> dict[str, str]:
    """The tags of a run that has failed, once nothing of it is left."""
    world.wait(lambda: world.client.get_run(run.info.run_id).info.status == "FAILED", seconds)
    world.wait_gone()
    tags: dict[str, str] = world.client.get_run(run.info.run_id).data.tags
    return tags


def test_a_share_that_gets_full(world: Any, here: HereClient, disk: Path) -> None:
    run = running(world, here, f"cluster: small\n{TWO}")
    fill(disk)
    begun = time.monotonic()
    tags = ended(world, run)
    assert time.monotonic() - begun < 60
    assert tags["batchai.errorCode"] == "ShareFailed"
    assert re.match(r"node-\d: the share is full \(No space left on device\); make room there", tags["batchai.reason"])
