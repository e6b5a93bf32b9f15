"""Allocate GPUs to an attempt on its node, announce them, and check them against the plan.

It is apart from ``gpus`` because clients import that one, and this one needs an attempt. The node's lock keeps the GPUs of a
node from other jobs of its cluster; jobs of other clusters and users on the same machine are a scheduler's business.
"""

from __future__ import annotations

import os
import threading
from typing import Callable

from mlflow_batchai.agent import gpus, protocol
from mlflow_batchai.agent.attempt import ranks
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.peers import Peers
from mlflow_batchai.agent.staging import SetupError


class GpuAllocation:
    """A node's GPUs during an attempt."""

    def __init__(self, peers: Peers, part: gpus.Part, wait: Callable[[bool], None]) -> None:
        self.own = gpus.Gpus([], "")
        self._peers, self._layout, self._shipper = peers, peers.layout, peers.shipper
        self._part = part
        self._wait = wait

    def find(self) -> list[str]:
        wanted, name = self._layout.plan.gpus_per_node, self._layout.node_id
        errors: list[SetupError] = []

        def ask() -> None:
            try:
                self.own = gpus.of_node(os.environ, self._part, wanted, name)
            except SetupError as error:
                errors.append(error)

        # The thread is left behind where a driver hangs, so that the attempt can end.
        asking = threading.Thread(target=ask, name="gpus", daemon=True)
        asking.start()
        asking.join(0.02)
        while asking.is_alive():
            self._wait(True)
        if errors:
            raise errors[0]
        if self.own.trouble:
            self._say(f"{name}: {self.own.trouble}")
        return self.own.ids

    def counts(self) -> list[int]:
        """GPUs of each node, as all have announced them: every agent works out the same ranks from it."""
        return [len(self._peers.announces[node]["gpus"]) for node in range(self._layout.plan.node_count)]

    def check(self) -> None:
        """Raise a Failure if there are more ranks than GPUs; every agent comes to the same, from the announces."""
        plan, counts = self._layout.plan, self.counts()
        hosts = [self._peers.announces[node]["host"] for node in range(plan.node_count)]
        refusal = ranks.refusal(plan, counts, hosts)
        if refusal:
            raise Failure(protocol.NODE_SETUP_FAILED, refusal, node=self._layout.node)
        if self._layout.node == 0:
            for sentence in filter(None, [ranks.without_gpus(plan, counts, hosts), ranks.idle_gpus(plan, counts)]):
                self._say(sentence)

    def _say(self, sentence: str) -> None:
        self._shipper.note(sentence)
        self._shipper.log(None, "err", f"{sentence}\n".encode())
