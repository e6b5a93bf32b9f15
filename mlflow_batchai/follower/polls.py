"""Poll all jobs of a cluster that this process follows at once: over one connection a node, with one question."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from mlflow_batchai.cluster import clusters
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.engines.base import Handle, Poll

# Who asks first waits so long for others (``Watch.seconds`` has them ask at the same moments).
GATHER_SECONDS = 0.1


@dataclass
class Polls:
    """Polls of one cluster, for several threads.

    Attributes:
        cluster: whose engine is asked.
        users: how many jobs use this.
    """

    cluster: Cluster
    users: int = 0
    _changing: threading.Lock = field(default_factory=threading.Lock)
    _asking: threading.Lock = field(default_factory=threading.Lock)
    _asked: list[tuple[Handle, Future[Poll]]] = field(default_factory=list)

    def poll(self, handle: Handle) -> Poll:
        """See ``Engine.poll``."""
        future: Future[Poll] = Future()
        with self._changing:
            self._asked.append((handle, future))
            first = len(self._asked) == 1
        if first:
            time.sleep(GATHER_SECONDS)
            with self._asking:
                self._ask()
        return future.result()

    def _ask(self) -> None:
        with self._changing:
            asked, self._asked = self._asked, []
        try:
            polls = self.cluster.engine.poll_all([handle for handle, _ in asked])
        except BaseException as error:  # each of them has to hear of it
            for _, future in asked:
                future.set_exception(error)
            return
        for (_, future), poll in zip(asked, polls, strict=True):
            future.set_result(poll)


_changing = threading.Lock()
_shared: list[Polls] = []


@contextlib.contextmanager
def shared(name: str) -> Iterator[Polls]:
    """The polls of a cluster, the same for all as long as it is described in the same way.

    Raises:
        BatchAIError: there is no such cluster here (``clusters.load``).
    """
    cluster = clusters.load(name)[0]
    with _changing:
        known = (polls for polls in _shared if _is_same(polls.cluster, cluster))
        polls = next(known, None) or Polls(cluster)
        if not polls.users:
            _shared.append(polls)
        polls.users += 1
    try:
        yield polls
    finally:
        with _changing:
            polls.users -= 1
            if not polls.users:
                _shared.remove(polls)
                polls.cluster.engine.close()


def _is_same(one: Cluster, other: Cluster) -> bool:
    return (one.name, one.document, one.record) == (other.name, other.document, other.record)
