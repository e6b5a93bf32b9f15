"""How the agents of a job find the addresses at which all nodes reach each other, before anything is prepared.

Every agent announces its interfaces and where it listens, tries all addresses of all others, and tells node 0 what it found;
node 0 chooses and publishes. Agents that share one network stack need none of it: they meet on loopback.
"""

import socket
import time
from typing import Any, Callable, Dict, Hashable, List, Optional, Tuple

from mlflow_batchai.node import descriptors, forward, network, protocol, reach
from mlflow_batchai.node.layout import NodeLayout, node_id
from mlflow_batchai.node.network import Interface
from mlflow_batchai.node.outcome import Failure
from mlflow_batchai.node.peers import Peers
from mlflow_batchai.node.shipper import Shipper

# A choice that works is kept this long for a better one, of which some node doesn't know yet.
BETTER_SECONDS = 1.0


class Meeting:
    """One node's part in it: ``open``, announce what that returned, and when all have announced, ``settle``."""

    def __init__(self, layout: NodeLayout, shipper: Shipper, peers: Peers) -> None:
        self.layout = layout
        self.shipper = shipper
        self.peers = peers
        self._only: Optional[str] = layout.plan.network_interface
        self._count = layout.plan.node_count
        self._listener: Optional[reach.Listener] = None

    def open(self) -> Dict[str, Any]:
        """Listen for peers; what they need to know, for this node's announcement.

        Raises:
            Failure: the interface that the cluster document names can't be used here.
        """
        host = socket.gethostname()
        try:
            own = network.interfaces(self._only) if self._only or self._count > 1 else []
        except network.InterfaceError as error:
            raise Failure(
                protocol.NETWORK_FAILED,
                "%s (%s) %s: correct networkInterface in the cluster document" % (self.layout.node_id, host, error),
                node=self.layout.node,
            ) from None
        if self._count > 1:
            self._listener = reach.Listener(self._token(self.layout.node))
        return {
            "host": host,
            "address": (own or [network.LOOPBACK])[0]["address"],
            "machine": network.machine(),
            "interfaces": own,
            "port": self._listener.port if self._listener else 0,
            "ports": network.port_range(),
        }

    def settle(self, wait: Callable[[], None]) -> None:
        """Give ``peers`` the interface of every node.

        Args:
            wait: passes a moment; raises what is to end the job.

        Raises:
            Failure: (node 0) two nodes can't reach each other.
        """
        announces = [self.peers.announces[node] for node in range(self._count)]
        try:
            if len({announce["machine"] for announce in announces}) == 1:
                self.peers.network = [announce["interfaces"][0] if self._only else network.LOOPBACK for announce in announces]
            else:
                self.peers.network = self._try_all(announces, wait)
        finally:
            if self._listener:
                self._listener.close()
        own = self.peers.network[self.layout.node]
        self.shipper.note("network interface: %s (%s)" % (own["name"], own["address"]))

    def rendezvous(self, published: Dict[str, Any]) -> Dict[str, Any]:
        """Where this node's ranks find what node 0 has published: Horovod's client knows no IPv6, so we pass it on."""
        if not published["port"] or ":" not in published["address"]:
            return published
        return {"address": "127.0.0.1", "port": forward.start(published["address"], published["port"])}

    def _try_all(self, announces: List[Dict[str, Any]], wait: Callable[[], None]) -> List[Interface]:
        targets: Dict[Hashable, Tuple[str, int, str]] = {
            (node, index): (interface["address"], announce["port"], self._token(node))
            for node, announce in enumerate(announces)
            if node != self.layout.node
            for index, interface in enumerate(announce["interfaces"])
        }
        # Ranks get the limit that the node's administrator has set.
        with descriptors.more(len(targets)):
            return self._agree(reach.Probe(targets), announces, wait)

    def _agree(self, probe: reach.Probe, announces: List[Dict[str, Any]], wait: Callable[[], None]) -> List[Interface]:
        attempt, path = self.layout.attempt, self.layout.paths.network
        told: Optional[bool] = None
        chooser = _Chooser(announces)
        try:
            while True:
                known = probe.step()
                findings = self._findings(probe, announces)
                # What suffices is told as soon as it is known: an address that never answers must not hold up a job.
                enough = known or all("" in found for found in findings.values())
                if self.layout.node == 0:
                    chosen = chooser.choose({**self.peers.reached, 0: findings}, time.monotonic())
                    if chosen is not None:
                        attempt.write("network", path, [{"interfaces": chosen}])
                        return chosen
                else:
                    if enough and told is not known:
                        told = known
                        sent = {str(node): found for node, found in findings.items()}
                        self.shipper.keep_saying("reached", node=self.layout.node, findings=sent)
                    published = self.peers.awaited("network", path)
                    if published is not None:
                        return list(published["interfaces"])
                wait()
        finally:
            probe.close()

    def _findings(self, probe: reach.Probe, announces: List[Dict[str, Any]]) -> Dict[int, List[Optional[str]]]:
        return {
            node: [probe.results[node, index] for index in range(len(announce["interfaces"]))]
            for node, announce in enumerate(announces)
            if node != self.layout.node
        }

    def _token(self, node: int) -> str:
        """What a listener says: of two jobs, or of two nodes with the same address (Docker's bridge), each says another."""
        return "%s %s" % (self.layout.mark, node_id(node))


class _Chooser:
    """Node 0's choice, from what all nodes have found so far."""

    def __init__(self, announces: List[Dict[str, Any]]) -> None:
        self._names = ["%s (%s)" % (node_id(node), announce["host"]) for node, announce in enumerate(announces)]
        self._candidates = [announce["interfaces"] for announce in announces]
        self._ports = [announce["ports"] for announce in announces]
        self._since: Optional[float] = None

    def choose(self, findings: reach.Findings, now: float) -> Optional[List[Interface]]:
        """Each node's interface, or None while more is to be heard.

        Raises:
            Failure: whatever may still be heard, there is no choice.
        """
        sure = reach.choose(self._candidates, findings)
        best = reach.choose(self._candidates, findings, hoping=True)
        if best is None:
            why = reach.explain(self._names, self._candidates, findings, self._ports)
            raise Failure(protocol.NETWORK_FAILED, why, node=0)
        if sure is None:
            return None
        self._since = now if self._since is None else self._since
        return sure if sure == best or now - self._since > BETTER_SECONDS else None
