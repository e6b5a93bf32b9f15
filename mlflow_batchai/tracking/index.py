"""The index of jobs: find runs by the tags that submitter and relay write."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from mlflow_batchai.errors import BatchAIError, JobNotFoundError, TrackingError
from mlflow_batchai.job import signing
from mlflow_batchai.job.jobs import pause_after
from mlflow_batchai.tracking import experiments as stored
from mlflow_batchai.tracking import stores
from mlflow_batchai.tracking.reading import Page
from mlflow_batchai.tracking.runs import (
    TAG_CANCEL,
    TAG_CLUSTER,
    TAG_JOB,
    TAG_MAC,
    TAG_STATE,
    TAG_WORKSPACE,
    Tracking,
    client,
    is_signed,
)

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.store.entities import PagedList
    from mlflow.tracking import MlflowClient

PAGE, MOST = 1000, 10_000
NEWEST_FIRST = ["attributes.start_time DESC"]
# So many jobs of one name are looked at for one of this user's.
SAME_NAME = 50
TERMINATED = "terminated"
NOT_ENDED = " AND ".join(f"attributes.status != '{status}'" for status in ("FINISHED", "FAILED", "KILLED"))
# How often it is asked which jobs are to end.
CANCEL_SECONDS = 5.0
# The fewest runs for which all are asked for at once, and how long one that has asked counts as one that asks.
MANY_RUNS, ASKING_SECONDS = 3, 60.0
# For how long a thread waits for the answer that another one has asked for.
ANSWER_SECONDS = 2.0


def find(mlflow: MlflowClient, name: str, workspace: str | None = None, experiment_id: str | None = None) -> Run:
    """The run of a job, by its name or the run's id; the newest of this user's if several jobs have had the name, else of all.

    Args:
        workspace: the one that it must stand under; None: any.
        experiment_id: likewise.

    Raises:
        JobNotFoundError: there is none; the message names some that exist.
    """
    experiments = None if experiment_id is None else [experiment_id]
    if len(name) == 32 and (of_id := jobs(mlflow, 1, experiments=experiments, run_id=name, workspace=workspace)):
        return cast("Run", of_id[0])
    if found := jobs(mlflow, SAME_NAME, experiments=experiments, name=name, workspace=workspace):
        # Anybody may make a run of that name.
        return next(filter(is_signed, found), found[0])
    known = [run.data.tags[TAG_JOB] for run in jobs(mlflow, 10, experiments=experiments, workspace=workspace)]
    if known:
        hint = f"the newest are: {', '.join(dict.fromkeys(known))}"
    elif workspace or experiment_id:
        hint = "that workspace or experiment has none" if jobs(mlflow, 1) else "this tracking store has none"
    else:
        hint = "this tracking store has no jobs (is MLFLOW_TRACKING_URI set?)"
    # Both may come from a user's defaults, which he forgets.
    where = f" in workspace '{workspace}'" if workspace else ""
    if experiment_id is not None:
        where += f" in experiment '{mlflow.get_experiment(experiment_id).name}'"
    raise JobNotFoundError(f"there is no job '{name}'{where}; {hint}")


def jobs(
    mlflow: MlflowClient,
    limit: int = PAGE,
    token: str | None = None,
    experiments: Collection[str] | None = None,
    name: str | None = None,
    workspace: str | None = None,
    cluster: str | None = None,
    state: str | None = None,
    run_id: str | None = None,
) -> Page | PagedList[Run]:
    """Runs of jobs, newest first: a page of them, whose ``token`` asks for the next one.

    Args:
        experiments: ids; None: all.
        state: an execution state, or ``terminated``: those that a person has ended.
    """
    if experiments is None:
        experiments = [entry.experiment_id for entry in stored.every(mlflow)]
    wanted = {
        f"tags.`{TAG_JOB}`": name,
        f"tags.`{TAG_WORKSPACE}`": workspace,
        f"tags.`{TAG_CLUSTER}`": cluster,
        f"tags.`{TAG_STATE}`": None if state == TERMINATED else state,
        "attributes.status": "KILLED" if state == TERMINATED else None,
        "attributes.run_id": run_id,
    }
    given = {key: value for key, value in wanted.items() if value is not None}
    if not experiments or any("'" in value for value in given.values()):
        return Page()  # MLflow's language has no quotes for it, and no job has it
    conditions = [f"{key} = '{value}'" for key, value in given.items()]
    # Only jobs have these tags; one more condition would be one more join.
    if not any(condition.startswith("tags") for condition in conditions):
        conditions.append(f"tags.`{TAG_JOB}` LIKE '%'")
    # MLflow's own order is the newest first.
    return mlflow.search_runs(list(experiments), " AND ".join(conditions), max_results=limit, page_token=token)


def is_first(mlflow: MlflowClient, run: Run) -> bool:
    """Whether a new job is the first of its name in its experiment and workspace. Of several that are submitted at once one is:
    each makes its run, and looks then.
    """
    tags = run.data.tags
    found = jobs(mlflow, experiments=[run.info.experiment_id], name=tags[TAG_JOB], workspace=tags[TAG_WORKSPACE])
    first = min(found, key=lambda other: (other.info.start_time, other.info.run_id), default=run)
    return str(first.info.run_id) == str(run.info.run_id)


def running(mlflow: MlflowClient, experiments: Sequence[str]) -> list[Run]:
    """Runs of jobs that have not ended, of these experiments (by id)."""
    return list(mlflow.search_runs(list(experiments), f"tags.`{TAG_JOB}` LIKE '%' AND {NOT_ENDED}", max_results=PAGE))


class CancelTags:
    """The runs of an experiment whose tag ``batchai.cancel`` (set in MLflow's own UI, say) asks for their end: one question
    for all jobs that a process follows, if they are many: a folder of runs is read whole for it. For several threads.
    """

    def __init__(self, experiment: str) -> None:
        self._experiment = experiment
        self._asking = threading.Lock()
        self._asked: dict[str, float] = {}
        self._wanted: set[str] = set()
        self._next = 0.0

    def wanted(self, mlflow: MlflowClient, run_id: str) -> bool:
        """Whether a run is one of them, as of some seconds ago; what MLflow raises is raised."""
        begun = self._asked[run_id] = time.monotonic()
        if sum(begun - asked < ASKING_SECONDS for asked in list(self._asked.values())) < MANY_RUNS:
            return _is_cancelled(mlflow.get_run(run_id))
        if begun >= self._next and self._asking.acquire(timeout=ANSWER_SECONDS):
            try:
                if begun >= self._next:  # no other thread has asked meanwhile
                    condition = f"tags.`{TAG_CANCEL}` LIKE '%' AND {NOT_ENDED}"
                    found = mlflow.search_runs([self._experiment], condition, max_results=PAGE)
                    self._wanted = {run.info.run_id for run in found if _is_cancelled(run)}
                    now = time.monotonic()
                    self._next = now + pause_after(now - begun, CANCEL_SECONDS)
            finally:
                self._asking.release()
        return run_id in self._wanted


def _is_cancelled(run: Run) -> bool:
    return run.data.tags.get(TAG_CANCEL, "").lower() in ("true", "1", "yes")


@functools.cache
def cancel_tags(store: str, experiment: str) -> CancelTags:
    """Those of an experiment (by id) of a store, the same for all threads of this process."""
    return CancelTags(experiment)


def deleted_too(mlflow: MlflowClient, experiment: str, wanted: str) -> list[Run]:
    """All runs of an experiment (by id) that a filter finds, with those that were deleted."""
    from mlflow.entities import ViewType

    return list(_every(mlflow, [experiment], wanted, run_view_type=ViewType.ALL))


def _every(mlflow: MlflowClient, experiments: Sequence[str], wanted: str, **options: Any) -> Iterator[Run]:
    """All runs that a search of MLflow's finds."""
    return stored.pages(
        lambda token: mlflow.search_runs(list(experiments), wanted, max_results=PAGE, page_token=token, **options)
    )


def unended(tracking: Tracking) -> list[Run]:
    """Runs of this user's jobs that have not ended, of all experiments, the newest first; ``MOST`` of them.

    Whose a job is its signature says: the tag ``mlflow.user`` is written by anybody.

    Raises:
        TrackingError: the store can't be asked.
    """
    found: list[Run] = []
    try:
        mlflow = client(tracking)
        experiments = [entry.experiment_id for entry in stored.every(mlflow)]
        for fingerprint in signing.fingerprints() if experiments else ():
            wanted = f"tags.`{TAG_MAC}` LIKE '{fingerprint}:%' AND tags.`{TAG_JOB}` LIKE '%' AND {NOT_ENDED}"
            signed = (run for run in _every(mlflow, experiments, wanted, order_by=NEWEST_FIRST) if is_signed(run))
            found += itertools.islice(signed, MOST - len(found))
    except BatchAIError:
        raise
    except Exception as error:  # MLflow raises whatever its store raises
        raise TrackingError(f"the tracking store {tracking.uri} can't be asked: {stores.sentence(error)}") from error
    return found


def deleted(mlflow: MlflowClient) -> set[str]:
    """Ids of jobs' runs that were deleted, and can be restored until ``mlflow gc`` removes them."""
    from mlflow.entities import ViewType

    experiments = [entry.experiment_id for entry in stored.every(mlflow, view_type=ViewType.ALL)]
    if not experiments:
        return set()
    wanted = f"tags.`{TAG_JOB}` LIKE '%'"
    return {run.info.run_id for run in _every(mlflow, experiments, wanted, run_view_type=ViewType.DELETED_ONLY)}
