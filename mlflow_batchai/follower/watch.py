"""Give the verdict of an attempt whose agents can no longer give it."""

from __future__ import annotations

import time
from collections.abc import Callable

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.attempt import overrides
from mlflow_batchai.agent.layout import node_id
from mlflow_batchai.engines import registry
from mlflow_batchai.engines.base import Engine, Handle, Poll, PollState
from mlflow_batchai.errors import ClusterError, ShareError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.states import Snapshot, failed_verdict, verdict_of_exits

# Beside what their ranks have between SIGTERM and SIGKILL.
CANCEL_PATIENCE_SECONDS = 30.0
# For agents that have a volume by rclone: they send what ranks have written to it first (``ending.LAST_DRAIN_SECONDS``).
DRAIN_PATIENCE_SECONDS = 120.0
# For agents that look at the index seldom: node 0 tells the others, one after the other hears of it.
INDEX_PATIENCE_SECONDS = 30.0
LEAVE_SECONDS = 10.0
# Between two polls of a job that leaves its nodes: each costs a scheduler's other users something, too.
SCHEDULER_SECONDS = 2.0
SILENCE_MARGIN_SECONDS = 15.0
# Longest pause between two polls of a job that waits for its nodes, perhaps for days.
WAITING_SECONDS = 60.0
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
    """Detect that a job's agents can't give its verdict any more, and give it.

    Args:
        job: the job.
        engine: what it runs on.
        heard: how many of node 0's segments were seen before; from there on we count for ourselves.
        clock: seconds.
        say: takes a sentence for the log.
        poll: asks the engine for this job, perhaps with others (``polls``).
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        heard: int = 0,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], object] = print,
        poll: Callable[[Handle], Poll] | None = None,
    ) -> None:
        self._job = job
        self._engine = engine
        self._ask = poll or engine.poll
        self._clock = clock
        self._say = say
        self._heard = heard
        self._silence = Silence(3 * engine.poll_seconds)
        self._handle: Handle | None = None
        # What a scheduler has answered last; None: there is none.
        self._told: Poll | None = None
        self._pace = engine.poll_seconds
        self._next_poll = 0.0
        self._complaint = ""
        self._asked_since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds until the next check, which is the same moment for all jobs of a process that wait."""
        return max(0.0, self._next_poll - self._clock())

    def check_or_complain(self) -> None:
        """``check``, but an engine that can't be asked holds up nothing else; each complaint is said once."""
        try:
            self.check()
            self._complaint = ""
        except ClusterError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                self._say(self._complaint)

    def check(self) -> None:
        """Give the verdict if agents are gone for certain, or if they don't heed a request."""
        now = self._clock()
        # Only one that waits no longer is looked at before its time.
        if now < self._next_poll and self._pace <= self._engine.poll_seconds:
            return
        pace = self._pace
        self._schedule(now, self._engine.poll_seconds)
        if self._handle is None and (handle := self._job.handle()):
            self._handle = handle
            self._told = Poll(PollState.QUEUED, started=False) if _has_scheduler(handle) else None
        poll = self._poll()
        if self._told and poll.state is not PollState.UNKNOWN:
            self._told = poll
        snapshot = self._job.snapshot(poll.gone)
        if snapshot.verdict is not None:
            return
        if poll.state is PollState.QUEUED and not (poll.frozen or snapshot.announces or snapshot.requests):
            self._schedule(now, min(2 * pace, WAITING_SECONDS))
        if poll.failures:
            failure = poll.failures[min(poll.failures)]
            terminated = failure["code"] == protocol.JOB_TERMINATED
            # One that has got its nodes, and none of whose agents has come, was perhaps ended for a node that is broken.
            if not terminated or not poll.started or snapshot.announces:
                self._give(snapshot, failed_verdict(failure["code"], failure["message"], WRITER, terminated))
                return
        lost = [node for node in poll.gone if node not in snapshot.exits]
        if poll.state is PollState.GONE and (lost or 0 in poll.gone):
            node = (lost or [0])[0]
            self._give_up(snapshot, node, poll.of(node))
            return
        told = self._told
        # Agents that a scheduler has not started yet, or has stopped (SUSPENDED), have to be silent.
        rests = told is not None and bool(told.frozen or not (told.started or snapshot.announces))
        silent = 0.0 if rests else self._silence.seconds(now, self._count())
        if 0 in (*poll.unknown, *poll.frozen) and silent > self._job.plan.loss_seconds + SILENCE_MARGIN_SECONDS:
            # Its peers have given it up before; nobody but us is left who could say so, or finish what it has begun to say.
            reason = "its agent was stopped (SIGSTOP)" if 0 in poll.frozen else poll.of(0)
            why = f"it has not been heard of for {silent:.0f} s, and {reason}"
            self._give_up(snapshot, 0, why, alone=True)
            return
        if snapshot.requests:
            self._asked_since = now if self._asked_since is None else self._asked_since
            # Agents that sleep in a queue look for requests seldom.
            if (poll.state is PollState.QUEUED and not snapshot.is_taken) or now - self._asked_since > self._patience():
                # Without a handle its submitter died before it had started every agent: those that came have been told.
                try:
                    if self._handle:
                        self._engine.cancel(self._handle)
                finally:
                    # A node that can't be asked keeps nobody waiting: of the verdict it hears when it sees the share again.
                    self._heed(snapshot)

    def _schedule(self, now: float, pace: float) -> None:
        self._pace = pace
        self._next_poll = (now // pace + 1) * pace

    def _patience(self) -> float:
        """Seconds that agents have to end the job by themselves."""
        drains = any(volume.by_rclone for volume in self._job.plan.volumes)
        slow = self._job.index is not None
        waits = drains * DRAIN_PATIENCE_SECONDS + slow * INDEX_PATIENCE_SECONDS
        return CANCEL_PATIENCE_SECONDS + self._grace + waits

    @property
    def _grace(self) -> float:
        return self._job.plan.terminate_seconds

    def _poll(self) -> Poll:
        if self._handle:
            return self._ask(self._handle)
        nodes = tuple(range(self._job.node_count))
        why = f"its submitter died before it had started every agent; run it again: batchai job retry {self._job.name}"
        return Poll(PollState.UNKNOWN, why, (), nodes)

    def _count(self) -> int:
        """Number of node 0's segments, or of its markers; nobody else counts them once the run was deleted."""
        if (index := self._job.index) is not None:
            index.look()
            writer = protocol.agent_writer(0)
            return index.count(f"segments-{writer}") + index.count(f"beats-{writer}")
        while any(self._job.share.read_many([self._job.paths.segment(protocol.agent_writer(0), self._heard)], 0)):
            self._heard += 1
        folder, _, name = self._job.paths.heartbeats(protocol.agent_writer(0)).rpartition("/")
        return self._heard + sum(entry.size for entry in self._job.share.list(folder) if entry.name == name)

    def _give_up(self, snapshot: Snapshot, node: int, why: str, alone: bool = False) -> None:
        """Give the verdict that a lost node means.

        Args:
            alone: whether nobody is left who could still write a verdict that was claimed.
        """
        code = protocol.NODE_LOST if node in snapshot.announces else protocol.NODE_SETUP_FAILED
        lost = failed_verdict(code, f"{node_id(node)} was lost: {why}", WRITER)
        # Where all nodes have said how they ended, only the verdict's own file is missing or damaged.
        self._give(snapshot, verdict_of_exits(snapshot, WRITER) or lost, alone)

    def _give(self, snapshot: Snapshot, verdict: protocol.Record, alone: bool = False) -> None:
        """Give a verdict, or the one that was asked for."""
        if snapshot.requests:
            self._heed(snapshot, alone)
            return
        self._claim(self._with_retry(verdict), alone)

    def _with_retry(self, verdict: protocol.Record) -> protocol.Record:
        attempt, plan = self._job.attempt, self._job.plan
        requeued = self._handle is None and self._job.overrides().get("by") == overrides.REQUEUE
        if requeued and attempt < overrides.MOST_ATTEMPTS:
            # The job itself has not failed: who put it back in the queue has died.
            return overrides.again(verdict, attempt, plan.retries_left)
        return overrides.goes_on(verdict, plan, attempt)

    def _heed(self, snapshot: Snapshot, alone: bool = False) -> None:
        """Give the verdict that was asked for."""
        request = protocol.wish(snapshot.requests, self._job.attempt) or {}
        if request.get("kind") == protocol.REQUEUE:
            self._claim(protocol.requeued_record(request["why"], WRITER, self._job.attempt), alone)
            return
        self._claim(protocol.terminated_record(WRITER, snapshot.is_taken, request), alone)

    def _claim(self, verdict: protocol.Record, alone: bool) -> None:
        try:
            claimed = self._job.claim_verdict(verdict)
        except ShareError:
            # It is full, perhaps: there is some room that node 0 has kept for this.
            self._job.share.delete(self._job.paths.reserve)
            claimed = self._job.claim_verdict(verdict)
        if not claimed and (alone or self._all_gone()):
            # Its claimer died between the claim and the file; nobody is left who could still write it.
            self._job.finish_claim(verdict)

    def _all_gone(self, as_far_as_known: bool = False) -> bool:
        if self._handle is None:
            return False
        poll = self._engine.poll(self._handle)
        return len(poll.gone) + as_far_as_known * len(poll.unknown) == self._job.node_count

    def clean_up(self) -> None:
        """After the verdict: agents end what they have and leave by themselves, then nothing of the job stays on its nodes."""
        self._handle = self._handle or self._job.handle()
        if self._handle is None:
            return
        until = self._clock() + LEAVE_SECONDS + self._grace
        pause = SCHEDULER_SECONDS if _has_scheduler(self._handle) else self._engine.poll_seconds / 20
        while self._clock() < until and not self._all_gone(as_far_as_known=True):
            time.sleep(pause)
        self._engine.cancel(self._handle)


def _has_scheduler(handle: Handle) -> bool:
    """Whether a scheduler, which may take days, starts the agents."""
    kind = registry.ENGINES.get(handle["engine"])
    return kind is not None and kind.has_scheduler
