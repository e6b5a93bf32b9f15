"""Jobs that were submitted earlier: found by what their runs say, wherever their share lies on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mlflow_batchai import index, runs
from mlflow_batchai.cluster import clusters
from mlflow_batchai.detached import Submitted
from mlflow_batchai.errors import BatchAIError, JobError, JobNotFoundError, ShareError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.node.protocol import QUEUED
from mlflow_batchai.runs import Tracking
from mlflow_batchai.shares import Share, open_share
from mlflow_batchai.shares.location import is_azure
from mlflow_batchai.shares.objects import holds_any

if TYPE_CHECKING:
    from mlflow.entities import Run


class NoFolderError(JobError):
    """No plan lies where a run says that its job lies: nothing of it was started, or nothing is left.

    Attributes:
        name: the job's.
        run_id: its run's.
        unstarted: whether the run still waits for it to be started.
        run_ended: whether the run has ended.
    """

    def __init__(self, run: Run, where: str) -> None:
        self.name, self.run_id = run.data.tags[runs.TAG_JOB], run.info.run_id
        # MLflow makes a run RUNNING; its submitter may have died before it could make it SCHEDULED.
        begun = run.info.status == "RUNNING" and run.data.tags.get(runs.TAG_STATE) != QUEUED
        self.run_ended = run.info.status not in ("RUNNING", "SCHEDULED")
        self.unstarted = not begun and not self.run_ended
        why = run.data.tags.get("batchai.reason", "its submitter died, or its folder was deleted")
        hint = f"; `batchai job terminate {self.name}` ends its run" if self.unstarted else ""
        if not self.unstarted and not self.run_ended:
            hint = f"; `batchai job delete {self.name}` gives its run up"
        super().__init__(f"job {self.name} has no job folder: {why} (looked for on {where}){hint}")


def find(name: str, tracking: Tracking, workspace: str | None = None, experiment_id: str | None = None) -> Submitted:
    """A job that was submitted earlier, by its name or run id.

    Args:
        workspace: the one that it must stand under; None: any.
        experiment_id: likewise.

    Raises:
        JobNotFoundError: there is none.
        NoFolderError: its folder is not on its share.
        ShareError: its share is not on this machine.
    """
    return of_run(index.find(runs.client(tracking), name, workspace, experiment_id), tracking)


def of_run(run: Run, tracking: Tracking) -> Submitted:
    """The job of a run; raises as ``find`` does."""
    return Submitted(_job_of(run), run.info.run_id, tracking)


def _job_of(run: Run) -> Job:
    """The job of a run: where its submitter had it, else where this machine's document of its cluster says."""
    tags = run.data.tags
    if missing := [tag for tag in (runs.TAG_CLUSTER, runs.TAG_SHARE, runs.TAG_FOLDER) if tag not in tags]:
        raise JobError(f"job {tags[runs.TAG_JOB]} can't be found: its run has no tag {missing[0]} any more")
    cluster = tags[runs.TAG_CLUSTER]
    there: list[Share] = []
    troubles: list[str] = []
    ways: list[Callable[[], Share]] = [lambda: open_share(tags[runs.TAG_SHARE]), lambda: clusters.load(cluster)[0].share]
    for way in ways:
        try:
            share = way()
            try:
                return Job(share, tags[runs.TAG_FOLDER])
            except JobNotFoundError:
                there.append(share)
                raise
        except BatchAIError as error:
            troubles.append(str(error))
    # A job's code is sent before its run is made: where nothing was ever sent to is a folder that only has the share's path.
    shares = [share.url for share in there if holds_any(share)]
    if shares and len(there) == len(troubles):
        raise NoFolderError(run, " and ".join(dict.fromkeys(shares)))
    why = "; ".join(dict.fromkeys(troubles))
    if is_azure(tags[runs.TAG_SHARE]):
        raise ShareError(f"the share of job {tags[runs.TAG_JOB]} can't be read from here: {why}")
    raise ShareError(
        f"the share of job {tags[runs.TAG_JOB]} is not on this machine ({why}); mount it there, or describe cluster "
        f"'{cluster}' here"
    )


def end_run(lost: NoFolderError, tracking: Tracking) -> None:
    """End the run of a job of which nothing was started: it is KILLED, since nobody else will ever end it.

    Raises:
        NoFolderError: it is no such job.
    """
    if not lost.unstarted:
        raise lost
    runs.fail(runs.client(tracking), lost.run_id, "terminated; nothing of it had been started", "KILLED")
