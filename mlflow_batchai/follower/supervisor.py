"""The supervisor: a thread that sees each attempt of a job to its end and begins the next; it does not need MLflow.

It runs in a thread of the follower, beside the relay: a tracking server that is away or slow keeps no node from being given up
or freed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO, TypeVar

from mlflow_batchai.cluster import clusters
from mlflow_batchai.engines.absent import AbsentEngine
from mlflow_batchai.engines.base import Engine, Handle, Poll
from mlflow_batchai.errors import BatchAIError, ClusterError, JobChangedError, ShareError
from mlflow_batchai.follower import polls
from mlflow_batchai.follower.retries import LOOK_SECONDS, Leaving, NotHereError, Retries
from mlflow_batchai.follower.watch import Watch
from mlflow_batchai.job.jobs import Job, pause_after
from mlflow_batchai.job.lease import LeaseLostError
from mlflow_batchai.job.states import JobState
from mlflow_batchai.tracking.retrying import LONGEST_WAIT_SECONDS, LogThrottle

LEAVE_SECONDS = 10.0
# Pauses before the nodes of a job that has ended are freed once more, where they could not be asked.
FREE_AGAIN_SECONDS = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
LONGEST_FREEING_SECONDS = 900.0

Result = TypeVar("Result")


class Supervisor:
    """Keeps one job going, attempt after attempt.

    Args:
        job: the job at the attempt to begin with.
        heard: how many of node 0's segments were seen before.
        kept: what agents were told and the environment doesn't have (``Retries``).
        check: raises LeaseLostError unless we hold the job's lease.
        file: the log; None: standard error.

    Attributes:
        job: the job at the attempt that is kept now.
        notes: attempt -> sentences on what went wrong when its nodes were freed.
        waits: what its attempt waits for before it is started, in a sentence; empty: for nothing.
        end: the state that the job ended in, once its last attempt is over.
        ended: when that was seen (``time.monotonic``).
    """

    def __init__(
        self,
        job: Job,
        heard: int = 0,
        kept: Mapping[str, Any] | None = None,
        check: Callable[[], None] = lambda: None,
        file: TextIO | None = None,
    ) -> None:
        self.job = job
        self.notes: dict[int, list[str]] = {}
        self.waits = ""
        self.end: JobState | None = None
        self.ended: float | None = None
        self._log = LogThrottle(file=file)
        self._heard = heard
        self._changed = threading.Condition()
        self._awake = threading.Event()
        self._leaving = False
        self._over: dict[int, JobState] = {}
        self._broken: BaseException | None = None
        self._retries = Retries({} if kept is None else kept, check, self._rest, self._wait_for)
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Run the thread during the block."""
        self._thread.start()
        # A node that takes long to answer is not waited for: this thread ends when it has.
        seconds = LEAVE_SECONDS
        try:
            yield
            # The job has ended, and nobody else will free its nodes.
            seconds = LONGEST_FREEING_SECONDS
        finally:
            self._leaving = True
            self._awake.set()
            self._thread.join(seconds)

    def over(self, attempt: int, seconds: float) -> JobState | None:
        """The state that an attempt ended in, once its nodes are free; waits for that so long, then None.

        Raises:
            Exception: what ended the supervisor before that.
        """
        return self._over[attempt] if self._await(lambda: attempt in self._over, seconds) else None

    def has_ended(self, seconds: float) -> bool:
        """Whether the job's last attempt is over; waits for that so long, and raises as ``over`` does."""
        return self._await(lambda: self.end is not None, seconds)

    def _await(self, there: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: there() or self._broken is not None, seconds)
            if not there() and self._broken is not None:
                raise self._broken
            return there()

    def look(self) -> None:
        """Someone has seen that the attempt waits no longer, or is over: look at once."""
        self._awake.set()

    def _run(self) -> None:
        try:
            self._keep()
        except BaseException as error:  # whoever waits for us must hear of it
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _keep(self) -> None:
        state: JobState | None = None
        while state is None or state.next_attempt is not None:
            # Anew for each attempt: its cluster may have been described otherwise since.
            with self._cluster() as (engine, poll):
                state = self._keep_attempt(engine, poll)
            if state is None:
                return
            if state.next_attempt is not None:
                self.job, self._heard = self.job.at(state.next_attempt), 0

    @contextlib.contextmanager
    def _cluster(self) -> Iterator[tuple[Engine, Callable[[Handle], Poll]]]:
        """The engine of the job, and what polls it; on a machine that doesn't know its cluster of an AbsentEngine: the relay
        goes on."""
        with contextlib.ExitStack() as stack:
            try:
                engine: Engine = clusters.load(self.job.plan.cluster)[0].engine
                poll = stack.enter_context(polls.shared(self.job.plan.cluster)).poll
            except BatchAIError as error:
                self._log.say(f"{error}; the job is relayed, and its nodes can't be asked")
                engine = AbsentEngine(str(error))
                poll = engine.poll
            stack.enter_context(contextlib.closing(engine))
            yield engine, poll

    def _keep_attempt(self, engine: Engine, poll: Callable[[Handle], Poll]) -> JobState | None:
        """See an attempt started, ended, and its nodes free; return its state, None if asked to leave."""
        try:
            self._until(functools.partial(self._bring, engine), lambda: LOOK_SECONDS)
        except Leaving:
            return None
        watch = Watch(self.job, engine, self._heard, say=self._log.say, poll=poll)
        state = self._until(functools.partial(self._watch, watch), lambda: watch.seconds)
        if state is None:
            return None
        notes = _freed(watch)
        with self._changed:
            self.notes[self.job.attempt] = notes
            if state.next_attempt is None:
                self.end, self.ended = state, time.monotonic()
            self._over[self.job.attempt] = state
            self._changed.notify_all()
        # An ``AbsentEngine``, which has no nodes, can't be asked later either.
        if state.next_attempt is None and engine.node_limit:
            if notes:
                self._log.say(notes[0])
            for pause in FREE_AGAIN_SECONDS:
                if not notes:
                    break
                time.sleep(pause)
                before, notes = notes, _freed(watch)
                if notes != before:
                    self._log.say(notes[0] if notes else f"the nodes of job {self.job.name} are free now")
        return state

    def _bring(self, engine: Engine) -> bool:
        """See to it that the attempt is started."""
        self._retries.bring(self.job, engine)
        return True

    def _rest(self, seconds: float) -> None:
        if not self._leaving:
            self._awake.wait(seconds)
            self._awake.clear()
        if self._leaving:
            raise Leaving

    def _wait_for(self, what: str) -> None:
        if what and what != self.waits:
            self._log.say(what)
        self.waits = what

    def _watch(self, watch: Watch) -> JobState | None:
        """Look at an attempt; its state once it is over."""
        watch.check_or_complain()
        state = self.job.state(ending=False)
        return state if state.ended or state.next_attempt else None

    def _until(self, look: Callable[[], Result | None], seconds: Callable[[], float]) -> Result | None:
        """Call a step until it has a result, after each the pause that there is to be then; None if asked to leave."""
        wait = 0.0
        while not self._leaving:
            begun = time.monotonic()
            try:
                if (found := look()) is not None:
                    return found
                wait = 0.0
                self._log.over()
                pause = pause_after(time.monotonic() - begun, seconds())
            except (Leaving, LeaseLostError, NotHereError, JobChangedError):
                raise
            except Exception as error:  # a share that is away: nobody else will come and watch
                wait = min(wait * 2 or 1.0, LONGEST_WAIT_SECONDS)
                self._log.error(error, wait)
                pause = wait
            self._awake.wait(pause)
            self._awake.clear()
        return None


def _freed(watch: Watch) -> list[str]:
    """See that the nodes of an attempt are free; sentences on what went wrong."""
    try:
        watch.clean_up()
    except (ClusterError, ShareError) as error:
        return [str(error)]
    return []
