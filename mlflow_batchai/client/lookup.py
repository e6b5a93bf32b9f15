"""Find submitted jobs by the tags of their runs, wherever their share lies on this machine; end runs whose job never began."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlflow_batchai.agent.protocol import QUEUED
from mlflow_batchai.cluster import clusters
from mlflow_batchai.errors import BatchAIError, JobChangedError, JobError, JobNotFoundError, JobUnreadableError, ShareError
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.job import signing
from mlflow_batchai.job.jobs import Job, changed_sentence
from mlflow_batchai.job.signing import Signature
from mlflow_batchai.storage import Share, open_share
from mlflow_batchai.storage.location import is_web_address
from mlflow_batchai.storage.objects import holds_any
from mlflow_batchai.tracking import index, runs
from mlflow_batchai.tracking.runs import Tracking

if TYPE_CHECKING:
    from mlflow.entities import Run


class NoFolderError(JobError):
    """No plan lies where a run says that its job lies: nothing of it was started, or nothing is left.

    Attributes:
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


def find(name: str, tracking: Tracking) -> Submitted:
    """A job that was submitted earlier, by its name or run id.

    Raises:
        JobNotFoundError: there is none.
        NoFolderError: its folder is not on its share.
        ShareError: its share is not on this machine.
    """
    return of_run(index.find(runs.client(tracking), name), tracking)


def of_run(run: Run, tracking: Tracking) -> Submitted:
    """The job of a run; raises as ``find`` does.

    Raises:
        JobChangedError: this user has submitted it, and its plan is not the one that he signed.
    """
    job = _job_of(run)
    if runs.is_signed(run) and job.signature is not Signature.OWN:
        raise JobChangedError(changed_sentence("plan", run.data.tags[runs.TAG_JOB]))
    _check_run(job, run)
    return Submitted(job, run.info.run_id, tracking)


def untrusted(run: Run) -> Job:
    """The job of a run of whomever, where the run's tags say that it lies, for a person to decide about; raises as ``find``."""
    _check_tags(run)
    tags = runs.tags_of(run)
    job = Job(open_share(tags[runs.TAG_SHARE]), tags[runs.TAG_FOLDER])
    _check_run(job, run)
    return job


def _check_run(job: Job, run: Run) -> None:
    if job.plan.run_id != run.info.run_id:
        raise JobError(
            f"run {run.info.run_id} names the folder {job.folder} on {job.share.url} as its job's, where another run's job"
            " lies; its tags were changed"
        )


def _check_tags(run: Run) -> None:
    wanted = (runs.TAG_JOB, runs.TAG_CLUSTER, runs.TAG_SHARE, runs.TAG_FOLDER)
    if missing := [tag for tag in wanted if tag not in runs.tags_of(run)]:
        name = run.data.tags.get(runs.TAG_JOB, run.info.run_id)
        raise JobError(f"job {name} can't be found: its run has no tag {missing[0]} any more")


def _job_of(run: Run) -> Job:
    """Find the job of a run, without opening an address that anybody may have written.

    It lies at the address in the run's tags, if this user has signed it or trusts it; else where this machine's document of
    its cluster says.
    """
    _check_tags(run)
    tags = runs.tags_of(run)
    cluster = tags[runs.TAG_CLUSTER]
    there: list[Share] = []
    errors: list[str] = []
    address = tags[runs.TAG_SHARE] if runs.is_signed(run) else signing.share_of(run.info.run_id)
    ways: list[Callable[[], Share]] = [lambda: clusters.load(cluster)[0].share]
    if address is not None:
        ways.insert(0, functools.partial(open_share, address))
    for way in ways:
        try:
            share = way()
            try:
                return Job(share, tags[runs.TAG_FOLDER])
            except JobNotFoundError:
                there.append(share)
                raise
        except (JobChangedError, JobUnreadableError):
            raise
        except BatchAIError as error:
            errors.append(str(error))
    # A job's code is sent before its run is made: where nothing was ever sent to is a folder that only has the share's path.
    shares = [share.url for share in there if holds_any(share)]
    if shares and len(there) == len(errors):
        raise NoFolderError(run, " and ".join(dict.fromkeys(shares)))
    if address is None:
        errors.append(
            f"its run is not signed with this user's key, so {tags[runs.TAG_SHARE]} was not opened; to see what that would"
            f" open: batchai job attach --trust {run.info.run_id}"
        )
    why = "; ".join(dict.fromkeys(errors))
    if is_web_address(tags[runs.TAG_SHARE]):
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
