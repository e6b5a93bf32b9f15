"""A submitted job and the detached process that follows it: starting that, and keeping it running."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from mlflow_batchai import shell
from mlflow_batchai.config import home
from mlflow_batchai.errors import JobError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease
from mlflow_batchai.runs import Tracking
from mlflow_batchai.shares import credentials

FOLLOWER_STARTS = 3


@dataclass
class Submitted:
    """A job on its way.

    Attributes:
        follower: process id of the detached follower that we started, or None.
        starts: how often we have started one.
    """

    job: Job
    run_id: str
    tracking: Tracking
    follower: int | None = None
    starts: int = 0


def start_follower(submitted: Submitted) -> None:
    """Start the detached process that relays the job into its run."""
    job, tracking = submitted.job, submitted.tracking
    # -P: what lies in the user's folder must not be imported in place of a library.
    argv = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-m", "mlflow_batchai.follower"]
    # The store's address goes by MLflow's own variable: a database's holds a password, and `ps` shows everyone our arguments.
    environment = {**os.environ, **tracking.environment, **credentials.exported(), "BATCHAI_HOME": str(home())}
    submitted.follower = shell.spawn([*argv, job.share.url, job.folder], environment, follower_log(job))
    submitted.starts += 1


def follower_log(job: Job) -> Path:
    """Where a job's follower says what troubles it."""
    return home() / "followers" / f"{job.plan['job']}.log"


def ensure_follower(submitted: Submitted) -> None:
    """Start a follower for a job that was submitted elsewhere: it waits while another lives, and takes over when that stops."""
    if not Lease(submitted.job).finished():
        start_follower(submitted)


def keep_follower(submitted: Submitted) -> None:
    """Start another follower if ours has died before its time.

    Raises:
        JobError: it keeps ending.
    """
    pid = submitted.follower
    if pid is None or _child_alive(pid) or Lease(submitted.job).finished():
        return
    if submitted.starts >= FOLLOWER_STARTS:
        raise JobError(
            f"the process that relays job {submitted.job.name} into MLflow keeps ending; see {follower_log(submitted.job)}"
        )
    start_follower(submitted)


def _child_alive(pid: int) -> bool:
    """Whether our child still runs; it is reaped when it doesn't."""
    try:
        ended, _ = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return Path(f"/proc/{pid}").exists()
    return ended == 0
