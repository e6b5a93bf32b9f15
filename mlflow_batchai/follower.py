"""The follower: a detached process that relays one job into MLflow until its verdict, whatever becomes of its submitter.

``python -m mlflow_batchai.follower SHARE FOLDER``, with the tracking store in MLFLOW_TRACKING_URI; it shares nothing with the
process that started it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow_batchai import clusters, runs
from mlflow_batchai.engines.absent import AbsentEngine
from mlflow_batchai.engines.base import Engine, Poll, PollState
from mlflow_batchai.errors import BatchAIError, ClusterError, ShareError, ShareNotFoundError
from mlflow_batchai.jobs import Job, JobState, Snapshot, failed_verdict, pause_after
from mlflow_batchai.lease import Lease, LeaseLostError
from mlflow_batchai.node import protocol
from mlflow_batchai.node.layout import node_id
from mlflow_batchai.relay import Relay
from mlflow_batchai.shares import open_share

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

STEP_SECONDS = 0.5
TAG_SECONDS = 5.0
CANCEL_PATIENCE_SECONDS = 30.0
# For agents that have a volume by rclone: they send what ranks have written to it first (``agent.LAST_DRAIN_SECONDS``).
DRAIN_PATIENCE_SECONDS = 120.0
# For agents that look at the board seldom: node 0 tells the others, one after the other hears of it.
BOARD_PATIENCE_SECONDS = 30.0
LEAVE_SECONDS = 10.0
SILENCE_MARGIN_SECONDS = 15.0
LEAVE_TROUBLE_SECONDS = 10.0
WRITER = "follower"


class Silence:
    """For how long a counter has stood still, by our own clock.

    Args:
        longest_look: seconds that one look counts for at most: time in which nobody could look says nothing.
    """

    def __init__(self, longest_look: float) -> None:
        self._longest_look = longest_look
        self._count = 0
        self._looked: float | None = None
        self._silent = 0.0

    def seconds(self, now: float, count: int) -> float:
        """Look: the seconds until now; 0 for a counter that moved, and at the first look."""
        if count != self._count or self._looked is None:
            self._silent = 0.0
        else:
            self._silent += min(now - self._looked, self._longest_look)
        self._count, self._looked = count, now
        return self._silent


class Watch:
    """Sees that a job ends even when its agents can't say so.

    Args:
        job: the job.
        engine: what it runs on.
        heard: how many of node 0's segments were seen before; from there on we count for ourselves.
        clock: seconds.
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        heard: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._engine = engine
        self._clock = clock
        self._heard = heard
        self._silence = Silence(3 * engine.poll_seconds)
        self._handle = job.handle()
        self._next_poll = 0.0
        self._complaint = ""
        self._cancel_since: float | None = None

    def check_or_complain(self) -> None:
        """``check``, but an engine that can't be asked holds up nothing else; each complaint is printed once."""
        try:
            self.check()
            self._complaint = ""
        except ClusterError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                print(f"{time.strftime('%H:%M:%S')} {error}", file=sys.stderr, flush=True)

    def check(self) -> None:
        """Give the verdict if agents are gone for certain, or if they don't heed a cancel request."""
        now = self._clock()
        if now < self._next_poll:
            return
        self._next_poll = now + self._engine.poll_seconds
        self._handle = self._handle or self._job.handle()
        poll = self._poll()
        snapshot = self._job.snapshot(poll.gone)
        if snapshot.verdict is not None:
            return
        lost = [node for node in poll.gone if node not in snapshot.exits]
        if poll.state is PollState.GONE and (lost or 0 in poll.gone):
            node = (lost or [0])[0]
            self._give_up(snapshot, node, poll.of(node))
            return
        silent = self._silence.seconds(now, self._count())
        if 0 in poll.unknown and silent > self._job.plan["lossSeconds"] + SILENCE_MARGIN_SECONDS:
            # Its peers have given it up before; nobody but us is left who could say so, or finish what it has begun to say.
            why = f"it has not been heard of for {silent:.0f} s, and {poll.of(0)}"
            self._give_up(snapshot, 0, why, alone=True)
            return
        if snapshot.requests:
            self._cancel_since = now if self._cancel_since is None else self._cancel_since
            if now - self._cancel_since > self._cancel_patience():
                # Without a handle its submitter died before it had started every agent: those that came have been told.
                if self._handle:
                    self._engine.cancel(self._handle)
                self._terminate(bool(snapshot.announces))

    def _cancel_patience(self) -> float:
        """How long agents may take to end the job by themselves."""
        drains = any(volume.get("how") == "rclone" for volume in self._job.plan["volumes"])
        slow = self._job.board is not None
        return CANCEL_PATIENCE_SECONDS + drains * DRAIN_PATIENCE_SECONDS + slow * BOARD_PATIENCE_SECONDS

    def _poll(self) -> Poll:
        if self._handle:
            return self._engine.poll(self._handle)
        nodes = tuple(range(self._job.node_count))
        return Poll(PollState.UNKNOWN, "its submitter died before it had started every agent", (), nodes)

    def _count(self) -> int:
        """How many segments node 0 has begun; nobody else counts them once the run was deleted. Or what its notices come to."""
        if (board := self._job.board) is not None:
            board.look()
            writer = protocol.agent_writer(0)
            return board.count(f"segments-{writer}") + board.count(f"beats-{writer}")
        with contextlib.suppress(ShareNotFoundError):
            while True:
                self._job.share.read(self._job.paths.segment(protocol.agent_writer(0), self._heard), 0, 0)
                self._heard += 1
        return self._heard

    def _give_up(self, snapshot: Snapshot, node: int, why: str, alone: bool = False) -> None:
        """Give the verdict that a lost node means.

        Args:
            alone: whether nobody is left who could still write a verdict that was claimed.
        """
        if snapshot.requests:
            self._terminate(bool(snapshot.announces), alone)
            return
        code = protocol.NODE_LOST if node in snapshot.announces else protocol.NODE_SETUP_FAILED
        self._claim(failed_verdict(code, f"{node_id(node)} was lost: {why}", WRITER), alone)

    def _terminate(self, running: bool, alone: bool = False) -> None:
        code = protocol.JOB_TERMINATE if running else protocol.JOB_TERMINATED
        self._claim(failed_verdict(code, "terminated", WRITER, terminated=True), alone)

    def _claim(self, verdict: protocol.Record, alone: bool) -> None:
        if not self._job.claim_verdict(verdict) and (alone or self._all_gone()):
            # Its claimer died between the claim and the file; nobody is left who could still write it.
            self._job.finish_claim(verdict)

    def _all_gone(self, as_far_as_known: bool = False) -> bool:
        if self._handle is None:
            return False
        poll = self._engine.poll(self._handle)
        return len(poll.gone) + as_far_as_known * len(poll.unknown) == self._job.node_count

    def clean_up(self) -> None:
        """After the verdict: agents get a moment to leave by themselves, then nothing of the job stays on its nodes."""
        if self._handle is None:
            return
        until = self._clock() + LEAVE_SECONDS
        while self._clock() < until and not self._all_gone(as_far_as_known=True):
            time.sleep(self._engine.poll_seconds / 20)
        self._engine.cancel(self._handle)


