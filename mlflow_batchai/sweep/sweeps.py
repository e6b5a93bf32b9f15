"""Sweeps as runs of the tracking store: the parent run, its plan, and the runs of its jobs."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow_batchai import experiments, index, keys, runs
from mlflow_batchai.errors import JobError, NotFoundError
from mlflow_batchai.index import NOT_ENDED, PAGE
from mlflow_batchai.runs import Tracking
from mlflow_batchai.sweep.plan import ARTIFACT, SweepPlan, read_plan

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

# Of the parent run: its name; of parent and jobs: the parent's run id, so that one search finds all; of a job: its number.
TAG_NAME, TAG_SWEEP, TAG_INDEX = "batchai.sweepName", "batchai.sweep", "batchai.sweepIndex"
TAG_JOBS, TAG_BEST, TAG_BEST_METRIC = "batchai.sweepJobs", "batchai.sweepBest", "batchai.sweepBestMetric"
TAG_DRIVER = "batchai.sweepDriver"
RESULTS = "sweep/results.json"
TAG_PARENT, TAG_NOTE = "mlflow.parentRunId", "mlflow.note.content"


@dataclass(frozen=True)
class Sweep:
    """A sweep that was begun.

    Attributes:
        run_id: the parent run's.
        is_own: whether this user's signature says that he began it: only then jobs are started as its plan says.
    """

    plan: SweepPlan
    run_id: str
    experiment_id: str
    tracking: Tracking
    is_own: bool = True

    @property
    def name(self) -> str:
        """Its name; several sweeps may have one."""
        return self.plan.name

    def job_tags(self, index: int) -> dict[str, str]:
        """Tags of the run of one of its jobs."""
        return {TAG_PARENT: self.run_id, TAG_SWEEP: self.run_id, TAG_INDEX: str(index)}


def begin(plan: SweepPlan, tracking: Tracking, experiment_id: str, tags: Mapping[str, str]) -> Sweep:
    """Make the parent run, RUNNING, and keep the plan with it; from then on the sweep can be gone on with."""
    mlflow = runs.client(tracking)
    count = str(len(plan.combinations))
    run = mlflow.create_run(experiment_id, tags={**tags, TAG_NAME: plan.name, TAG_JOBS: count}, run_name=plan.name)
    run_id = str(run.info.run_id)
    try:
        mlflow.log_text(run_id, plan.text(), ARTIFACT)
        mlflow.set_tag(run_id, runs.TAG_MAC, keys.mac(*_signed(run_id, plan.text())))
        # The last: a parent run without it was never begun.
        mlflow.set_tag(run_id, TAG_SWEEP, run_id)
    except BaseException:
        # What went wrong first is what a person has to see, even if the store has gone as well.
        with contextlib.suppress(Exception):
            mlflow.set_terminated(run_id, "FAILED")
        raise
    return Sweep(plan, run_id, experiment_id, tracking)


def _signed(run_id: str, text: str) -> tuple[str, str]:
    return f"sweep {run_id}", hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def lose(mlflow: MlflowClient, sweep: Sweep, index: int, why: str) -> str:
    """Make a run, FAILED, for one of its jobs that can't be started; the run's id."""
    tags = sweep.job_tags(index)
    # The last, as it makes the run the job's: one that is RUNNING would be taken for a job's that is.
    number = tags.pop(TAG_INDEX)
    run = mlflow.create_run(sweep.experiment_id, tags=tags, run_name=sweep.plan.job_name(index))
    run_id = str(run.info.run_id)
    runs.fail(mlflow, run_id, runs.tag_text(f"it could not be started: {why}"))
    mlflow.set_tag(run_id, runs.TAG_MAC, runs.signature(run_id, {}))
    mlflow.set_tag(run_id, TAG_INDEX, number)
    return run_id


def find(tracking: Tracking, name: str) -> Run:
    """The parent run of a sweep, by its name or its run id; the newest if several have the name.

    Raises:
        NotFoundError: there is none; the message names some that exist.
    """
    mlflow = runs.client(tracking)
    # MLflow's language has no way to write both quotes in one text, and no sweep has such a name.
    quote = '"' if "'" in name else "'"
    for which in ("attributes.run_id", f"tags.`{TAG_NAME}`"):
        if quote not in name and (
            found := _search(mlflow, f"tags.`{TAG_JOBS}` LIKE '%' AND {which} = {quote}{name}{quote}", 1)
        ):
            return found[0]
    known = [run.data.tags[TAG_NAME] for run in every(mlflow, most=10)]
    hint = f"the newest are: {', '.join(dict.fromkeys(known))}" if known else f"there are none in {tracking.uri}"
    raise NotFoundError(f"there is no sweep '{name}'; {hint}")


def every(mlflow: MlflowClient, most: int = PAGE) -> list[Run]:
    """Parent runs of sweeps, the newest first."""
    return _search(mlflow, f"tags.`{TAG_JOBS}` LIKE '%'", most)


def unended(mlflow: MlflowClient) -> list[Run]:
    """Parent runs of sweeps that have not ended and say that they are signed with this user's keys, the newest first."""
    return [
        run
        for fingerprint in keys.fingerprints()
        for run in _search(
            mlflow, f"tags.`{TAG_JOBS}` LIKE '%' AND tags.`{runs.TAG_MAC}` LIKE '{fingerprint}:%' AND {NOT_ENDED}", PAGE
        )
    ]


