"""A submitted job as a Python object, for notebooks and for MLflow's own API."""

from __future__ import annotations

import contextlib
import html
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from mlflow_batchai.client import runner, streaming
from mlflow_batchai.client.console import JobConsole
from mlflow_batchai.client.signals import Signals
from mlflow_batchai.errors import BatchAIError, ClusterError, JobError, StillRunningError, UsageError
from mlflow_batchai.follower.detached import Submitted, keep_follower
from mlflow_batchai.job import streams
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease
from mlflow_batchai.job.states import JobState
from mlflow_batchai.tracking import directories, runs, stores

RUNNING = "RUNNING"


class SubmittedJob:
    """A job that was submitted: here, or by another process (``attach``).

    It runs and its run is brought to the right end whatever becomes of this object and its process. All of it may be used by
    several threads at once. Errors are those of ``mlflow_batchai.errors``; where the tracking store is asked, a TrackingError
    has MLflow's own sentence.
    """

    def __init__(self, submitted: Submitted) -> None:
        self._submitted = submitted
        self._lock = threading.Lock()
        self._ended: JobState | None = None

    @property
    def name(self) -> str:
        """The job's name, which the command ``batchai`` takes."""
        return self._submitted.job.name

    @property
    def run_id(self) -> str:
        """The id of its MLflow run."""
        return self._submitted.run_id

    @property
    def url(self) -> str | None:
        """The run's page in MLflow's UI, where the tracking store is a server."""
        return runs.page(self._submitted.tracking.uri, self._submitted.job.plan.experiment_id, self.run_id)

    @property
    def status(self) -> str:
        """SCHEDULED, RUNNING, FINISHED, FAILED or KILLED: as its MLflow run has it.

        The last three mean that the run is complete: metrics, logs and outputs are in MLflow. A few files of the job's share
        are looked at, and MLflow isn't asked.
        """
        with self._lock:
            found = self._look()
            return found.run_status if self._ended or not found.ended else RUNNING

    @property
    def reason(self) -> str | None:
        """Why it has failed: one sentence, and the last lines of the rank that did; None while it hasn't."""
        with self._lock:
            return self._look().reason or None

    def _look(self) -> JobState:
        if self._ended:
            return self._ended
        found = runner.state(self._submitted)
        if found.ended and (Lease(self._submitted.job).finished() or not self._is_kept()):
            self._ended = found
        return found

    def _is_kept(self) -> bool:
        """See to it that somebody relays the rest; False if that can't be done from here."""
        try:
            keep_follower(self._submitted)
        except (JobError, ClusterError):
            return False
        return True

    def wait(self, timeout: float | None = None, *, show: bool = False) -> SubmittedJob:
        """Wait until the job has ended and its run is complete.

        KeyboardInterrupt ends the wait, not the job.

        Args:
            timeout: seconds; None: however long it takes.
            show: whether the ranks' output and a line of progress are printed meanwhile, from the start on.

        Raises:
            JobFailedError: it has failed, or was terminated; the message has the reason, ``exit_code`` the job's exit code.
            StillRunningError: (a TimeoutError) it has not ended in time, and goes on.
        """
        submitted, console = self._alone(), self._console()
        limit = _Limit(self.name, timeout)
        ended = runner.watch(submitted, console, limit) if show else runner.wait(submitted, console.say, limit.check)
        runner.outcome(submitted, ended)
        return self

    def stay(self) -> SubmittedJob:
        """Show the job until its run is complete, as ``mlflow run`` does: Ctrl-C ends the job.

        Raises:
            JobFailedError: it has failed, or was terminated.
        """
        try:
            return self.wait(show=True)
        except KeyboardInterrupt:
            self._console().say(f"ending job {self.name}")
            self.cancel()
            raise

    def cancel(self, timeout: float | None = None) -> None:
        """End the job; returns when its run is KILLED, or had ended before.

        Args:
            timeout: seconds; None: however long it takes.

        Raises:
            StillRunningError: (a TimeoutError) it has not ended in time; that was asked for, and it will.
        """
        submitted = self._alone()
        runner.cancel(submitted, "cancel()")
        runner.wait(submitted, self._console().say, _Limit(self.name, timeout).check)

    def logs(self, follow: bool = False, *, rank: int | None = None, stream: str = "stdout") -> Iterator[str]:
        """The lines that the ranks have written, of the present attempt.

        Args:
            rank: only this one's; default: all, joined, each line marked ``[rank]`` if there are several.
            stream: ``stdout`` or ``stderr``.

        Raises:
            UsageError: there is no such rank or stream.
        """
        submitted = self._alone()
        runner.state(submitted)
        job = submitted.job
        if stream not in ("stdout", "stderr"):
            raise UsageError(f"there is no stream '{stream}'; it is stdout or stderr")
        name = directories.log_name(job, rank, stream)
        if follow:
            pieces = streaming.stream_file(submitted, directories.LOGS, name, self._console().say, required=False)
        else:
            place = directories.directory(job, directories.LOGS)
            pieces = streams.so_far(streams.Tail(place.share, place.inside(name)), job.state().ended)
        return streaming.lines(pieces)

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric that has come to MLflow. Raises TrackingError: MLflow can't be asked."""
        with stores.as_tracking_error():
            return dict(runs.client(self._submitted.tracking).get_run(self.run_id).data.metrics)

    def outputs(self) -> dict[str, int]:
        """Files of the job's logs and output directories on the share, also while it runs: path -> size in bytes.

        A path begins with the directory's id: ``stdouterr/stdout.txt``, ``MODEL/model.h5``.

        Raises:
            ShareError: one of them lies where this machine can't read it.
        """
        job = self._job()
        found: dict[str, int] = {}
        for identity in [directories.LOGS, *(entry.id for entry in job.plan.output_directories)]:
            files = directories.files(directories.directory(job, identity))
            found |= {f"{identity}/{name}": size for name, size in files.items()}
        return found

    def download(self, path: str, to: str | os.PathLike[str] = ".") -> Path:
        """Copy a file or a folder of ``outputs`` to this machine.

        Args:
            path: as ``outputs`` has it, or a folder of that.
            to: the folder that it is put into; made if it isn't there.

        Returns:
            Where it is now.

        Raises:
            NotFoundError: there is no such file.
            ShareError: the share can't be read.
        """
        job = self._job()
        identity, _, below = path.strip("/").partition("/")
        return directories.download(directories.directory(job, identity), job, below, Path(to))

    def _job(self) -> Job:
        submitted = self._alone()
        runner.state(submitted)
        return submitted.job

    def _alone(self) -> Submitted:
        """The same for one call: what a job and its watchers remember belongs to one thread."""
        with self._lock:
            return replace(self._submitted, job=self._submitted.job.afresh())

    def _console(self) -> JobConsole:
        return JobConsole(self._submitted.job.plan.ranks)

    def __reduce__(self) -> NoReturn:
        # It would take what opens the store and the share with it.
        raise TypeError(
            f"a SubmittedJob can't be pickled: give the other process its run_id, for mlflow_batchai.attach('{self.run_id}')"
        )

    def __repr__(self) -> str:
        return f"<SubmittedJob {self.name}, run {self.run_id}>"

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        try:
            status = self.status
        except BatchAIError as error:
            status = str(error)
        run = html.escape(self.run_id)
        if self.url:
            run = f'<a href="{html.escape(self.url)}" target="_blank">{run}</a>'
        rows = [("job", html.escape(self.name)), ("status", html.escape(status)), ("run", run)]
        cells = "".join(f'<tr><th style="text-align:left">{name}</th><td>{text}</td></tr>' for name, text in rows)
        return f"<table>{cells}</table>"


class _Limit(Signals):
    """For how long somebody waits. Signals are left to Python: in a program of somebody's own Ctrl-C is a KeyboardInterrupt."""

    def __init__(self, name: str, seconds: float | None) -> None:
        super().__init__()
        self._name = name
        self._seconds = seconds
        self._until = None if seconds is None else time.monotonic() + seconds

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """No handlers."""
        yield

    def check(self, cancel: Callable[[], None] = lambda: None) -> None:
        """Raise StillRunningError when the time is up."""
        if self._until is not None and time.monotonic() >= self._until:
            raise StillRunningError(f"job {self._name} has not ended within {self._seconds:g} s; it goes on")
