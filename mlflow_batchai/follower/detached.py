"""Start a job's follower as a detached process, and keep one running."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow_batchai.agent.processes import proc
from mlflow_batchai.cluster import clusters
from mlflow_batchai.config import home
from mlflow_batchai.errors import ClusterError, JobError, JobNotTrustedError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease, LeaseMonitor, LeaseState, LeaseView
from mlflow_batchai.storage import credentials
from mlflow_batchai.tracking import runs
from mlflow_batchai.tracking.runs import Tracking

FOLLOWER_STARTS = 3
# What a follower says that lets go of a job because it can't start its next attempt: one that is told more can.
WAITS_FOR_ATTACH = "waiting for attach"


@dataclass
class Submitted:
    """A job on its way.

    Attributes:
        follower: process id of the detached follower that we started, or None.
        starts: how often we have started one.
        secrets: what its agents were told and is written nowhere, for the follower of a job that may start again by itself.
    """

    job: Job
    run_id: str
    tracking: Tracking
    follower: int | None = None
    starts: int = 0
    secrets: Mapping[str, Any] = field(default_factory=dict, repr=False)
    _monitor: LeaseMonitor | None = field(default=None, init=False, repr=False)

    @property
    def monitor(self) -> LeaseMonitor:
        """The monitor of the job's lease; it knows more with each look."""
        if self._monitor is None or self._monitor.job is not self.job:
            words = _arguments(self.job)
            self._monitor = LeaseMonitor(self.job, lambda: proc.that_run(words))
        return self._monitor

    def followed(self) -> LeaseView:
        """The present follower of the job, as far as known (``LeaseMonitor.look``).

        Raises:
            ShareError: its share can't be read now.
        """
        return self.monitor.look()


def start_follower(submitted: Submitted) -> None:
    """Start the detached process that relays the job into its run, and starts it again if it may.

    Raises:
        JobNotTrustedError: it would obey a plan that may be anybody's.
    """
    job = submitted.job
    job.check_trusted()
    # What opens the control share is made anew for each attempt.
    kept = {key: value for key, value in submitted.secrets.items() if key != "share" and value}
    told = {"told": json.dumps(kept).encode()} if kept and job.plan.may_go_on else {}
    submitted.follower = spawn(["-m", *_arguments(job)], submitted.tracking, follower_log(job), **told)
    submitted.starts += 1


def spawn(arguments: Sequence[str], tracking: Tracking, log: Path, **told: bytes) -> int:
    """Start a Python that outlives this process and uses the same store and folder; its process id. Raises ``ClusterError``."""
    # -P: files of the user's folder must not be imported in place of libraries.
    argv = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), *arguments]
    # The store's address goes by MLflow's own variable: a database's holds a password, and `ps` shows everyone our arguments.
    environment = {**os.environ, **tracking.environment, **credentials.exported(), "BATCHAI_HOME": str(home())}
    return detach(argv, environment, log, **told)


def detach(argv: Sequence[str], environment: Mapping[str, str], log: Path, told: bytes = b"") -> int:
    """Start a command that outlives us: its own session, its output to a file, nothing inherited; its process id.

    Args:
        told: what it reads on its standard input, up to the end; nobody else can.

    Raises:
        ClusterError: it can't be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        os.fchmod(file.fileno(), 0o600)
        try:
            process = subprocess.Popen(
                list(argv),
                env=dict(environment),
                cwd="/",
                stdin=subprocess.PIPE if told else subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(f"{argv[0]} can't be started: {error.strerror}") from error
    if process.stdin:
        # One that has ended already says why in its log.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(told)
    # Nobody waits for it here: it is meant to go on without us.
    process.returncode = 0
    return process.pid


def follower_log(job: Job) -> Path:
    """Where a job's follower says what troubles it."""
    return home() / "followers" / f"{job.plan.job}.log"


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


def _arguments(job: Job) -> list[str]:
    """Arguments by which a job's follower is recognized among all processes."""
    return ["mlflow_batchai.follower", job.share.url, job.folder, job.plan.run_id]


def keep_follower(submitted: Submitted) -> None:
    """Start another follower if the job has none any more, or one that is kept from the store, and we may not be.

    Raises:
        JobError: it keeps ending, or the last one has let go of the job until somebody attaches to it; the message says why.
        ShareError: the job's folder can't be seen, so nor can who relays it.
    """
    if submitted.follower is not None and _child_alive(submitted.follower):
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
            engine.end_job(run.data.tags[runs.TAG_FOLDER].rpartition("/")[2])
    finally:
        runs.fail(mlflow, run_id, why, status)
