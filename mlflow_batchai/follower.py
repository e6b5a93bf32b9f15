"""The follower: a detached process that relays one job into MLflow until its verdict, whatever becomes of its submitter.

``python -m mlflow_batchai.follower SHARE FOLDER``, with the tracking store in MLFLOW_TRACKING_URI; it shares nothing with the
process that started it.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow_batchai import runs
from mlflow_batchai.errors import BatchAIError, ShareError
from mlflow_batchai.job.jobs import Job, pause_after
from mlflow_batchai.job.lease import Hold, Lease, LeaseLostError
from mlflow_batchai.job.states import JobState
from mlflow_batchai.keeper import Keeper, complain
from mlflow_batchai.relay import Relay
from mlflow_batchai.shares import open_share

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

STEP_SECONDS = 0.5
TAG_SECONDS = 5.0
LEAVE_TROUBLE_SECONDS = 10.0


def follow(job: Job, tracking: runs.Tracking) -> JobState | None:
    """Relay a job until its run is finished.

    Returns:
        The state it ended in, or None if another process relays it, or has taken over.
    """
    lease = Lease(job)
    trouble = 1.0
    while True:
        try:
            if lease.acquire():
                break
            if (found := lease.glance()).hold is not Hold.FINISHED:
                print(f"{time.strftime('%H:%M:%S')} {found.who} relays job {job.name}", file=sys.stderr)
            return None
        except ShareError as error:  # full, or not there for now: as with a store that is down, nobody else will come
            complain(error, trouble)
            time.sleep(trouble)
            trouble = min(trouble * 2, 60.0)
    with lease.beating():
        try:
            return _follow(job, runs.client(tracking), lease)
        except LeaseLostError:
            return None


def _follow(job: Job, mlflow: MlflowClient, lease: Lease) -> JobState:
    """Relay one attempt after the other, from the one that the last relay had come to."""
    job = job.at(lease.attempt)
    relay = Relay(job, mlflow, lease)
    keeper = Keeper(job, relay.heard(0))
    with keeper.keeping():
        while True:
            state = _relay_attempt(job, relay, keeper)
            relay.notes += keeper.notes[job.attempt]
            if state.next_attempt is None:
                _end(relay, functools.partial(relay.finish, state), lease)
                return state
            _end(relay, relay.pass_on, lease)
            job = job.at(state.next_attempt)
            lease.attempt = job.attempt
            relay = Relay(job, mlflow, lease)


def _relay_attempt(job: Job, relay: Relay, keeper: Keeper) -> JobState:
    """Relay an attempt until it is over and its nodes are free."""
    relaying = True
    next_tag = time.monotonic() + TAG_SECONDS
    asked = False
    trouble = pause = 0.0
    while True:
        if over := keeper.over(job.attempt, pause):
            return over
        try:
            begun = time.monotonic()
            state = job.state(relay.ending)
            if state.ended or state.next_attempt:
                keeper.look()
            elif relaying:
                relay.show_state(state)
                relay.step()
                relay.logs_when_due()
            if relaying and not asked and time.monotonic() >= next_tag:
                next_tag = time.monotonic() + TAG_SECONDS
                if relay.cancel_wanted():
                    job.request_cancel("the run's tag batchai.cancel", "")
                    asked = True
            trouble = 0.0
            pause = pause_after(time.monotonic() - begun, STEP_SECONDS)
        except LeaseLostError:
            raise
        except Exception as error:  # a store that is down must not end the following: wait and try again
            trouble = min(trouble * 2 or 1.0, 60.0)
            complain(error, trouble)
            if isinstance(error, ShareError) and trouble > LEAVE_TROUBLE_SECONDS and relay.run_ended():
                # Our way to the share is gone (its SAS has expired, say), and someone who has one has done the rest.
                raise LeaseLostError("another process has ended the run") from error
            relaying = not relay.run_gone()
            pause = trouble


def _end(relay: Relay, last: Callable[[], None], lease: Lease) -> None:
    """An attempt is over: do the last with its run; a server that is down is waited for, since nobody else will do it."""
    trouble = 1.0
    while True:
        try:
            last()
            return
        except LeaseLostError:
            raise
        except Exception as error:
            complain(error, trouble)
        if relay.run_gone():
            lease.save({}, finished=True)
            return
        time.sleep(trouble)
        trouble = min(trouble * 2, 60.0)


def main() -> int:
    """Entry point of the detached process."""
    share, folder = sys.argv[1:3]
    try:
        follow(Job(open_share(share), folder), runs.absolute(os.environ["MLFLOW_TRACKING_URI"], Path("/")))
    except BatchAIError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
