"""A user's folder and store, with jobs in it that only a follower has to do with: the tests write what agents would."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from job_folder import JobFolder
from relay_world import EXPECTED, fill, history
from waiting import wait_for

from mlflow_batchai.follower import detached
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.tracking import runs

# Of the followers that are started here: no test waits longer for another one to take over.
HEARTBEAT_SECONDS, GRACE_SECONDS = 5.0, 20.0
QUICK = f"from mlflow_batchai.job import lease\nlease.HEARTBEAT_SECONDS, lease.GRACE_SECONDS = {HEARTBEAT_SECONDS}, {GRACE_SECONDS}\n"


class Site:
    """A user's folder and store, jobs whose nodes nobody can ask, and the follower processes of both."""

    def __init__(self, root: Path, template: Path) -> None:
        # Longer than the address of a socket may be.
        self.home = root / ("long" * 30) / "home"
        self.root = root
        shutil.copy(template, root / "m.db")
        self.tracking = runs.absolute("sqlite:///m.db", root)
        self.client = runs.client(self.tracking)
        self.experiment = self.client.create_experiment("e", artifact_location=(root / "artifacts").as_uri())
        self.pids: set[int] = set()

    def job(self, name: str, share: Path | None = None, **plan: Any) -> JobFolder:
        """A job whose first epochs are there."""
        run = runs.create(self.client, self.experiment, {runs.TAG_JOB: name}, {}, None, None)
        metrics = [{"name": "f1", "regex": r"f1 (\S+)", "step": None}]
        made = JobFolder(
            share or self.root / name, name=name, job=name, runId=run.info.run_id, cluster="elsewhere", metrics=metrics, **plan
        )
        made.handle()
        made.announce(0)
        fill(made)
        return made

    def submitted(self, made: JobFolder, **more: Any) -> Submitted:
        return Submitted(made.job, made.plan["runId"], self.tracking, **more)

    def follow(self, made: JobFolder, **more: Any) -> Submitted:
        found = self.submitted(made, **more)
        detached.start_follower(found)
        assert found.follower is not None
        self.pids.add(found.follower)
        return found

    def status(self, made: JobFolder) -> str:
        return str(self.client.get_run(made.plan["runId"]).info.status)

    def relayed(self, made: JobFolder) -> bool:
        """Whether its run has what its ranks have reported; Keras' own lines are held back for an epoch."""
        return history(self.client, made.plan["runId"]).get("loss") == EXPECTED["loss"]

    def log(self, name: str) -> str:
        return (self.home / "followers" / f"{name}.log").read_text()

    def sockets(self) -> list[Path]:
        return list((self.home / "followers").glob("*.sock"))

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not psutil.pid_exists(pid))

    def close(self) -> None:
        for pid in filter(psutil.pid_exists, self.pids):
            self.kill(pid)


@contextlib.contextmanager
def open_site(folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A site in this process's environment; its followers end with it."""
    made = Site(folder, store)
    monkeypatch.setenv("BATCHAI_HOME", str(made.home))
    injected = folder / "injected"
    injected.mkdir()
    (injected / "sitecustomize.py").write_text(QUICK, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(injected), prepend=os.pathsep)
    try:
        yield made
    finally:
        made.close()
