"""A node that is asked things, what is the same for all of them, and asking many at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mlflow_batchai.admin.doctor import findings
from mlflow_batchai.admin.doctor.findings import Check, Complete, Finding
from mlflow_batchai.agent.plan import Volume
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.engines.machines import Answer, Node, SshMachine
from mlflow_batchai.errors import ClusterError

ASK_SECONDS = 20.0
# Who wrote a file, if no node did.
CLIENT = "client"

Say = Callable[[Check | Complete], None]


class Patient:
    """One node, and what it has answered so far.

    Attributes:
        title: how the engine's sentences call it.
        token: the name of its file on the share.
        lost: nothing more can be asked of it.
    """

    def __init__(self, index: int, node: Node) -> None:
        self.node = node
        self.is_remote = isinstance(node.machine, SshMachine)
        self.name = node.name if self.is_remote else f"node-{index}"
        self.title = node.machine.title
        self._label = f"{self.title} ({node.machine.address})" if isinstance(node.machine, SshMachine) else self.title
        self.token = f"node-{index}"
        self.lost = False
        self.answers: dict[str, Answer] = {}

    def ask(self, verb: str, timeout: float = ASK_SECONDS, **arguments: Any) -> Answer:
        """Ask a verb, and keep the answer; ClusterError if there is none."""
        said = self.answers[verb] = self.node.machine.ask(verb, timeout, **arguments)
        return said

    def check(self, name: str, finding: Finding) -> Check:
        return Check(self.name, name, finding.state, finding.text)

    def failed(self, name: str, error: ClusterError | str) -> Check:
        """A check that failed, with a sentence of the engine."""
        return self.check(name, findings.failed(self.without_name(error)))

    def without_name(self, error: ClusterError | str) -> str:
        """A sentence of the engine without the node's name in front."""
        return str(error).removeprefix(f"{self.title}: ").removeprefix(f"{self._label}: ")


class Case(NamedTuple):
    """What is the same for all nodes of one examination, worked out once.

    Attributes:
        identity: the control share's.
        folder: where nodes put files for each other to see.
        secret: what opens the control share for them, None: a directory.
        volumes: those that every job of the cluster mounts.
    """

    cluster: Cluster
    identity: str
    folder: str
    secret: str | None
    volumes: Sequence[Volume]


def together(works: Sequence[Callable[[Say], None]]) -> Iterator[Check | Complete]:
    """What all of them say, as it comes, until all have ended.

    Each has a thread of its own, for which a program that is interrupted doesn't wait.
    """
    said: queue.SimpleQueue[Check | Complete | BaseException | None] = queue.SimpleQueue()

    def run(work: Callable[[Say], None]) -> None:
        try:
            work(said.put)
        except BaseException as error:
            said.put(error)
        said.put(None)

    for work in works:
        threading.Thread(target=run, args=(work,), daemon=True, name="doctor").start()
    left = len(works)
    while left:
        item = said.get()
        if isinstance(item, BaseException):
            raise item
        if item is None:
            left -= 1
        else:
            yield item
