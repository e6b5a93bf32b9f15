"""The step of an attempt that gives a node its GPUs: found, checked against the plan, taken from among the machine's."""

import math
import os
import threading
import time
from typing import Callable, List

from mlflow_batchai.node import gpulocks, gpus, launchers, protocol
from mlflow_batchai.node.layout import NodeLayout
from mlflow_batchai.node.outcome import Failure
from mlflow_batchai.node.peers import Peers
from mlflow_batchai.node.runtime import Runtime
from mlflow_batchai.node.shipper import Shipper
from mlflow_batchai.node.staging import SetupError

# How long GPUs may be in other hands before the job's user is told.
PATIENCE_SECONDS = 2.0


class Cards:
    """A node's GPUs during an attempt.

    Args:
        part: (i, n): this node is the i-th of n on its machine.
        wait: passes a moment; is told whether the job is still to start; raises what is to end the attempt.

    Attributes:
        own: the node's; from ``take`` on they are no other job's.
    """

    def __init__(
        self,
        layout: NodeLayout,
        shipper: Shipper,
        runtime: Runtime,
        peers: Peers,
        part: gpus.Part,
        wait: Callable[[bool], None],
    ) -> None:
        self.own = gpus.Gpus([], False, "")
        self._layout = layout
        self._shipper = shipper
        self._runtime = runtime
        self._peers = peers
        self._part = part
        self._wait = wait

    def find(self) -> List[str]:
        """Those that the node has unless other jobs have them. A driver that is just being loaded takes its time."""
        wanted, name = self._layout.plan.gpus_per_node, self._layout.node_id
        troubles: List[SetupError] = []

        def ask() -> None:
            try:
                self.own = gpus.of_node(os.environ, self._part, wanted, name)
            except SetupError as error:
                troubles.append(error)

        # A driver that hangs holds up nobody's end: what has asked it is left behind.
        asking = threading.Thread(target=ask, name="gpus", daemon=True)
        asking.start()
        asking.join(0.02)
        while asking.is_alive():
            self._wait(True)
        if troubles:
            raise troubles[0]
        if self.own.trouble:
            self._say("%s: %s" % (name, self.own.trouble))
        return self.own.ids

    def counts(self) -> List[int]:
        """GPUs of each node, as all have announced them: what every agent works out the same ranks from."""
        return [len(self._peers.announces[node]["gpus"]) for node in range(self._layout.plan.node_count)]

    def check(self) -> None:
        """Raise a Failure if there are more ranks than GPUs; every agent comes to the same, from the announces."""
        plan, counts = self._layout.plan, self.counts()
        hosts = [self._peers.announces[node]["host"] for node in range(plan.node_count)]
        refusal = launchers.refusal(plan, counts, hosts)
        if refusal:
            raise Failure(protocol.NODE_SETUP_FAILED, refusal, node=self._layout.node)
        if self._layout.node == 0:
            for sentence in filter(None, [launchers.without_gpus(plan, counts, hosts), launchers.idle_gpus(plan, counts)]):
                self._say(sentence)

    def take(self) -> None:
        """Wait until other jobs of this machine, of whatever cluster and user, leave us as many GPUs as we want.

        Raises:
            Failure: the job's nodes on this machine want more than it has.
        """
        if not self.own.ids:
            return
        announces, mark = self._peers.announces, self._layout.mark
        here = announces[self._layout.node]
        known = [*self.own.ids, *self.own.others]
        gang = {
            "%s/%d" % (mark, node): len(announce["gpus"])
            for node, announce in announces.items()
            if announce["machine"] == here["machine"] and set(announce["gpus"]) & set(known)
        }
        if sum(gang.values()) > len(known):
            raise Failure(
                protocol.NODE_SETUP_FAILED,
                "the job's %d nodes on %s want %d GPUs and it has %d: lower nodeCount, or gpusPerNode in the cluster document"
                % (len(gang), here["host"], sum(gang.values()), len(known)),
                node=self._layout.node,
            )
        tell = time.monotonic() + PATIENCE_SECONDS
        while True:
            taken = gpulocks.take(self.own.ids, self.own.others, "%s/%d" % (mark, self._layout.node), gang)
            if taken:
                break
            if time.monotonic() > tell:
                tell = math.inf
                who = "; ".join(gpulocks.holders(known))
                self._say(
                    "%s waits for GPUs that other jobs of this machine have%s" % (self._layout.node_id, who and " (%s)" % who)
                )
            self._wait(False)
        self._runtime.gpu_locks = taken.descriptors
        if taken.ids != self.own.ids:
            self._shipper.note("GPUs: %s, since other jobs have this node's own" % ", ".join(taken.ids))
        self.own = self.own._replace(ids=taken.ids)

    def _say(self, sentence: str) -> None:
        """To the execution log, and to the job's user."""
        self._shipper.note(sentence)
        self._shipper.log(None, "err", (sentence + "\n").encode())
