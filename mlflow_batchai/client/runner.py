"""Watch a submitted job: its state, its output, its end, and a request to end it."""

from __future__ import annotations

import contextlib
import getpass
import os
import time
from collections.abc import Callable, Iterator

from mlflow_batchai.agent import protocol
from mlflow_batchai.client.console import JobConsole
from mlflow_batchai.client.signals import Signals
from mlflow_batchai.cluster.scaling import WAITING, WhyQueued
from mlflow_batchai.errors import JobDetachedError, JobFailedError, ShareError
from mlflow_batchai.follower.detached import Submitted, follower_log, keep_follower
from mlflow_batchai.job.events import EventReader
from mlflow_batchai.job.jobs import Job, pause_after
from mlflow_batchai.job.lease import Lease, LeaseState
from mlflow_batchai.job.states import JobState

WATCH_SECONDS, INDEX_WATCH_SECONDS = 0.1, 2.0
PATIENCE_SECONDS = 10.0
# A share that is away: for how long it is looked for, and how often at most.
SHARE_PATIENCE_SECONDS, RETRY_SECONDS = 600.0, 2.0


def cancel(submitted: Submitted, why: str = "", who: str | None = None) -> None:
    """Ask for the job's end, in the name of this user if of none else; returns at once. One that has ended stays as it is."""
    if not submitted.job.state().ended:
        submitted.job.request_cancel(user() if who is None else who, why)


def state(submitted: Submitted, ending: bool = True) -> JobState:
    """The job's state now; ``submitted.job`` is at its present attempt afterwards. ``ending``: see ``Job.state``."""
    while True:
        found = submitted.job.state(ending)
        if found.next_attempt is None:
            return found
        submitted.job = submitted.job.at(found.next_attempt)


def user() -> str:
    """The login name of this user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def wait(
    submitted: Submitted,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
    news: Callable[[str], None] = lambda sentence: None,
) -> JobState:
    """Wait until the job's run is finished. ``check``: called at every look, may raise; ``news``: told each state."""
    patience, told = Patience(submitted.job, say), ""
    while True:
        with patience.trying():
            found = state(submitted)
            if found.ended and Lease(submitted.job).finished():
                return found
            check()
            sentence = f"job {submitted.job.name} is {found.execution_state} (attempt {submitted.job.attempt})"
            if not found.ended and sentence != told:
                told = sentence
                news(told)
            keep_follower(submitted)
        time.sleep(_look_seconds(submitted.job))


