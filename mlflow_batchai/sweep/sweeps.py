"""Sweeps in the tracking store: the parent run with its plan, and the runs of the jobs."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlflow_batchai.errors import JobError, NotFoundError
from mlflow_batchai.job import signing
from mlflow_batchai.job.places import slug
from mlflow_batchai.sweep.parameters import Combination, Values
from mlflow_batchai.tracking import experiments, index, runs
from mlflow_batchai.tracking.index import NOT_ENDED, PAGE
from mlflow_batchai.tracking.runs import Tracking

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

# Of the parent run and the jobs' runs: the parent's run id. Of a job's run: its number in the sweep.
TAG_SWEEP, TAG_INDEX = "batchai.sweep", "batchai.sweepIndex"
# Of a job's run that fell behind: why it is ended.
TAG_STOPPED = "batchai.sweepStopped"
# Of the parent run.
TAG_NAME, TAG_JOBS, TAG_DRIVER = "batchai.sweepName", "batchai.sweepJobs", "batchai.sweepDriver"
TAG_BEST, TAG_BEST_METRIC = "batchai.sweepBest", "batchai.sweepBestMetric"
TAG_PARENT, TAG_NOTE = "mlflow.parentRunId", "mlflow.note.content"
PLAN, RESULTS, IMPORTANCES = "sweep/plan.json", "sweep/results.json", "sweep/importances.png"
LONGEST_JOB_NAME = 50
Mode = Literal["min", "max"] | None
_IS_SWEEP = f"tags.`{TAG_JOBS}` LIKE '%'"


@dataclass(frozen=True)
class SweepPlan:
    """Plan of a sweep, kept as an artifact of its run; it holds no secret.

    Attributes:
        settings: override keys of batchai.yaml.
        cwd: the folder of relative paths.
        combinations: the parameters of one job each, as far as they are known; jobs are numbered from 1.
        parallel: the most jobs at once that have not ended.
        metric: what jobs are compared by; None: a usual one.
        mode: whether less or more is better; None: by the metric's name.
        space: what a sampler chooses from: parameter -> values, or a range.
        asks: whether Optuna chooses when a job is started.
        stop: whether jobs that fall behind the median are ended.
        told: of which ends batchai.yaml has people told; None: it says nothing.
    """

    name: str
    uri: str
    entry_point: str
    version: str | None
    settings: Mapping[str, Any]
    env_manager: str | None
    cwd: str
    combinations: Sequence[Combination]
    parallel: int
    metric: str | None
    mode: Mode
    code: str
    space: Values = field(default_factory=dict)
    asks: bool = False
    seed: int = 0
    stop: bool = False
    told: Sequence[str] | None = None

    def job_name(self, number: int) -> str:
        """The name of a job and of its run."""
        return f"{slug(self.name, LONGEST_JOB_NAME)}-{number}"

    def parameters(self, number: int, run: Run | None) -> Combination:
        """The parameters of a job; those that a sampler has chosen stand in its run."""
        chosen = run.data.params if run and self.space else {}
        return {**self.combinations[number - 1], **{name: chosen[name] for name in self.space if name in chosen}}

    @property
    def numbers(self) -> range:
        """The jobs' numbers."""
        return range(1, len(self.combinations) + 1)


@dataclass(frozen=True)
class Sweep:
    """A sweep that has a parent run.

    Attributes:
        is_own: whether this user's key has signed the plan; jobs of other plans are not started.
    """

    plan: SweepPlan
    run_id: str
    experiment_id: str
    tracking: Tracking
    is_own: bool = True

    def job_tags(self, number: int) -> dict[str, str]:
        """Tags that make a run the run of a job of this sweep."""
        return {TAG_PARENT: self.run_id, TAG_SWEEP: self.run_id, TAG_INDEX: str(number)}


def begin(plan: SweepPlan, tracking: Tracking, experiment_id: str, tags: Mapping[str, str]) -> Sweep:
    """Make the parent run, RUNNING, with its plan. It is a sweep's run only when all of it is there."""
    mlflow = runs.client(tracking)
    run_id = str(mlflow.create_run(experiment_id, tags=dict(tags), run_name=plan.name).info.run_id)
    text = json.dumps(asdict(plan), indent=1)
    own = {runs.TAG_MAC: signing.mac(*_signed(run_id, text)), TAG_NAME: plan.name, TAG_SWEEP: run_id}
    # Until all is there: nobody would end it if this process died.
    mlflow.update_run(run_id, "FAILED")
    mlflow.log_text(run_id, text, PLAN)
    for name, value in {**own, TAG_JOBS: str(len(plan.combinations))}.items():
        mlflow.set_tag(run_id, name, value)
    mlflow.update_run(run_id, "RUNNING")
    return Sweep(plan, run_id, experiment_id, tracking)


