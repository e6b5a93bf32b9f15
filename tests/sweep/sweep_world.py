"""Sweeps in a real store, with toy jobs: runs that a test ends."""

from __future__ import annotations

import dataclasses
import math
import os
from types import SimpleNamespace
from typing import Any

from mlflow_batchai.errors import ShareError
from mlflow_batchai.follower import detached
from mlflow_batchai.sweep import sweeps
from mlflow_batchai.sweep.sweeps import Sweep, SweepPlan
from mlflow_batchai.tracking import runs

PLAN = SweepPlan(
    name="toy",
    uri="/projects/toy",
    entry_point="main",
    version=None,
    settings={},
    env_manager=None,
    cwd="/projects",
    combinations=[{"lr": lr, "bs": bs, "fixed": "1"} for lr in ("0.1", "0.2") for bs in ("4", "8")],
    parallel=2,
    metric=None,
    mode=None,
    code="c0de",
    told=["succeeded", "failed"],
)


def plan(**changes: Any) -> SweepPlan:
    """A sweep of four jobs, two at once."""
    return dataclasses.replace(PLAN, **changes)


def begin(store: runs.Tracking, tags: dict[str, str] | None = None, **changes: Any) -> Sweep:
    return sweeps.begin(plan(**changes), store, "0", {"mlflow.user": "ada", **(tags or {})})


def add_job(mlflow: Any, sweep: Sweep, number: int, **tags: str) -> str:
    """Make the run of a job, as a submit does; its id."""
    tags = {**sweep.job_tags(number), runs.TAG_JOB: sweep.plan.job_name(number), runs.TAG_STATE: "queued", **tags}
    run_id = mlflow.create_run("0", tags=tags, run_name=sweep.plan.job_name(number)).info.run_id
    mlflow.set_tag(run_id, runs.TAG_MAC, runs.signature(run_id, tags))
    mlflow.update_run(run_id, "SCHEDULED")
    return str(run_id)


def end_job(mlflow: Any, run_id: str, status: str = "FINISHED", reason: str = "", **metrics: float) -> None:
    for name, value in metrics.items():
        mlflow.log_metric(run_id, name, value)
    state = "succeeded" if status == "FINISHED" else "failed"
    for tag, value in {runs.TAG_STATE: state, runs.TAG_REASON: reason, runs.TAG_STARTED: runs.time_text(1)}.items():
        mlflow.set_tag(run_id, tag, value)
    mlflow.set_terminated(run_id, status)


class Toys:
    """Starts jobs that do nothing, and ends them when it is told to, or when they are cancelled.

    Attributes:
        sweep: whose jobs they are.
        most: how many had not ended at once.
        failures: number of a job -> how often it can't be started.
        error: what that raises.
        told: what people were told of the sweep's end.
    """

    def __init__(self, mlflow: Any) -> None:
        self._mlflow = mlflow
        self.sweep: Any = None
        self.started: list[int] = []
        self.active: dict[int, str] = {}
        self.most = 0
        self.failures: dict[int, int] = {}
        self.error: Exception = ShareError("the share is away")
        self.told: list[tuple[str, str]] = []

    def submit(self, number: int) -> detached.Submitted:
        sweep = self.sweep
        if self.failures.get(number):
            self.failures[number] -= 1
            raise self.error
        self.started.append(number)
        self.active[number] = add_job(self._mlflow, sweep, number)
        self.most = max(self.most, len(self.active))
        return self.again(number)

    def tell(self, state: str, reason: str) -> None:
        self.told.append((state, reason))

    def again(self, number: int) -> detached.Submitted:
        """A job that runs, as a process that goes on finds it."""
        sweep, run_id = self.sweep, self.active[number]
        job: Any = SimpleNamespace(
            name=sweep.plan.job_name(number),
            state=lambda: SimpleNamespace(ended=number not in self.active),
            request_cancel=lambda who, why: self.end(number, "KILLED", why),
        )
        # The process of the test stands for a follower that has only just begun.
        return detached.Submitted(job, run_id, sweep.tracking, follower=os.getpid(), told_at=math.inf)

    def end(self, number: int, *how: str, **metrics: float) -> None:
        end_job(self._mlflow, self.active.pop(number), *how, **metrics)

    def end_all(self, **metrics: float) -> None:
        for number in list(self.active):
            self.end(number, **metrics)
