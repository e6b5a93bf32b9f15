"""Sweeps without jobs: a real store, and a starter whose jobs are runs that a test ends."""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import Any

from mlflow_batchai import detached, runs
from mlflow_batchai.errors import ShareError
from mlflow_batchai.sweep import sweeps
from mlflow_batchai.sweep.plan import SweepPlan
from mlflow_batchai.sweep.sweeps import Sweep

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
)


def plan(**changes: Any) -> SweepPlan:
    """A sweep of four jobs, two at once."""
    return dataclasses.replace(PLAN, **changes)


def begin(store: runs.Tracking, tags: dict[str, str] | None = None, **changes: Any) -> Sweep:
    return sweeps.begin(plan(**changes), store, "0", {"mlflow.user": "ada", **(tags or {})})


def add_job(mlflow: Any, sweep: Sweep, index: int, state: str = "queued", **metrics: float) -> Any:
    """The run of a job, as a submit makes it."""
    tags = {**sweep.job_tags(index), runs.TAG_JOB: sweep.plan.job_name(index), runs.TAG_STATE: state}
    run = mlflow.create_run("0", tags=tags, run_name=sweep.plan.job_name(index))
    mlflow.set_tag(run.info.run_id, runs.TAG_MAC, runs.signature(run.info.run_id, tags))
    for name, value in metrics.items():
        mlflow.log_metric(run.info.run_id, name, value)
    mlflow.update_run(run.info.run_id, "SCHEDULED")
    return run


def end_job(mlflow: Any, run_id: str, status: str = "FINISHED", reason: str = "", **metrics: float) -> None:
    for name, value in metrics.items():
        mlflow.log_metric(run_id, name, value)
    state = "succeeded" if status == "FINISHED" else "failed"
    for tag, value in {runs.TAG_STATE: state, runs.TAG_REASON: reason, runs.TAG_STARTED: runs.time_text(1)}.items():
        mlflow.set_tag(run_id, tag, value)
    mlflow.set_terminated(run_id, status)


class Toys:
    """Starts jobs that do nothing.

    Attributes:
        most: how many had not ended at once.
        fails: numbers of jobs that can't be started -> how often.
        trouble: what that raises.
        interrupts: numbers of jobs while whose submit Ctrl-C is pressed.
    """

    def __init__(self, mlflow: Any) -> None:
        self._mlflow = mlflow
        self.started: list[int] = []
        self.left: dict[int, str] = {}
        self.most = 0
        self.fails: dict[int, int] = {}
        self.trouble: Exception = ShareError("the share is away")
        self.interrupts: list[int] = []

    def submit(self, sweep: Sweep, experiment: Any, index: int) -> detached.Submitted:
        if self.fails.get(index):
            self.fails[index] -= 1
            raise self.trouble
        if index in self.interrupts:
            os.kill(os.getpid(), signal.SIGINT)
        self.started.append(index)
        run = add_job(self._mlflow, sweep, index)
        self.left[index] = run.info.run_id
        self.most = max(self.most, len(self.left))
        return detached.Submitted(None, run.info.run_id, sweep.tracking)  # type: ignore[arg-type]

    def end(self, index: int, *how: str, **metrics: float) -> None:
        end_job(self._mlflow, self.left.pop(index), *how, **metrics)
