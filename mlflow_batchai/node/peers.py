"""What others say of an attempt, as one node hears it: who is there, who is ready, who failed, stopped or fell silent."""

import contextlib
import time
from typing import Any, Callable, Dict, List, Optional

from mlflow_batchai.node import protocol
from mlflow_batchai.node.layout import NodeLayout, node_id
from mlflow_batchai.node.network import Interface
from mlflow_batchai.node.outcome import Failure, Stop
from mlflow_batchai.node.shipper import Shipper


class Peers:
    """The attempt's other agents, and the people who watch it: node 0 hears all other nodes, they hear node 0.

    Attributes:
        announces: node -> announce.json, as far as they are there; our own is put in by who wrote it.
        network: the interface of every node, by index, once they have been chosen (``meeting``).
        reached: node -> what it found out of the others' interfaces (node 0 only).
        exits: node -> exit.json of those that have ended (node 0 only).
        done: whether node 0's own ranks have ended well.
    """

    def __init__(self, layout: NodeLayout, shipper: Shipper) -> None:
        self.layout = layout
        self.shipper = shipper
        self.announces: Dict[int, Dict[str, Any]] = {}
        self.network: List[Interface] = []
        self.reached: Dict[int, Dict[int, List[Optional[str]]]] = {}
        self.exits: Dict[int, Dict[str, Any]] = {}
        self.done = False
        self._node_count: int = layout.plan["nodeCount"]
        self._ready: Dict[int, bool] = {}
        self._failures: List[Failure] = []

    def all_announced(self) -> bool:
        """Whether every node is taken; looks for those that were not."""
        for node in range(self._node_count):
            if node not in self.announces:
                found = protocol.read_closed(self.layout.on_share(self.layout.paths.announce(node)))
                if found:
                    self.announces[node] = found
                    self.shipper.saw(node)
        return len(self.announces) == self._node_count

    def addresses(self) -> List[str]:
        """Where the nodes reach each other, by index."""
        return [interface["address"] for interface in self.network]

    def all_ready(self) -> bool:
        """Node 0: whether every other node is set up."""
        return len(self._ready) == self._node_count - 1

    def check(self, starting: bool = False) -> None:
        """Raise if what others say ends the attempt here.

        Args:
            starting: whether some node isn't taken yet, so the job is queued.

        Raises:
            Stop: it has its verdict, a cancel was asked for, or a peer failed, stopped, or fell silent.
            Exception: what ended the share thread: we can't hear anyone any more.
        """
        if self.shipper.broken is not None:
            raise self.shipper.broken
        if self.shipper.verdict is not None:
            raise Stop("verdict", "the attempt has its verdict already")
        for request in self.shipper.requests():
            # Until every node is taken the job is queued, even if ours is taken already.
            raise Stop("cancel", request.get("why", ""), queued=starting, by=request.get("who"))
        self._listen(starting)

    def _listen(self, starting: bool = False) -> None:
        """Take in what peers have sent; raise if one failed, stopped, or fell silent."""
        for node, record in self.shipper.received():
            if record["k"] == "ready":
                self._ready[node] = True
            elif record["k"] == "reached":
                self.reached[node] = {int(other): found for other, found in record["findings"].items()}
            elif record["k"] == "done":
                self.done = True
            elif record["k"] == "failed" and self.layout.node == 0:
                self._failures.append(Failure.from_record(record))
            elif record["k"] == "stop" and self.layout.node != 0:
                raise Stop("node0", record["why"])
        if self._failures:
            raise Stop("peer", str(self._failures[0]))
        for node in range(1, self._node_count) if self.layout.node == 0 else [0]:
            silent = self.shipper.silent_seconds(node)
            # A peer that waits for its node may not have begun to speak yet; one that has written its exit is done.
            if silent <= self.layout.plan["lossSeconds"] or (starting and not self.shipper.heard(node)):
                continue
            if self.layout.node == 0 and self._exit_of(node):
                continue
            sentence = "%s has not been heard of for %d s" % (node_id(node), silent)
            if self.layout.node != 0:
                raise Stop("node0", sentence)
            self._failures.append(Failure(protocol.NODE_LOST, sentence, node=node))
            raise Stop("peer", sentence)

    # Node 0, at the end.

    def failures(self) -> List[Failure]:
        """Failures that peers told of, with those that have come since."""
        with contextlib.suppress(Stop):
            self._listen()
        told = [record["failure"] for record in self.exits.values() if record.get("failure")]
        return self._failures + [Failure.from_record(failure) for failure in told]

    def early_leavers(self) -> List[Failure]:
        """Peers that ended their ranks although nothing had failed and node 0 had not stopped: they had lost sight of it."""
        return [
            Failure(protocol.NODE_LOST, "%s ended its part: %s" % (node_id(node), record["stopped"]), node=node)
            for node, record in sorted(self.exits.items())
            if record.get("stopped")
        ]

    def await_exits(self, seconds: float, pump: Callable[[], object]) -> None:
        """After a stop: give the peers that long to end what they have and to say how it ended.

        Args:
            pump: what is done meanwhile, again and again; it takes a moment.
        """
        until = time.monotonic() + seconds
        while not self.all_ended() and self.shipper.verdict is None and time.monotonic() < until:
            self.failures()
            pump()

    def all_ended(self) -> bool:
        """Whether each peer that still lives has written its exit, and all that it sent before was read."""
        lost = {failure.node for failure in self._failures if failure.code == protocol.NODE_LOST}
        for node in range(1, self._node_count):
            if node in lost:
                continue
            record = self._exit_of(node)
            if record is None or self.shipper.heard(node) < record["segments"]:
                return False
        return True

    def _exit_of(self, node: int) -> Optional[Dict[str, Any]]:
        """A peer's exit.json once it is there; a share that can't be read just now has none."""
        if node not in self.exits:
            with contextlib.suppress(OSError):
                record = protocol.read_closed(self.layout.on_share(self.layout.paths.exit(node)))
                if record:
                    self.exits[node] = record
        return self.exits.get(node)
