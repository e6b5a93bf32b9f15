"""Jobs that nobody relays: found among those of a user that have not ended, and given a follower again.

Whose follower is a process of this machine needs one look. For all others together one grace time is waited at most: a follower
that lives beats in it.
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
from mlflow_batchai.job.jobs import pause_after
from mlflow_batchai.job.lease import LeaseState, LeaseView
from mlflow_batchai.tracking import runs
from mlflow_batchai.tracking.runs import Tracking

if TYPE_CHECKING:
    from mlflow.entities import Run

# For how long the first look at all jobs may take: a mount that hangs holds up only the jobs that lie there.
FIRST_LOOK_SECONDS = 60.0
WATCH_SECONDS = 0.5

Say = Callable[[str], None]


class Result(Enum):
    """What became of one that was looked after."""

    FOLLOWED = "followed"
    STARTED = "followerStarted"
    FINISHED = "finished"
    WAITS = "waitsForAttach"
    UNSTARTED = "unstarted"
    UNSEEN = "unseen"


@dataclass
class Charge:
    """A job that is looked after.

    Attributes:
        submitted: the job; None: it can't be looked at.
        state: its execution state; None: not known.
        reason: why it is in that state.
        follower: who relays it, as far as that was seen.
        result: None: not known yet.
        detail: the same in words.
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
        """It is known what became of it."""
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


def look_after(found: Sequence[Run], tracking: Tracking, say: Say) -> Iterator[Charge]:
    """Give each of these jobs a follower if it has none; yields each as soon as it is known what became of it.

    What goes wrong with one holds up no other.

    Args:
        found: runs of jobs.
        say: told when there is something to wait for.
    """
    charges = _opened(found, tracking)
    yield from _judged(charges)
    if open_ := [charge for charge in charges if charge.result is None]:
        seconds = max(charge.found.monitor.grace_seconds for charge in open_)
        say(f"waiting up to {seconds:.0f} s to see whether the followers of {len(open_)} job(s) on other machines live")
    while open_:
        time.sleep(min(charge.found.monitor.look_seconds for charge in open_))
        for charge in open_:
            _try(charge, _look)
        yield from _judged(open_)
        open_ = [charge for charge in open_ if charge.result is None]


def _opened(found: Sequence[Run], tracking: Tracking) -> list[Charge]:
    """Look at all jobs at once."""
    charges = [Charge(run.data.tags[runs.TAG_JOB], run.info.run_id) for run in found]
    calls = [functools.partial(_open, run, tracking) for run in found]
    futures = parallel.begin(calls)
    wait_for_calls(futures, FIRST_LOOK_SECONDS)
    for charge, future in zip(charges, futures, strict=True):
        if not future.done():
            charge.end(Result.UNSEEN, f"its share has not answered for {FIRST_LOOK_SECONDS:.0f} s")
            continue
        try:
            charge.submitted = future.result()
        except lookup.NoFolderError as lost:
            charge.end(*_without_folder(lost))
        except Exception as error:  # whatever is wrong with one job, the others are looked after
            charge.end(Result.UNSEEN, _told(error))
        else:
            _try(charge, _look)
    return charges


def _open(run: Run, tracking: Tracking) -> Submitted:
    try:
        submitted = lookup.of_run(run, tracking)
    except JobChangedError as error:
        detached.end_changed(tracking, run.info.run_id, str(error))
        raise
    submitted.followed()
    return submitted


def _without_folder(lost: lookup.NoFolderError) -> tuple[Result, str]:
    if lost.unstarted:
        return Result.UNSTARTED, f"nothing of it was started, or is yet; batchai job terminate {lost.run_id} ends its run"
    return Result.UNSEEN, str(lost)


def _try(charge: Charge, step: Callable[[Charge], object]) -> None:
    try:
        step(charge)
    except Exception as error:  # as above
        charge.end(Result.UNSEEN, _told(error))


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, BatchAIError) else f"{type(error).__name__}: {error}"


def _look(charge: Charge) -> LeaseView:
    state = runner.state(charge.found)
    charge.state, charge.reason = state.execution_state, state.reason
    charge.follower = charge.found.followed()
    return charge.follower


def _judged(charges: Sequence[Charge]) -> Iterator[Charge]:
    """Do what can be done; those for which that is known."""
    for charge in charges:
        if charge.result is None:
            _try(charge, _judge)
        if charge.result is not None:
            yield charge


def _judge(charge: Charge) -> None:
    follower = charge.follower
    assert follower is not None
    if follower.state is LeaseState.FINISHED and not detached.reopen(charge.found):
        charge.end(Result.FINISHED, "it has finished while we looked")
    elif follower.state is LeaseState.HELD and not follower.trouble:
        charge.end(Result.FOLLOWED, f"followed by {follower.who}")
    elif follower.state is LeaseState.FREE and (lacking := _lacking(charge)):
        charge.end(Result.WAITS, lacking)
    elif follower.state is not LeaseState.UNKNOWN:
        detached.start_follower(charge.found)
        charge.end(Result.STARTED, f"follower started (process {charge.found.follower}){_why(follower)}")


def _lacking(charge: Charge) -> str:
    """What the next attempt of a job, which nobody has started yet, needs and we don't have: a follower would only say so and
    end, at every look again. Empty: nothing."""
    job = charge.found.job
    if charge.state != protocol.QUEUED or job.attempt == 1 or job.handle() is not None or job.is_begun():
        return ""
    try:
        retries.check_can_start(job)
    except retries.NotHereError as error:
        return str(error)
    return ""


def _why(follower: LeaseView) -> str:
    """What the one before has told, or where it was."""
    if follower.trouble:
        return f"; {follower.who} says: {follower.trouble}"
    return f"; {follower.who} is gone" if follower.holder else ""


def wait(charges: Sequence[Charge], say: Say) -> Iterator[Charge]:
    """Wait until the runs of these jobs are finished, keeping a follower with each; yields each as it is.

    One that can't be seen to its end is yielded too, as UNSEEN.

    Args:
        say: told when a share is away.
    """
    left = [(charge, runner.Patience(charge.found.job, say)) for charge in charges if _waits(charge)]
    while left:
        begun = time.monotonic()
        for charge, patience in left:
            try:
                with patience.trying():
                    _keep(charge)
            except BatchAIError as error:
                charge.end(Result.UNSEEN, str(error))
            if not _waits(charge):
                yield charge
        left = [(charge, patience) for charge, patience in left if _waits(charge)]
        if left:
            time.sleep(pause_after(time.monotonic() - begun, WATCH_SECONDS))


def _keep(charge: Charge) -> None:
    follower = _look(charge)
    if follower.state is LeaseState.FINISHED:
        charge.end(Result.FINISHED, f"it has {charge.state}" + (f": {charge.reason}" if charge.reason else ""))
    else:
        detached.keep_follower(charge.found)


def _waits(charge: Charge) -> bool:
    return charge.result in (Result.FOLLOWED, Result.STARTED)