def _search(mlflow: MlflowClient, wanted: str, most: int) -> list[Run]:
    where = [entry.experiment_id for entry in experiments.every(mlflow)]
    order = ["attributes.start_time DESC"]
    return list(mlflow.search_runs(where, wanted, max_results=most, order_by=order)) if where else []


def of_run(run: Run, tracking: Tracking) -> Sweep:
    """The sweep of a parent run.

    Raises:
        JobError: its plan was never kept, or can't be read.
    """
    name = run.data.tags[TAG_NAME]
    if TAG_SWEEP not in run.data.tags:
        raise JobError(
            f"sweep {name}: whoever started it died before its plan was kept, and none of its jobs was started; delete its run"
            f" (mlflow runs delete --run-id {run.info.run_id}) and start it again"
        )
    mlflow = runs.client(tracking)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(mlflow.download_artifacts(run.info.run_id, ARTIFACT, folder)).read_text(encoding="utf-8")
    plan = read_plan(text, f"the artifact {ARTIFACT} of run {run.info.run_id}")
    is_own = keys.is_mac(run.data.tags.get(runs.TAG_MAC), *_signed(run.info.run_id, text))
    return Sweep(plan, str(run.info.run_id), str(run.info.experiment_id), tracking, is_own)


def members(mlflow: MlflowClient, sweep: Sweep, unended: bool = False) -> tuple[Run | None, dict[int, Run]]:
    """(the parent run, number -> run of the jobs that were started), with one search.

    The parent is None if it was deleted. A job whose run was deleted stays one that was started.

    Args:
        unended: only those that have not ended.
    """
    wanted = f"tags.`{TAG_SWEEP}` = '{sweep.run_id}'" + (f" AND {NOT_ENDED}" if unended else "")
    found = index.deleted_too(mlflow, sweep.experiment_id, wanted)
    found.sort(key=lambda run: str(run.info.lifecycle_stage), reverse=True)  # of a job with two runs the one that is there
    parent = next((run for run in found if run.info.run_id == sweep.run_id), None)
    if parent is not None and parent.info.lifecycle_stage == "deleted":
        parent = None
    # Anybody may tag a run as one of its jobs.
    own = [run for run in found if runs.is_signed(run) or not sweep.is_own]
    jobs = {int(run.data.tags[TAG_INDEX]): run for run in own if run.data.tags.get(TAG_INDEX, "").isdecimal()}
    return parent, dict(sorted(jobs.items()))
