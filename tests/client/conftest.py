"""Fixtures of the client's tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from job_folder import JobFolder
from relay_world import Gone, StoreClient, Time

from mlflow_batchai.follower import follower, keeper
from mlflow_batchai.job.lease import Lease
from mlflow_batchai.tracking import runs
from mlflow_batchai.tracking.relay import Relay

# Machines are slow at times; the examples are the same in every run.
settings.register_profile("batchai", deadline=None, derandomize=True, database=None)
settings.load_profile("batchai")


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., JobFolder]:
    """Makes job folders; keyword arguments go into the plan."""

    def make(nodes: int = 1, name: str = "share", **plan: Any) -> JobFolder:
        return JobFolder(tmp_path / name, nodes, **plan)

    return make


@pytest.fixture
def relayed(folder, store_template, tmp_path):
    """(job folder, client, makes a relay as a new process would)"""
    shutil.copy(store_template, tmp_path / "m.db")
    tracking = runs.absolute("sqlite:///m.db", tmp_path)
    real = runs.client(tracking)
    experiment = real.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    run = runs.create(real, experiment, {runs.TAG_JOB: "toy"}, {}, None, None)
    prefix = "$AZ_BATCHAI_MOUNT_ROOT/share"
    made = folder(
        runId=run.info.run_id,
        metrics=[{"name": "f1", "regex": r"f1 (\S+)", "step": None}],
        model={"path": None, "register": "net", "name": "model", "alias": ["champion"], "promoteIf": None},
        outputDirectories=[{"id": "M", "pathPrefix": prefix, "pathSuffix": "m"}],
    )
    client = StoreClient(real)
    time = Time()

    def relay():
        lease = Lease(made.job, time.clock, time.sleep)
        if not lease.acquire():
            return None
        return Relay(made.job, client, lease)

    return made, client, relay


@pytest.fixture
def following(relayed, monkeypatch):
    """(job folder, client, follows): the follower's loop without its waiting."""
    made, client, _ = relayed
    made.handle()
    naps = []

    def nap(seconds):
        naps.append(seconds)
        assert len(naps) < 50, "it goes on for ever"

    over = keeper.Keeper.over
    monkeypatch.setattr(follower.time, "sleep", nap)
    monkeypatch.setattr(follower, "LEAVE_TROUBLE_SECONDS", 0.1)
    monkeypatch.setattr(keeper.Keeper, "over", lambda kept, attempt, seconds: over(kept, attempt, min(seconds, 0.05)))
    monkeypatch.setattr(keeper.Watch, "seconds", 0.01)
    monkeypatch.setattr(follower.runs, "client", lambda tracking: client)
    monkeypatch.setattr(keeper.clusters, "load", lambda name: (type("C", (), {"engine": Gone()})(), []))
    return made, client, lambda: follower.follow(made.job, None)
