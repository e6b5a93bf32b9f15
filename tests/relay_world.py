"""A job folder, a store, a relay between them that can be made to fail, and what a toy job says; fixtures for a conftest."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job_folder import JobFolder, line, report
from requests import HTTPError

from mlflow_batchai.agent import records
from mlflow_batchai.engines.base import Poll, PollState
from mlflow_batchai.errors import ClusterError
from mlflow_batchai.follower import follower, supervisor
from mlflow_batchai.job.events import EventReader
from mlflow_batchai.job.lease import Lease
from mlflow_batchai.tracking import runs
from mlflow_batchai.tracking.models import promotion
from mlflow_batchai.tracking.relay import Relay


class Crash(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


class StoreClient:
    """An MLflow client that fails before or after a call; after a Crash its process is dead, and no other call gets through."""

    def __init__(self, real):
        self._real = real
        self.calls = []
        self.before = {}
        self.after = {}
        self.dead = False

    def __getattr__(self, name):
        method = getattr(self._real, name)
        if not callable(method):
            return method

        def call(*arguments, **named):
            self.calls.append(name)
            self._fail(self.before, name)
            result = method(*arguments, **named)
            self._fail(self.after, name)
            return result

        return call

    def _fail(self, table, name):
        errors = table.get(name)
        error = Crash() if self.dead else errors.pop(0) if errors else None
        if error:
            self.dead = isinstance(error, Crash)
            raise error


class Time:
    now = 0.0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    """The time of everyone who looks at files."""
    time = Time()
    monkeypatch.setattr(records.TornFiles.__init__, "__defaults__", (time.clock,))
    monkeypatch.setattr(EventReader.__init__, "__defaults__", (None, False, time.clock, time.sleep))
    return time


class Gone:
    """An engine whose agents have all left."""

    poll_seconds = 1.0

    def poll(self, handle):
        return Poll(PollState.GONE, "gone", (0,))

    def poll_all(self, handles):
        return [self.poll(handle) for handle in handles]

    def cancel(self, handle):
        raise ClusterError("can't be ended from here")

    def close(self):
        pass


def history(client, run_id):
    run = client.get_run(run_id)
    return {
        key: [(point.step, point.value, point.timestamp) for point in client.get_metric_history(run_id, key)]
        for key in run.data.metrics
    }


def fill(made):
    made.segment(0, report(0, loss=1.5), line("f1 0.5\nEpoch 1/2\n2/2 - 0s - acc: 0.25"))
    made.segment(1, report(1, loss=0.5), line("f1 0.75\nEpoch 2/2\n2/2 - 0s - acc: 0.5"))


EXPECTED = {
    "loss": [(0, 1.5, 5), (1, 0.5, 5)],
    "f1": [(0, 0.5, 7), (1, 0.75, 7)],
    "acc": [(0, 0.25, 7), (1, 0.5, 7)],
}


class Always(Sequence):
    """An error at each call."""

    def __init__(self, make=lambda: ConnectionError("down")):
        self._make = make

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self._make()

    def pop(self, index):
        return self._make()


ALL = ("log_batch", "get_run", "set_tag", "update_run", "set_terminated", "log_artifacts", "log_artifact")


def down(client, make=lambda: ConnectionError("down")):
    for name in ALL:
        client.before[name] = Always(make)


def up(client):
    client.before.clear()


def http_error(code):
    return HTTPError(f"{code}", response=SimpleNamespace(status_code=code))


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., JobFolder]:
    """Makes job folders; keyword arguments go into the plan."""

    def make(nodes: int = 1, name: str = "share", **plan: Any) -> JobFolder:
        return JobFolder(tmp_path / name, nodes, **plan)

    return make


@pytest.fixture
def relayed(folder, store_template, tmp_path, monkeypatch):
    """(job folder, client, makes a relay as a new process would)"""
    monkeypatch.setattr(promotion, "MOVE_SECONDS", 0.0)
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

    over = supervisor.Supervisor.over
    monkeypatch.setattr(follower.time, "sleep", nap)
    monkeypatch.setattr(follower, "LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(supervisor.Supervisor, "over", lambda kept, attempt, seconds: over(kept, attempt, min(seconds, 0.05)))
    monkeypatch.setattr(supervisor.Watch, "seconds", 0.01)
    monkeypatch.setattr(follower.runs, "client", lambda tracking: client)
    cluster = SimpleNamespace(name="local", document=None, record=None, engine=Gone())
    monkeypatch.setattr(supervisor.clusters, "load", lambda name: (cluster, []))
    store = str(made.share.root)  # another one in each test
    tracking = follower.runs.Tracking(store, {"MLFLOW_TRACKING_URI": store})
    return made, client, lambda: follower.follow(made.job, tracking)
