"""The state of an attempt's other agents as one agent knows it: present, ready, failed, stopped or silent."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any, Callable

from mlflow_batchai.agent import protocol, records
from mlflow_batchai.agent.layout import NodeLayout, node_id
from mlflow_batchai.agent.network import Interface
from mlflow_batchai.agent.outcome import Failure, Stop
from mlflow_batchai.agent.reservation.agents import ARRIVAL_SECONDS, MARGIN_SECONDS
from mlflow_batchai.agent.transport.shipper import Shipper

# An agent comes within this many seconds of its reservation, so of ours, or never; it speaks from its first moment.
COMING_SECONDS = ARRIVAL_SECONDS + MARGIN_SECONDS
# Who is not let in on the share for so long (its SAS has expired, the account has new keys) never will be; until then it may be
# a network rule that someone is just correcting. Less than ``sharefiles.AWAY_SECONDS``, which count from when the share was
# used last: why we are not let in is the better reason.
REFUSED_SECONDS = 870.0
# For how long a file that we wait for may be there and not be closed. Who writes one takes a moment.
DAMAGED_SECONDS = 30.0
_EXIT: records.Shape = dict(records.EXIT, segments=records.is_count)
# A record is read within seconds of its time; what differs by more is a clock that is wrong.
SKEW_MS = 15000
# For a peer that has ended its ranks to say so.
LAST_WORDS_SECONDS = 10.0
# Between two processes of a job that are told to end at the same moment.
SAME_MOMENT_SECONDS = 0.2
# From SIGTERM to our exit. What sends it (Slurm, systemd) often sends SIGKILL after 30 s.
TERMINATION_SECONDS = 25.0
# Who may take until when: seconds that have to be left of these when a step of the end is over, in the order of the steps.
PROCESSES_REST = 13.0  # ranks have saved (for 10 s) or were killed, and their reports have been read
DRAIN_REST = 10.0  # mounts have sent what they held
PEERS_REST = 8.0  # records of nodes other than 0 have left; then these say how they ended
EXITS_REST = 5.0  # node 0 waits no longer for them to say so
RECORDS_REST = 3.0  # node 0's records have left; then it copies logs where the plan wants them
LOGS_REST = 1.5  # mounts have sent these; then it gives the verdict


class Peers:
    """The attempt's other agents and the people who watch it: node 0 hears all other nodes, they hear node 0.

    Attributes:
        announces: node -> announce.json, as far as they are there; our own is put in by who wrote it.
        network: the interface of every node, by index, once they have been chosen (``meeting``).
        reached: node -> its finding of each of node 0's interfaces (node 0 only, ``meeting``).
        exits: node -> exit.json of those that have ended (node 0 only).
        done: whether node 0's own ranks have ended well.
        leaderless: whether node 0's agent never came, so that someone else has to give the verdict.
        termination: the failure that this agent's end by SIGTERM is, once it was told to end.
    """

    def __init__(self, layout: NodeLayout, shipper: Shipper, clock: Callable[[], float] = time.monotonic) -> None:
        self.layout = layout
        self.shipper = shipper
        self.inbox = shipper.inbox
        self._clock = clock
        self.announces: dict[int, dict[str, Any]] = {}
        self.network: list[Interface] = []
        self.reached: dict[int, list[dict[str, Any]]] = {}
        self.exits: dict[int, dict[str, Any]] = {}
        self.done = False
        self.leaderless = False
        self.termination: Failure | None = None
        self._end_until = math.inf
        self._node_count = layout.plan.node_count
        self._ready: dict[int, bool] = {}
        self._failures: list[Failure] = []
        self._given_up: set[int] = set()
        self._skews: dict[int, int] = {}
        # Peers that end their part though we don't end ours, with their words.
        self._left: dict[int, str] = {}

    def all_announced(self) -> bool:
        """Whether every node is taken; looks for those that were not."""
        for node in range(self._node_count):
            if node not in self.announces:
                found = self.awaited(f"announce-{node}", self.layout.paths.announce(node))
                if found and records.has(found, records.ANNOUNCE):
                    self.announces[node] = found
                    self.inbox.saw(node)
        return len(self.announces) == self._node_count

    def awaited(self, marker: str, path: str) -> dict[str, Any] | None:
        """A file that another agent writes; None while it isn't there.

        Raises:
            Failure: it is, and has been damaged: nobody will write it again.
        """
        found = self.layout.attempt.read(marker, path)
        if found is None and (self.layout.control.torn.seconds(path) or 0.0) > DAMAGED_SECONDS:
            sentence = "%s: %s is damaged: the share has lost a part of it; submit the job again"
            said = sentence % (self.layout.node_id, self.layout.control.where(path))
            raise Failure(protocol.NODE_SETUP_FAILED, said, node=self.layout.node)
        return found

    def addresses(self) -> list[str]:
        return [interface["address"] for interface in self.network]

    def all_ready(self) -> bool:
        return len(self._ready) == self._node_count - 1

    def on_sigterm(self) -> None:
        """Have this agent end its part (the handler of SIGTERM)."""
        if self.termination is None:
            sentence = f"{self.layout.node_id}: the agent was told to end (SIGTERM)"
            self.termination = Failure(protocol.NODE_LOST, sentence, node=self.layout.node)
            self._end_until = self._clock() + TERMINATION_SECONDS

    def within(self, seconds: float, rest: float) -> float:
        """Seconds that a step of the end may take: after a SIGTERM fewer, so that ``rest`` seconds are left for later ones."""
        return max(0.0, min(seconds, self._end_until - rest - self._clock()))

    def await_termination(self) -> None:
        """After a process of the job has ended by a SIGTERM that wasn't ours: wait a moment for this agent's own SIGTERM.

        What ends a whole job (Slurm, systemd) sends it to one process after the other.
        """
        until = self._clock() + SAME_MOMENT_SECONDS
        while self.termination is None and self._clock() < until:
            time.sleep(0.02)

    def processes_rest(self) -> float:
        return self.within(math.inf, PROCESSES_REST)

    def check(self, starting: bool = False) -> None:
        """Raise if what others say ends the attempt here.

        Args:
            starting: whether some node isn't taken yet, so the job is queued.

        Raises:
            Stop: it has its verdict, its end was asked for, or a peer failed, stopped, fell silent, or (node 0) never came.
            Failure: this agent was told to end (SIGTERM), node 0 never came, or the share can't be used any more.
            Exception: what ended the share thread: we can't hear anyone any more.
        """
        if self.shipper.broken is not None:
            raise self.shipper.broken
        refused = self.layout.control.refused(REFUSED_SECONDS)
        if refused:
            raise Failure(protocol.NODE_LOST, f"{self.layout.node_id}: {refused}", node=self.layout.node)
        reason = self.shipper.trouble
        if reason:
            raise Failure(protocol.SHARE_FAILED, f"{self.layout.node_id}: {reason}", node=self.layout.node)
        if self.inbox.verdict is not None:
            raise Stop("verdict", "the attempt has its verdict already")
        wish = self.wish(starting)
        if wish:
            raise wish
        if self.termination is not None:
            raise self.termination
        self._listen()
        for node, why in self._left.items():
            raise Stop("peer", f"{node_id(node)} ended its part: {why}")

    def wish(self, starting: bool) -> Stop | None:
        """The request that ends the attempt, if any: for good (cancel) or for now (requeue).

        Args:
            starting: until every node is taken the job is queued, even if ours is taken already.
        """
        request = protocol.wish(self.inbox.requests(), self.layout.paths.attempt)
        if request is None:
            return None
        kind = protocol.CANCEL if request["kind"] == protocol.CANCEL else protocol.REQUEUE
        return Stop(kind, request.get("why", ""), queued=starting, by=request.get("who"))

    def _listen(self) -> None:
        """Take in what peers have sent; raise if one failed, stopped, fell silent, or never came."""
        for node, record in self.inbox.received():
            # The least of them has been on its way for the shortest time.
            if records.is_number(record.get("t")):
                skew = int(protocol.now_ms() - record["t"])
                self._skews[node] = min(skew, self._skews.get(node, skew))
            if record["k"] == "ready":
                self._ready[node] = True
            elif record["k"] == "reached":
                self.reached[node] = record["findings"]
            elif record["k"] == "done":
                self.done = True
            elif record["k"] == "failed" and self.layout.node == 0:
                self._failures.append(Failure.from_record(record))
            elif record["k"] == "stop" and self.layout.node != 0:
                raise Stop("node0", str(record.get("why") or ""))
            elif record["k"] == "stop":
                self._left[node] = str(record.get("why") or "")
        if self._failures:
            raise Stop("peer", str(self._failures[0]))
        for node in range(1, self._node_count) if self.layout.node == 0 else [0]:
            silent = self.inbox.silent_seconds(node)
            came = self.inbox.has_spoken(node) or node in self.announces
            if silent <= self.layout.plan.loss_seconds + (0.0 if came else COMING_SECONDS):
                continue
            if self.layout.node == 0 and (self._exit_of(node) or self._exit_without_marker(node)):
                if self.exits[node]["failure"]:  # and its words on that were lost
                    raise Stop("peer", str(Failure.from_record(self.exits[node]["failure"])))
                if self.exits[node].get("stopped"):
                    self._left[node] = str(self.exits[node]["stopped"])
                continue  # it is done
            self._give_up(node, came, silent)

    def _give_up(self, node: int, came: bool, silent: float) -> None:
        if came:
            sentence = f"{node_id(node)} has not been heard of for {silent:.0f} s"
            failure = Failure(protocol.NODE_LOST, sentence, node=node)
        else:
            sentence = "the agent of %s never came (its submitter may have died while it was starting them): submit again"
            failure = Failure(protocol.NODE_SETUP_FAILED, sentence % node_id(node), node=node)
        if self.layout.node != 0:
            if came:
                raise Stop("node0", str(failure))
            self.leaderless = True
            raise failure
        self._given_up.add(node)
        self._failures.append(failure)
        raise Stop("peer", str(failure))

    def failures(self) -> list[Failure]:
        with contextlib.suppress(Stop):
            self._listen()
        told = [record["failure"] for record in self.exits.values() if record.get("failure")]
        found = self._failures + [Failure.from_record(failure) for failure in told]
        return [self._by_our_clock(failure) for failure in found]

    def _by_our_clock(self, failure: Failure) -> Failure:
        """The same at the time that our clock gives it, should its node's clock be wrong."""
        skew = self._skews.get(failure.node, 0)
        if abs(skew) < SKEW_MS:
            return failure
        return Failure.from_record(dict(failure.as_record(), time=failure.time + skew))

    def early_leavers(self) -> list[Failure]:
        """Peers that ended their ranks although nothing had failed and node 0 had not stopped: they had lost sight of it."""
        return [
            Failure(protocol.NODE_LOST, f"{node_id(node)} ended its part: {record['stopped']}", node=node)
            for node, record in sorted(self.exits.items())
            if record.get("stopped")
        ]

    def await_exits(self, pump: Callable[[], object]) -> None:
        """After a stop: give the peers time to hear of it, to end what they have, and to say how it ended."""
        plan = self.layout.plan
        until = self._clock() + plan.loss_seconds + plan.terminate_seconds + LAST_WORDS_SECONDS
        while not self.all_ended() and self.inbox.verdict is None and self.within(until - self._clock(), EXITS_REST) > 0:
            if self.shipper.trouble:
                return  # we don't hear each other any more
            self.failures()
            pump()

    def all_ended(self) -> bool:
        """Whether each peer that still lives has written its exit, and all that it sent before was read."""
        for node in range(1, self._node_count):
            if node in self._given_up:
                continue
            record = self._exit_of(node)
            if record is None:
                return False
            self.inbox.expect(node, record["segments"])
            if self.inbox.heard(node) < record["segments"]:
                return False
        return True

    def _exit_without_marker(self, node: int) -> bool:
        """Whether a peer that fell silent had written its exit.json, and was killed before it could say so in the index."""
        with contextlib.suppress(OSError):
            record = self.layout.control.read_closed(self.layout.paths.exit(node))
            if record and records.has(record, _EXIT):
                self.exits[node] = record
        return node in self.exits

    def _exit_of(self, node: int) -> dict[str, Any] | None:
        """A peer's exit.json once it is there; a share that can't be read just now has none."""
        if node not in self.exits:
            with contextlib.suppress(OSError):
                record = self.layout.attempt.read(f"exit-{node}", self.layout.paths.exit(node))
                if record and records.has(record, _EXIT):
                    self.exits[node] = record
        return self.exits.get(node)