class Patience:
    """A share that can't be used for a while (this machine slept, its network is away) is no reason to stop watching."""

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job = job
        self._say = say
        self._since: float | None = None

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Catch errors that may pass, so that the caller tries again.

        Raises:
            ShareError: it has failed for ``SHARE_PATIENCE_SECONDS``.
        """
        try:
            yield
        except ShareError as error:
            now = time.monotonic()
            if self._since is None:
                self._since = now
                self._say(f"{error} (job {self._job.name} goes on; still looking for it)")
            if now - self._since >= SHARE_PATIENCE_SECONDS:
                raise ShareError(f"{error}; job {self._job.name} goes on: batchai job attach {self._job.name}") from error
            time.sleep(RETRY_SECONDS)
        else:
            self._since = None


def watch(submitted: Submitted, console: JobConsole, signals: Signals, from_start: bool = True) -> JobState:
    """Show a job until its run is finished in MLflow.

    Args:
        signals: what they mean; its handlers are installed here if the caller hasn't.

    Raises:
        JobDetachedError: told to leave; the job goes on, and the message has the line that attaches to it.
        JobError: the follower can't be kept running.
    """
    job = submitted.job
    reader = EventReader(job)
    if not from_start:
        for _ in reader.read():
            pass
    try:
        with signals.installed():
            signals.watching()
            found = _watch_attempts(submitted, console, reader, signals)
            for sentence in _await_run(submitted, console, signals):
                console.say(sentence)
            return found
    except JobDetachedError as error:
        raise JobDetachedError(
            f"{error}; job {job.name} goes on: batchai job attach {job.name} | batchai job terminate {job.name}"
        ) from None
    finally:
        console.close()


def _cancel_here(submitted: Submitted, console: JobConsole) -> None:
    console.say(f"ending job {submitted.job.name}; press Ctrl-C again to leave it to end by itself")
    cancel(submitted, "Ctrl-C")


def _watch_attempts(submitted: Submitted, console: JobConsole, reader: EventReader, signals: Signals) -> JobState:
    """Show one attempt after the other, until the job has ended."""
    shown = ""
    waiting: WhyQueued | None = None
    patience = Patience(submitted.job, console.say)
    while True:
        begun = time.monotonic()
        with patience.trying():
            signals.check(lambda: _cancel_here(submitted, console))
            for _, _, records in reader.read():
                console.records(records)
            console.tell_step()
            found = submitted.job.state(reader.ending)
            if found.ended or found.next_attempt:
                for _, _, records in reader.read(to_the_end=True):
                    console.records(records)
                console.tell_step()
                if found.next_attempt is None:
                    return found
                console.say(_goes_on(submitted.job, found))
                submitted.job = submitted.job.at(found.next_attempt)
                reader = EventReader(submitted.job)
            if found.execution_state != shown:
                shown = found.execution_state
                stops = shown == protocol.TERMINATING and submitted.job.plan.ranks > 1 and not submitted.job.requests()
                console.state("stopping the other ranks" if stops else {protocol.QUEUED: WAITING}.get(shown, shown))
                waiting = WhyQueued(submitted.job) if shown == protocol.QUEUED else None
            if waiting and (told := waiting.news()):
                console.state(told)
            keep_follower(submitted)
        time.sleep(pause_after(time.monotonic() - begun, WATCH_SECONDS))


def _goes_on(job: Job, over: JobState) -> str:
    """Line that is shown between two attempts."""
    if over.retries_left is None:
        return f"the job waits in the queue again, as attempt {over.next_attempt}: {over.reason}"
    most = "" if job.plan.low_priority else f" of at most {(over.next_attempt or 0) + over.retries_left}"
    why = over.reason.partition("\n")[0]
    return f"attempt {job.attempt} ended: {why}; the job starts again, as attempt {over.next_attempt}{most}"


def _await_run(submitted: Submitted, console: JobConsole, signals: Signals) -> list[str]:
    """The job has ended: wait until its run has; sentences on what that is missing."""
    job, patience = submitted.job, Patience(submitted.job, console.say)
    lease = Lease(job)
    ended, said = time.monotonic(), False
    while True:
        with patience.trying():
            signals.check(lambda: None)
            found = lease.view()
            if found.state is LeaseState.FINISHED:
                return lease.missing()
            if found.sending:
                ended = time.monotonic()
            console.sending(found.sending)
            keep_follower(submitted)
        if not said and time.monotonic() - ended > PATIENCE_SECONDS:
            said = True
            console.say(f"the job has ended; its last results are on their way to MLflow (see {follower_log(job.plan.job)})")
        time.sleep(_look_seconds(job) / 2)


def _look_seconds(job: Job) -> float:
    """Seconds between two looks at a file of a job."""
    return WATCH_SECONDS if job.index is None else INDEX_WATCH_SECONDS


def outcome(submitted: Submitted, ended: JobState) -> None:
    """Raise JobFailedError, with the reason, unless the job has succeeded."""
    if ended.execution_state == protocol.SUCCEEDED:
        return
    if ended.terminated:
        reason = ended.reason or "terminated"
        how = reason if reason.startswith("terminated") else f"ended: {reason}"
        raise JobFailedError(f"job {submitted.job.name} was {how} (run {submitted.run_id} is KILLED)", None)
    raise JobFailedError(f"job {submitted.job.name} failed: {ended.reason}", ended.exit_code)
