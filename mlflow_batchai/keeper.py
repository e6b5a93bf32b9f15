"""The keeper: sees to it that each attempt of a job ends, and goes on with the next one. It needs the share and the nodes, and
nothing of MLflow.

It runs in a thread of the follower, beside the relay: a tracking server that is away or slow keeps no node from being given up
or freed.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Iterator

from mlflow_batchai.cluster import clusters
from mlflow_batchai.engines.absent import AbsentEngine
from mlflow_batchai.engines.base import Engine
from mlflow_batchai.errors import BatchAIError, ClusterError, ShareError
from mlflow_batchai.job.jobs import Job, pause_after
from mlflow_batchai.job.states import JobState
from mlflow_batchai.watch import Watch

LONGEST_TROUBLE_SECONDS = 60.0
LEAVE_SECONDS = 10.0


class Keeper:
    """Keeps one job going, attempt after attempt.

    Args:
        job: the job at the attempt to begin with.
        heard: how many of node 0's segments were seen before.

    Attributes:
        job: the job at the attempt that is kept now.
        notes: attempt -> sentences on what went wrong when its nodes were freed.
    """

    def __init__(self, job: Job, heard: int = 0) -> None:
        self.job = job
        self.notes: dict[int, list[str]] = {}
        self._heard = heard
        self._engine: Engine | None = None
        self._changed = threading.Condition()
        self._awake = threading.Event()
        self._leaving = False
        self._over: dict[int, JobState] = {}
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """It works for the time of the block."""
        self._thread.start()
        try:
            yield
        finally:
            self._leaving = True
            self._awake.set()
            # A node that takes long to answer is not waited for: the process ends, and this thread with it.
            self._thread.join(LEAVE_SECONDS)

    def over(self, attempt: int, seconds: float) -> JobState | None:
        """The state that an attempt ended in, once its nodes are free; waits for that so long, then None.

        Raises:
            Exception: what ended the keeper before that.
        """
        with self._changed:
            self._changed.wait_for(lambda: attempt in self._over or self._broken is not None, seconds)
            if attempt not in self._over and self._broken is not None:
                raise self._broken
            return self._over.get(attempt)

    def look(self) -> None:
        """Someone has seen that the attempt is over: look at once."""
        self._awake.set()

    def _run(self) -> None:
        try:
            self._keep()
        except BaseException as error:  # whoever waits for us must hear of it
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _keep(self) -> None:
        self._engine = _engine(self.job)
        while not self._leaving:
            watch = Watch(self.job, self._engine, self._heard)
            state = self._watch(watch)
            if state is None:
                return
            notes = _freed(watch)
            with self._changed:
                self.notes[self.job.attempt] = notes
                self._over[self.job.attempt] = state
                self._changed.notify_all()
            if state.next_attempt is None:
                return
            self.job, self._heard = self.job.at(state.next_attempt), 0

    def _watch(self, watch: Watch) -> JobState | None:
        """Watch an attempt until it is over; None when told to leave."""
        trouble = 0.0
        while not self._leaving:
            begun = time.monotonic()
            try:
                watch.check_or_complain()
                state = self.job.state(ending=False)
                if state.ended or state.next_attempt:
                    return state
                trouble = 0.0
                pause = pause_after(time.monotonic() - begun, watch.seconds)
            except Exception as error:  # a share that is away: nobody else will come and watch
                trouble = min(trouble * 2 or 1.0, LONGEST_TROUBLE_SECONDS)
                complain(error, trouble)
                pause = trouble
            self._awake.wait(pause)
            self._awake.clear()
        return None


def _engine(job: Job) -> Engine:
    """What the job runs on; a machine that doesn't know its cluster can relay it all the same."""
    try:
        return clusters.load(job.plan["cluster"])[0].engine
    except BatchAIError as error:
        print(f"{error}; the job is relayed, and its nodes can't be asked", file=sys.stderr, flush=True)
        return AbsentEngine(str(error))


def _freed(watch: Watch) -> list[str]:
    """See that the nodes of an attempt are free; sentences on what went wrong."""
    try:
        watch.clean_up()
    except (ClusterError, ShareError) as error:
        return [str(error)]
    return []


def complain(error: Exception, wait: float) -> None:
    """Into the follower's log: what went wrong, and when it is tried again."""
    text = str(error) if isinstance(error, BatchAIError) else "".join(traceback.format_exception(error)).rstrip()
    print(f"{time.strftime('%H:%M:%S')} {text}\ntrying again in {wait:.0f} s", file=sys.stderr, flush=True)