def _signed(run_id: str, text: str) -> tuple[str, str]:
    return f"sweep {run_id}", hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def of_run(run: Run, tracking: Tracking) -> Sweep:
    """The sweep of a parent run. Raises JobError: its plan can't be read."""
    run_id = str(run.info.run_id)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(runs.client(tracking).download_artifacts(run_id, PLAN, folder))
        try:
            text = path.read_text(encoding="utf-8")
            plan = SweepPlan(**json.loads(text))
            if not all(isinstance(given, dict) for given in (*plan.combinations, plan.space)) or not isinstance(
                plan.parallel, int
            ):
                raise TypeError("combinations, space or parallel have values of another kind")
        except (ValueError, TypeError) as error:
            why = f"the artifact {PLAN} of run {run_id} is no plan of a sweep, or of another version: {error}"
            raise JobError(why) from error
    is_own = signing.is_mac(run.data.tags.get(runs.TAG_MAC), *_signed(run_id, text))
    return Sweep(plan, run_id, str(run.info.experiment_id), tracking, is_own)


def find(tracking: Tracking, name: str) -> Run:
    """The parent run of a sweep, by the sweep's name (the newest of several) or the run's id.

    Raises:
        NotFoundError: there is none; the message names some that exist.
    """
    mlflow = runs.client(tracking)
    # MLflow can't quote a text that has both quotes, and no sweep has such a name.
    quote = '"' if "'" in name else "'"
    for key in ("attributes.run_id", f"tags.`{TAG_NAME}`"):
        if quote not in name and (found := search(mlflow, f"{key} = {quote}{name}{quote}", 1)):
            return found[0]
    known = [run.data.tags[TAG_NAME] for run in search(mlflow, most=10)]
    hint = f"the newest are: {', '.join(dict.fromkeys(known))}" if known else f"there are none in {tracking.uri}"
    raise NotFoundError(f"there is no sweep '{name}'; {hint}")


def unended(mlflow: MlflowClient) -> list[Run]:
    """Parent runs that have not ended and whose tag names a key of this user, the newest first."""
    signed = [f"tags.`{runs.TAG_MAC}` LIKE '{fingerprint}:%'" for fingerprint in signing.fingerprints()]
    return [run for condition in signed for run in search(mlflow, f"{condition} AND {NOT_ENDED}")]


def search(mlflow: MlflowClient, condition: str = "", most: int = PAGE) -> list[Run]:
    """Parent runs of sweeps, the newest first."""
    where = [entry.experiment_id for entry in experiments.every(mlflow)]
    wanted = f"{_IS_SWEEP} AND {condition}" if condition else _IS_SWEEP
    order = ["attributes.start_time DESC"]
    return list(mlflow.search_runs(where, wanted, max_results=most, order_by=order)) if where else []


@dataclass(frozen=True)
class Seen:
    """A sweep as its runs say that it is.

    Attributes:
        jobs: number -> run of each job that was started; the run may be deleted since.
        active: numbers of jobs that have not ended.
        unstarted: numbers of jobs that are to be started.
    """

    status: str
    tags: Mapping[str, str]
    jobs: Mapping[int, Run]
    active: Set[int]
    unstarted: Sequence[int]

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody has asked to end it."""
        return bool(self.tags.get(runs.TAG_CANCEL))


def look(mlflow: MlflowClient, sweep: Sweep) -> Seen:
    """Look at the runs of a sweep, deleted ones too, by one search. Raises JobError: the parent run is deleted."""
    found = index.deleted_too(mlflow, sweep.experiment_id, f"tags.`{TAG_SWEEP}` = '{sweep.run_id}'")
    # If a job has a deleted run and another one, the other one counts.
    found.sort(key=lambda run: str(run.info.lifecycle_stage), reverse=True)
    parent = next((run for run in found if run.info.run_id == sweep.run_id and run.info.lifecycle_stage == "active"), None)
    if parent is None:
        raise JobError(
            f"the run of sweep {sweep.plan.name} is deleted; jobs that run go on, no more are started"
            f" (mlflow runs restore --run-id {sweep.run_id})"
        )
    # Anybody can tag a run as a job of the sweep.
    own = [run for run in found if runs.is_signed(run) or not sweep.is_own]
    numbered = {int(run.data.tags[TAG_INDEX]): run for run in own if run.data.tags.get(TAG_INDEX, "").isdecimal()}
    jobs = dict(sorted(numbered.items()))
    running = [number for number, run in jobs.items() if run.info.status in ("RUNNING", "SCHEDULED")]
    active = {number for number in running if jobs[number].info.lifecycle_stage == "active"}
    tags = parent.data.tags
    unstarted = [] if tags.get(runs.TAG_CANCEL) else [number for number in sweep.plan.numbers if number not in jobs]
    return Seen(str(parent.info.status), tags, jobs, active, unstarted)


def add_failed_run(mlflow: MlflowClient, sweep: Sweep, number: int, why: str) -> None:
    """Make the FAILED run of a job that can't be started."""
    run = mlflow.create_run(sweep.experiment_id, tags=sweep.job_tags(number), run_name=sweep.plan.job_name(number))
    run_id = str(run.info.run_id)
    runs.fail(mlflow, run_id, runs.tag_text(f"it could not be started: {why}"))
    # Last: only a signed run counts as the job's, and this one must not count as running.
    mlflow.set_tag(run_id, runs.TAG_MAC, runs.signature(run_id, {}))
