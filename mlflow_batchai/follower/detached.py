"""See to it that a job has a follower."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from mlflow_batchai.agent.processes import proc
from mlflow_batchai.cluster import clusters
from mlflow_batchai.config import home
from mlflow_batchai.errors import JobError, JobNotTrustedError
from mlflow_batchai.follower import notify, service_client
from mlflow_batchai.follower.credentials import variables_of
from mlflow_batchai.follower.service_client import Key
from mlflow_batchai.follower.spawning import environment_for
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease, LeaseMonitor, LeaseState, LeaseView
from mlflow_batchai.tracking import runs
from mlflow_batchai.tracking.runs import Tracking

FOLLOWER_STARTS = 3
# What a follower says that lets go of a job because it can't start its next attempt: one that is told more can.
WAITS_FOR_ATTACH = "waiting for attach"


@dataclass
class Submitted:
    """A job on its way.

    Attributes:
        follower: process id of the follower process that has the job from us, or None.
        told_at: when we gave it the job (``time.monotonic``).
        starts: how often that was news to it.
        secrets: what its agents were told and is written nowhere, for the follower of a job that may start again by itself.
        told: secrets by name that only its follower is told (``notify``).
    """

    job: Job
    run_id: str
    tracking: Tracking
    follower: int | None = None
    told_at: float = 0.0
    starts: int = 0
    secrets: Mapping[str, Any] = field(default_factory=dict, repr=False)
    told: Mapping[str, str] = field(default_factory=dict, repr=False)
    _monitor: LeaseMonitor | None = field(default=None, init=False, repr=False)

    @property
    def key(self) -> Key:
        """The job as follower processes know it."""
        return self.job.share.url, self.job.folder

    @property
    def monitor(self) -> LeaseMonitor:
        """The monitor of the job's lease; it knows more with each look."""
        if self._monitor is None or self._monitor.job is not self.job:
            key = self.key
            self._monitor = LeaseMonitor(self.job, lambda: service_client.followers(key))
        return self._monitor

    def followed(self) -> LeaseView:
        """The present follower of the job, as far as known (``LeaseMonitor.look``).

        Raises:
            ShareError: its share can't be read now.
        """
        return self.monitor.look()


def start_follower(submitted: Submitted) -> None:
    """Have a follower process relay the job into its run, and start it again if it may.

    Raises:
        JobNotTrustedError: it would obey a plan that may be anybody's.
        ClusterError: no process can be started.
    """
    job = submitted.job
    job.check_trusted()
    told: dict[str, Any] = {}
    if job.plan.may_go_on:
        # What opens the control share is made anew for each attempt.
        told = {key: value for key, value in submitted.secrets.items() if key != "share" and value}
        told["environment"] = {name: os.environ[name] for name in variables_of(job.plan) if name in os.environ}
    if named := notify.secrets(job.plan.notify, {**(submitted.secrets.get("variables") or {}), **submitted.told}):
        told["notify"] = named
    share, folder = submitted.key
    order = {"share": share, "folder": folder, "run": job.plan.run_id, "job": job.plan.job, "told": told}
    found = service_client.follow(order, environment_for(submitted.tracking))
    submitted.follower, submitted.told_at = found.pid, time.monotonic()
    submitted.starts += found.news


def follower_log(job_id: str) -> Path:
    """Path of the log in which a job's follower says what troubles it."""
    return home() / "followers" / f"{job_id}.log"


@contextlib.contextmanager
def open_log(job_id: str) -> Iterator[TextIO]:
    """Open a job's log to write on; nobody else can read it."""
    with follower_log(job_id).open("a", encoding="utf-8", errors="backslashreplace", buffering=1) as file:
        os.fchmod(file.fileno(), 0o600)
        yield file


def ensure_follower(submitted: Submitted) -> LeaseView:
    """See to it that a job which was submitted elsewhere, or earlier, has a follower.

    One on another machine may be dead, and one that lives may be kept from the store: ours takes over then, and ends otherwise.

    Returns:
        Who relayed it before.

    Raises:
        ShareError: its share can't be read now.
    """
    found = submitted.followed()
    if found.state is LeaseState.FINISHED and reopen(submitted):
        found = found._replace(state=LeaseState.FREE)
    if found.state in (LeaseState.FREE, LeaseState.UNKNOWN) or (found.state is LeaseState.HELD and found.trouble):
        start_follower(submitted)
    return found


def reopen(submitted: Submitted) -> bool:
    """Have a job that counts as relayed relayed again if its run lacks its end: it was deleted then, and is restored.

    Returns:
        Whether it does.

    Raises:
        JobNotTrustedError: as ``start_follower``.
    """
    job = submitted.job
    # A run is made to wait again after its next attempt was begun.
    if not runs.lacks_end(submitted.tracking, submitted.run_id, job.folder) or job.newest() != job.attempt:
        return False
    job.check_trusted()
    Lease(job).reopen()
    submitted._monitor = None  # it has seen what is no longer so
    return True


def keep_follower(submitted: Submitted) -> None:
    """Start another follower if the job has none any more, or one that is kept from the store, and we may not be.

    Raises:
        JobError: it keeps ending, or the last one has let go of the job until somebody attaches to it; the message says why.
        ShareError: the job's folder can't be seen, so nor can who relays it.
    """
    if submitted.follower is not None and _is_at_it(submitted, submitted.follower):
        return
    found = submitted.followed()
    if found.state is LeaseState.HELD and found.trouble and not submitted.starts:
        start_follower(submitted)  # with what we were given: a new token, say
        return
    if found.state is not LeaseState.FREE:
        return
    submitted.job.check_there()
    if found.trouble and not (WAITS_FOR_ATTACH in found.trouble and submitted.secrets):
        raise JobError(found.trouble)
    if submitted.starts >= FOLLOWER_STARTS:
        raise JobError(
            f"the process that relays job {submitted.job.name} into MLflow keeps ending;"
            f" see {follower_log(submitted.job.plan.job)}"
        )
    start_follower(submitted)


def _is_at_it(submitted: Submitted, pid: int) -> bool:
    """Whether the follower process that has the job from us still follows it, or has only just begun to start."""
    said = service_client.answers()
    if pid in said:
        return submitted.key in said[pid]
    return time.monotonic() - submitted.told_at < service_client.START_SECONDS and proc.start_time(pid) is not None


def end_changed(tracking: runs.Tracking, run_id: str, why: str, status: str = "FAILED") -> None:
    """End the job of a run whose files or tags were changed by someone else, unless the run has ended.

    Args:
        why: a sentence for people.
        status: the run's.

    Raises:
        JobNotTrustedError: this user has not submitted it, so its tags may be anybody's.
        BatchAIError: its cluster isn't known here, or some of it may still run; its run has ended all the same.
    """
    mlflow = runs.client(tracking)
    run = mlflow.get_run(run_id)
    if run.info.status not in ("RUNNING", "SCHEDULED"):
        return
    if not runs.is_signed(run):
        raise JobNotTrustedError(
            f"{why}; the tags of its run {run_id} were changed as well, so its nodes were not asked to end it"
        )
    try:
        cluster, _ = clusters.load(run.data.tags[runs.TAG_CLUSTER])
        with contextlib.closing(cluster.engine) as engine:
            engine.end_job(runs.tags_of(run)[runs.TAG_FOLDER].rpartition("/")[2])
    finally:
        runs.fail(mlflow, run_id, why, status)
