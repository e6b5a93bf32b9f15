"""Follow one job: relay it into MLflow until its verdict.

It shares nothing with the process that submitted the job. A job whose plan or other records were changed on the share is ended.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from mlflow_batchai.agent import protocol
from mlflow_batchai.errors import BatchAIError, JobChangedError, ShareError
from mlflow_batchai.follower import detached, notify
from mlflow_batchai.follower.retries import NotHereError
from mlflow_batchai.follower.supervisor import Supervisor
from mlflow_batchai.job.jobs import Job, pause_after
from mlflow_batchai.job.lease import Lease, LeaseLostError, LeaseState
from mlflow_batchai.job.states import JobState, failed_verdict
from mlflow_batchai.tracking import index, reading, runs, stores
from mlflow_batchai.tracking.relay import Relay
from mlflow_batchai.tracking.retrying import GivenUpError, LogThrottle, Result, RetryPolicy

STEP_SECONDS = 0.5
# The same while an attempt waits for its nodes and its folders don't change; they are looked at after pauses that grow.
WAITING_STEP_SECONDS, FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS, LOOK_GROWTH = 30.0, 2.0, 5.0, 1.25
TAG_SECONDS = 5.0
# For how long a share is away before we ask whether it is for us alone.
LEAVE_SECONDS = 10.0
# For how long a store takes nothing from us before others may know it, who might get on better.
TELL_SECONDS = 60.0
# How often a run that was deleted is looked at again: it may be restored.
GONE_LOOK_SECONDS = 10.0
RELAY_SECONDS = 86400.0


def follow(
    job: Job,
    tracking: runs.Tracking,
    kept: Mapping[str, Any] | None = None,
    lease: Lease | None = None,
    file: TextIO | None = None,
) -> JobState | None:
    """Relay a job until its run is finished, and start it again where it may.

    Args:
        kept: what agents of another attempt have to be told (``Retries``).
        lease: the job's, for a caller that wants to see how it goes.
        file: the log; None: standard error.

    Returns:
        The state it ended in, or None if another process relays it, has taken over, or has to come to go on with it.

    Raises:
        GivenUpError: the store or the share was away for longer than the job's relayDeadline, or the job has ended and its run
            is deleted; the lease is let go.
    """
    lease, log = lease or Lease(job), LogThrottle(file=file)
    seconds = job.plan.relay_seconds
    able = functools.partial(stores.reaches, tracking, job.plan.run_id)
    try:
        if not RetryPolicy(seconds, log).do(functools.partial(lease.acquire, able=able)):
            if (found := lease.view()).state is not LeaseState.FINISHED:
                log.say(f"{found.who} relays job {job.name}")
            return None
    except GivenUpError as error:
        raise GivenUpError(_final_message(job, error, None)) from error
    with lease.beating():
        follower = Follower(job.at(lease.attempt), tracking, lease, log, seconds, kept, file)
        try:
            return follower.run()
        except LeaseLostError as error:
            log.say(str(error))
            return None
        except JobChangedError as error:
            with contextlib.suppress(BatchAIError):
                detached.end_changed(tracking, job.plan.run_id, str(error))
            with contextlib.suppress(BatchAIError):
                # For those who watch it; nothing else of the job is obeyed or relayed.
                verdict = failed_verdict(protocol.SHARE_FAILED, str(error), "follower")
                if not follower.job.claim_verdict(verdict):
                    follower.job.finish_claim(verdict)
                lease.save({}, finished=True)
            raise
        except NotHereError as error:
            log.say(f"job {job.name}: {error}")
            with contextlib.suppress(BatchAIError):
                lease.release(f"job {job.name}: {error}")
            return None
        except GivenUpError as error:
            message = _final_message(job, error, follower.supervisor.end)
            with contextlib.suppress(BatchAIError):
                lease.release(message)
            raise GivenUpError(message) from error
        except Exception:
            # Its process may live on, for other jobs: another follower has this one at once.
            with contextlib.suppress(BatchAIError):
                lease.release("")
            raise


def _final_message(job: Job, error: GivenUpError, end: JobState | None) -> str:
    how = f"ended {end.execution_state}" if end else "goes on, as far as is known"
    return (
        f"{error}; job {job.name} {how}; its results are at {job.share.url}/{job.folder} and go into its run, when that can be"
        f" done again, with: batchai job attach {job.name}"
    )


class Follower:
    """Relays one attempt after the other, from the one that the last relay had come to.

    Args:
        job: the job at that attempt.
        lease: acquired, and beating.
        seconds: the job's relayDeadline.

    Attributes:
        job: the job at the attempt that is relayed.
        supervisor: what watches the job's nodes meanwhile.
    """

    def __init__(
        self,
        job: Job,
        tracking: runs.Tracking,
        lease: Lease,
        log: LogThrottle,
        seconds: float,
        kept: Mapping[str, Any] | None = None,
        file: TextIO | None = None,
    ) -> None:
        self.job = job
        self._lease = lease
        self._retry = RetryPolicy(seconds, log, lambda: self.supervisor.ended, self._note_error)
        # Not made yet: a database that is away is no reason to leave the nodes alone.
        self._mlflow = stores.client_when_used(tracking)
        self._reading = reading.client(tracking)
        self._cancels = index.cancel_tags(tracking.address, job.plan.experiment_id)
        self._relay = Relay(job, self._mlflow, lease)
        self._page = runs.page(tracking.uri, job.plan.experiment_id, job.plan.run_id) or ""
        self._kept, self._say = {} if kept is None else kept, log.say
        self._asked = self._waits = False
        self._next_round = 0.0
        self._next_tag = time.monotonic() + TAG_SECONDS
        self.supervisor = Supervisor(job, self._relay.heard(0), kept, lease.check, file)

    def run(self) -> JobState:
        """Relay until the run is finished; the state that the job ended in.

        Raises:
            GivenUpError: the store or the share is away for too long, or the run is deleted.
            LeaseLostError: another process has taken over.
            NotHereError: the next attempt can't be started from here; the run says so.
        """
        with self.supervisor.keeping():
            while True:
                try:
                    state = self._relay_attempt()
                except NotHereError as error:
                    self._persist(functools.partial(self._show_waits, str(error)))
                    raise
                self._note(*self.supervisor.notes[self.job.attempt])
                if state.next_attempt is None:
                    self._close(functools.partial(self._relay.finish, state))
                    # Before ``keeping`` waits for nodes that can't be freed yet.
                    notify.tell(self.job, self.job.attempt, state, self._page, self._kept.get("notify", {}), self._say)
                    return state
                if state.retries_left is not None:
                    self._note(f"attempt {self.job.attempt} ended: {state.reason.partition(chr(10))[0]}")
                self._close(self._relay.pass_on)
                self._go_on(state.next_attempt)

    def _note(self, *sentences: str) -> None:
        """Have the run say something, once: one that was killed just after it had noted that may have gone before us."""
        self._relay.notes += [sentence for sentence in sentences if sentence not in self._relay.notes]

    def _go_on(self, attempt: int) -> None:
        self.job = self.job.at(attempt)
        self._lease.attempt = attempt
        self._relay = Relay(self.job, self._mlflow, self._lease)
        self._asked = False

    def _relay_attempt(self) -> JobState:
        """Relay an attempt until it is over and its nodes are free."""
        over = functools.partial(self.supervisor.over, self.job.attempt)
        pause, look = 0.0, FIRST_LOOK_SECONDS
        while True:
            if state := over(pause):
                return state
            begun, glimpse = time.monotonic(), self.job.glimpse() if self._waits else None
            self._persist(self._round, sleep=over, enough=lambda: over(0) is not None)
            pause = pause_after(time.monotonic() - begun, STEP_SECONDS)
            while self._waits and glimpse and time.monotonic() - begun < WAITING_STEP_SECONDS and self.job.glimpse() == glimpse:
                if state := over(look):
                    return state
                look = min(look * LOOK_GROWTH, LONGEST_LOOK_SECONDS)

    def _round(self) -> None:
        """Relay what is new."""
        # Whoever has taken over while we waited for the store has done what we would do now.
        self._lease.check(exactly=False)
        state = self.job.state(self._relay.ending)
        waited, self._waits = self._waits, state.execution_state == protocol.QUEUED and not self._relay.ending
        if waited and not self._waits:
            self.supervisor.look()  # its nodes, or somebody who wants its end, have come
        if state.ended or state.next_attempt:
            self.supervisor.look()
        elif time.monotonic() >= self._next_round and not self._with_run(functools.partial(self._relay_news, state)):
            self._next_round = time.monotonic() + GONE_LOOK_SECONDS

    def _show_waits(self, what: str) -> None:
        """Say in the run what an attempt waits for before it is started."""
        if not self._relay.run_gone():
            self._relay.show_waits(what)

    def _relay_news(self, state: JobState) -> None:
        self._relay.show_state(state)
        self._relay.show_waits(self.supervisor.waits)
        # Agents that have no node yet write nothing that the run needs.
        if self.job.hosts:
            self._relay.step()
        self._relay.describe(state)
        self._relay.files_when_due()
        if self.job.hosts:
            self._relay.logs_when_due()
            self._relay.outputs_when_whole()
        if not self._asked and time.monotonic() >= self._next_tag:
            self._next_tag = time.monotonic() + TAG_SECONDS
            if self._cancels.wanted(self._reading, self.job.plan.run_id):
                self.job.request_cancel("the run's tag batchai.cancel", "")
                self._asked = True

    def _close(self, last: Callable[[], None]) -> None:
        """An attempt is over: do the last with its run. While that is deleted, wait until it is restored or the job has ended.

        Raises:
            GivenUpError: the job has ended, and its run is still deleted.
        """
        ended = False
        while not self._persist(lambda: not self._relay.run_gone() and self._with_run(last)):
            if ended:
                run = self.job.plan.run_id
                raise GivenUpError(f"run {run} is deleted (mlflow runs restore --run-id {run} brings it back)")
            ended = self.supervisor.has_ended(GONE_LOOK_SECONDS)

    def _with_run(self, act: Callable[[], None]) -> bool:
        """Do something with the run; False if that was refused since it is deleted."""
        try:
            act()
        except Exception as error:
            if not (stores.is_refusal(error) and self._relay.run_gone()):
                raise
            return False
        return True

    def _persist(self, act: Callable[[], Result], **how: Any) -> Result | None:
        """Do something that needs store and share, once both are there: nobody else will."""

        def tried() -> Result:
            result = act()
            self._lease.trouble = ""
            return result

        return self._retry.do(tried, **how)

    def _note_error(self, error: BaseException, seconds: float) -> None:
        if isinstance(error, ShareError):
            if seconds > LEAVE_SECONDS and self._relay.run_ended():
                # Our way to the share is gone (its SAS has expired, say), and someone who has one has done the rest.
                raise LeaseLostError("another process has ended the run") from error
        elif seconds > TELL_SECONDS:
            self._lease.trouble = stores.sentence(error)