def follow(job: Job, tracking: runs.Tracking) -> JobState | None:
    """Relay a job until its run is finished.

    Returns:
        The state it ended in, or None if another process has taken over.
    """
    lease = Lease(job)
    trouble = 1.0
    while True:
        try:
            if not lease.acquire():
                return None
            break
        except ShareError as error:  # full, or not there for now: as with a store that is down, nobody else will come
            _complain(error, trouble)
            time.sleep(trouble)
            trouble = min(trouble * 2, 60.0)
    with lease.beating():
        try:
            return _follow(job, runs.client(tracking), lease)
        except LeaseLostError:
            return None


def _follow(job: Job, mlflow: MlflowClient, lease: Lease) -> JobState:
    relay = Relay(job, mlflow, lease)
    relaying = True
    watch = Watch(job, _engine(job), relay.heard(0))
    next_tag = time.monotonic() + TAG_SECONDS
    asked = False
    trouble = 0.0
    while True:
        try:
            begun = time.monotonic()
            watch.check_or_complain()
            state = job.state(relay.ending)
            if state.ended:
                break
            if relaying:
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
            _complain(error, trouble)
            if isinstance(error, ShareError) and trouble > LEAVE_TROUBLE_SECONDS and relay.run_ended():
                # Our way to the share is gone (its SAS has expired, say), and someone who has one has done the rest.
                raise LeaseLostError("another process has ended the run") from error
            relaying = not relay.run_gone()
            pause = trouble
        time.sleep(pause)
    _finish(watch, relay, state, lease)
    return state


def _engine(job: Job) -> Engine:
    """What the job runs on; a machine that doesn't know its cluster can relay it all the same."""
    try:
        return clusters.load(job.plan["cluster"])[0].engine
    except BatchAIError as error:
        print(f"{error}; the job is relayed, and its nodes can't be asked", file=sys.stderr, flush=True)
        return AbsentEngine(str(error))


def _finish(watch: Watch, relay: Relay, state: JobState, lease: Lease) -> None:
    """End the run; a tracking server that is down is waited for, since nobody else will do it."""
    try:
        watch.clean_up()
    except ClusterError as error:
        relay.notes.append(str(error))
    trouble = 1.0
    while True:
        try:
            relay.finish(state)
            return
        except LeaseLostError:
            raise
        except Exception as error:
            _complain(error, trouble)
        if relay.run_gone():
            lease.save({}, finished=True)
            return
        time.sleep(trouble)
        trouble = min(trouble * 2, 60.0)


def _complain(error: Exception, wait: float) -> None:
    text = str(error) if isinstance(error, BatchAIError) else "".join(traceback.format_exception(error)).rstrip()
    print(f"{time.strftime('%H:%M:%S')} {text}\ntrying again in {wait:.0f} s", file=sys.stderr, flush=True)


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
