"""Choose the network interface over which the ranks of a job connect, before anything is prepared.

A node uses the interface by which it reaches node 0, or the one that the cluster document names. Node 0 announces its
interfaces and listens; every other node connects to each of them and tells node 0 the result; node 0 takes its first interface
that all nodes reach, and publishes the interfaces of all nodes. Agents that share one network stack meet on loopback instead.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from typing import Callable

from mlflow_batchai.agent import network, protocol
from mlflow_batchai.agent.layout import node_id
from mlflow_batchai.agent.network import Interface
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.peers import Peers
from mlflow_batchai.agent.protocol import Record

# How long a node waits for node 0's other addresses once one has answered: one that never answers must not hold
# up a job, and a packet that was lost is sent again after a second.
OTHERS_SECONDS = 4.0
NO_INTERFACE = (
    "has no IPv4 network interface that other nodes could reach, and Horovod needs IPv4: give it an IPv4 address in the nodes'"
    " network, or name an interface that has one (networkInterface in the cluster document)"
)


class InterfaceChoice:
    """One node's part: ``open``, announce what that returned, and when all nodes have announced, ``settle``."""

    def __init__(self, peers: Peers) -> None:
        self.peers, self.layout, self.shipper = peers, peers.layout, peers.shipper
        self._only = self.layout.plan.network_interface
        self._count = self.layout.plan.node_count
        # One job's listener is told from another's, and node 0 from a node with the same address (Docker's bridge).
        self._token = f"{self.layout.mark} {node_id(0)}"
        self._listener: network.Listener | None = None

    def open(self) -> Record:
        """Compute what this node announces of its network; node 0 begins to listen.

        Raises:
            Failure: the interface that the cluster document names can't be used here.
        """
        host = socket.gethostname()
        try:
            own = network.interfaces(self._only) if self._only or self._count > 1 else []
        except network.InterfaceError as error:
            raise Failure(
                protocol.NETWORK_FAILED,
                f"{self.layout.node_id} ({host}) {error}: correct networkInterface in the cluster document",
                node=self.layout.node,
            ) from None
        if self._count > 1 and self.layout.node == 0:
            self._listener = network.Listener(self._token)
        return {
            "host": host,
            "address": (own or [network.LOOPBACK])[0]["address"],
            "machine": network.machine(),
            "interfaces": own,
            "port": self._listener.port if self._listener else 0,
            "ports": network.port_range(),
        }

    def settle(self, wait: Callable[[], None]) -> None:
        """Give ``peers`` the interface of every node. Raises Failure: (node 0) a node can't reach node 0."""
        announces = [self.peers.announces[node] for node in range(self._count)]
        try:
            if len({announce["machine"] for announce in announces}) == 1:
                found = [announce["interfaces"][0] if self._only else network.LOOPBACK for announce in announces]
            elif self.layout.node == 0:
                found = self._choose(announces, wait)
            else:
                found = self._report(announces, wait)
        finally:
            if self._listener:
                self._listener.close()
        self.peers.network = found
        own = found[self.layout.node]
        self.shipper.note(f"network interface: {own['name']} ({own['address']})")

    def _choose(self, announces: list[Record], wait: Callable[[], None]) -> list[Interface]:
        names = [f"{node_id(node)} ({announce['host']})" for node, announce in enumerate(announces)]
        for name, announce in zip(names, announces):
            if not announce["interfaces"]:
                raise Failure(protocol.NETWORK_FAILED, f"{name} {NO_INTERFACE}", node=0)
        while len(self.peers.reached) < self._count - 1:
            wait()
        own, found = announces[0]["interfaces"], self.peers.reached
        for index, interface in enumerate(own):
            others = [found[node][index] for node in range(1, self._count)]
            if not any(other["why"] for other in others):
                chosen = [interface, *({"name": other["name"], "address": other["address"]} for other in others)]
                self.layout.attempt.write("network", self.layout.paths.network, [{"interfaces": chosen}])
                return chosen
        # The node that reaches the fewest of them.
        node = max(found, key=lambda each: sum(bool(finding["why"]) for finding in found[each]))
        tried = ", ".join(
            f"{each['address']} ({each['name']}: {finding['why'] or 'reached'})" for each, finding in zip(own, found[node])
        )
        raise Failure(
            protocol.NETWORK_FAILED,
            f"{names[node]} can't reach {names[0]} at {tried}: open TCP ports {announces[0]['ports']} on {names[0]} to the"
            " other nodes, or name another interface (networkInterface in the cluster document)",
            node=0,
        )

    def _report(self, announces: list[Record], wait: Callable[[], None]) -> list[Interface]:
        findings = self._try(announces[0], announces[self.layout.node]["interfaces"], wait)
        self.shipper.keep_saying("reached", node=self.layout.node, findings=findings)
        while True:
            published = self.peers.awaited("network", self.layout.paths.network)
            if published is not None:
                return list(published["interfaces"])
            wait()

    def _try(self, leader: Record, own: list[Interface], wait: Callable[[], None]) -> list[Record]:
        """For each of node 0's interfaces: ``why`` it isn't reached, else ``name`` and ``address`` of the own interface."""
        targets = [interface["address"] for interface in leader["interfaces"]]
        found: list[Record] = [_finding(network.NO_ANSWER) for _ in targets]
        begun = time.monotonic()

        def connect(index: int, address: str) -> None:
            why, source = network.connect(address, leader["port"], self._token)
            used = own if self._only else [interface for interface in own if interface["address"] == source]
            if not why and not used:
                why = f"from {source}, which is no interface's first address"
            found[index] = _finding(why, **({} if why else used[0]))

        tries = [threading.Thread(target=connect, args=each, name="network probe", daemon=True) for each in enumerate(targets)]
        for thread in tries:
            thread.start()
        until = math.inf
        while any(thread.is_alive() for thread in tries) and time.monotonic() < until:
            wait()
            if until == math.inf and not all(finding["why"] for finding in found):
                until = max(time.monotonic(), begun + OTHERS_SECONDS)
        return list(found)


def _finding(why: str, name: str = "", address: str = "") -> Record:
    return {"why": why, "name": name, "address": address}
