"""Find a user's jobs that have not ended and have no follower, and start followers for them.

Whose follower is a process of this machine needs one look. For all others together one grace time is waited at most: a follower
that lives sends a heartbeat in it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait as wait_for_calls
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from mlflow_batchai.agent import protocol
from mlflow_batchai.client import jobview, lookup, runner
from mlflow_batchai.engines import parallel
from mlflow_batchai.errors import BatchAIError, JobChangedError
from mlflow_batchai.follower import detached, retries
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.job import lease
from mlflow_batchai.job.jobs import pause_after
from mlflow_batchai.job.lease import LeaseState, LeaseView
from mlflow_batchai.tracking import runs, stores
from mlflow_batchai.tracking.runs import Tracking

if TYPE_CHECKING:
    from mlflow.entities import Run

# For how long the first look at all jobs may take: a mount that hangs holds up only the jobs that lie there.
FIRST_LOOK_SECONDS = 60.0
WATCH_SECONDS = 0.5

Say = Callable[[str], None]


class Result(Enum):
    """Outcome for a job that was looked at."""

    FOLLOWED = "followed"
    STARTED = "followerStarted"
    FINISHED = "finished"
    WAITS = "waitsForAttach"
    UNSTARTED = "unstarted"
    UNSEEN = "unseen"


@dataclass
class Candidate:
    """A job that may need a follower.

    Attributes:
        submitted: the job; None: it can't be looked at.
        state: its execution state; None: not known.
        reason: why it is in that state.
        follower: who relays it, as far as that was seen.
        result: None: not known yet.
        detail: the same as a sentence.
    """

    name: str
    run_id: str
    submitted: Submitted | None = None
    state: str | None = None
    reason: str = ""
    follower: LeaseView | None = None
    result: Result | None = None
    detail: str = ""

    def end(self, result: Result, detail: str) -> None:
        """Set the outcome."""
        self.result, self.detail = result, detail

    @property
    def found(self) -> Submitted:
        """The job, of one that can be looked at."""
        assert self.submitted is not None
        return self.submitted

    @property
    def sentence(self) -> str:
        """One line; jobs of several experiments may have one name."""
        return f"job {self.name} (run {self.run_id}): {self.detail}"

    def row(self) -> dict[str, Any]:
        """Plain data."""
        assert self.result is not None
        return {
            "name": self.name,
            "runId": self.run_id,
            "executionState": self.state,
            "follower": None if self.follower is None else jobview.follower(self.follower),
            "result": self.result.value,
            "detail": self.detail,
        }


def look_after(found: Sequence[Run], tracking: Tracking, say: Say) -> Iterator[Candidate]:
    """Give each of these jobs a follower if it has none; yields each as soon as it is known what became of it.

    What goes wrong with one holds up no other.

    Args:
        found: runs of jobs.
        say: told when there is something to wait for.
    """
    candidates = _opened(found, tracking)
    yield from _judged(candidates)
    if open_ := [candidate for candidate in candidates if candidate.result is None]:
        seconds = f"{lease.GRACE_SECONDS:.0f} s"
        say(f"waiting up to {seconds} to see whether the followers of {len(open_)} job(s) on other machines live")
    while open_:
        time.sleep(min(candidate.found.monitor.look_seconds for candidate in open_))
        for candidate in open_:
            _try(candidate, _look)
        yield from _judged(open_)
        open_ = [candidate for candidate in open_ if candidate.result is None]


def _opened(found: Sequence[Run], tracking: Tracking) -> list[Candidate]:
    """Look at all jobs at once."""
    candidates = [Candidate(run.data.tags[runs.TAG_JOB], run.info.run_id) for run in found]
    calls = [functools.partial(_open, run, tracking) for run in found]
    futures = parallel.begin(calls)
    wait_for_calls(futures, FIRST_LOOK_SECONDS)
    for candidate, future in zip(candidates, futures, strict=True):
        if not future.done():
            candidate.end(Result.UNSEEN, f"its share has not answered for {FIRST_LOOK_SECONDS:.0f} s")
            continue
        try:
            candidate.submitted = future.result()
        except Exception as error:  # whatever is wrong with one job, the others are looked after
            if isinstance(error, lookup.NoFolderError) and error.unstarted:
                how = f"batchai job terminate {error.run_id} ends its run"
                candidate.end(Result.UNSTARTED, f"nothing of it was started, or is yet; {how}")
            else:
                candidate.end(Result.UNSEEN, stores.sentence(error))
        else:
            _try(candidate, _look)
    return candidates


def _open(run: Run, tracking: Tracking) -> Submitted:
    try:
        submitted = lookup.of_run(run, tracking)
    except JobChangedError as error:
        detached.end_changed(tracking, run.info.run_id, str(error))
        raise
    submitted.followed()
    return submitted


def _try(candidate: Candidate, step: Callable[[Candidate], object]) -> None:
    try:
        step(candidate)
    except Exception as error:  # as above
        candidate.end(Result.UNSEEN, stores.sentence(error))


def _look(candidate: Candidate) -> LeaseView:
    state = runner.state(candidate.found)
    candidate.state, candidate.reason = state.execution_state, state.reason
    candidate.follower = candidate.found.followed()
    return candidate.follower


def _judged(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Do what can be done; those for which that is known."""
    for candidate in candidates:
        if candidate.result is None:
            _try(candidate, _judge)
        if candidate.result is not None:
            yield candidate


def _judge(candidate: Candidate) -> None:
    follower = candidate.follower
    assert follower is not None
    if follower.state is LeaseState.FINISHED and not detached.reopen(candidate.found):
        candidate.end(Result.FINISHED, "it has finished while we looked")
    elif follower.state is LeaseState.HELD and not follower.trouble:
        candidate.end(Result.FOLLOWED, f"followed by {follower.who}")
    elif follower.state is LeaseState.FREE and (lacking := _lacking(candidate)):
        candidate.end(Result.WAITS, lacking)
    elif follower.state is not LeaseState.UNKNOWN:
        detached.start_follower(candidate.found)
        why = f"; {follower.who} is gone" if follower.holder else ""
        why = f"; {follower.who} says: {follower.trouble}" if follower.trouble else why
        candidate.end(Result.STARTED, f"follower started (process {candidate.found.follower}){why}")


def _lacking(candidate: Candidate) -> str:
    """What we lack to start the next attempt of a job: a follower would only say so and end, at every look again. Empty:
    nothing, or the attempt was started."""
    job = candidate.found.job
    if candidate.state != protocol.QUEUED or job.attempt == 1 or job.handle() is not None or job.is_begun():
        return ""
    try:
        retries.check_can_start(job)
    except retries.NotHereError as error:
        return str(error)
    return ""


def wait(candidates: Sequence[Candidate], say: Say) -> Iterator[Candidate]:
    """Wait until the runs of these jobs are finished, keeping a follower with each; yields each as it is.

    One that can't be seen to its end is yielded too, as UNSEEN.

    Args:
        say: told when a share is away.
    """
    left = [(candidate, runner.Patience(candidate.found.job, say)) for candidate in candidates if _waits(candidate)]
    while left:
        begun = time.monotonic()
        for candidate, patience in left:
            try:
                with patience.trying():
                    _keep(candidate)
            except BatchAIError as error:
                candidate.end(Result.UNSEEN, str(error))
            if not _waits(candidate):
                yield candidate
        left = [(candidate, patience) for candidate, patience in left if _waits(candidate)]
        if left:
            time.sleep(pause_after(time.monotonic() - begun, WATCH_SECONDS))


def _keep(candidate: Candidate) -> None:
    follower = _look(candidate)
    if follower.state is LeaseState.FINISHED:
        candidate.end(Result.FINISHED, f"it has {candidate.state}" + (f": {candidate.reason}" if candidate.reason else ""))
    else:
        detached.keep_follower(candidate.found)


def _waits(candidate: Candidate) -> bool:
    return candidate.result in (Result.FOLLOWED, Result.STARTED)
