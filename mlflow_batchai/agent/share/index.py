"""An attempt's files on a share where every look costs a request: one listing of an index says what is new.

The index is a folder of markers: empty files whose size is a number. Who writes a file puts its marker there afterwards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.protocol import JobPaths, Record
from mlflow_batchai.agent.share.base import ENDING, GATHERING, QUEUED, RUNNING, STARTING, Attempt

if TYPE_CHECKING:
    from mlflow_batchai.agent.share.rest import RestShare

HEARTBEAT_SECONDS = 20.0
FLUSH_SECONDS = 1.0
# A segment costs several requests, and one each who reads it; a heartbeat costs one.
LINGER_SECONDS = 60.0
# The share thread comes back by itself; in between it has other things to do.
HASTE_SECONDS = 5.0
SLOWER = 1.5


class Pace(NamedTuple):
    """Seconds between two looks: just after news, and when there were none for long."""

    news: float
    idle: float


# Ten idle agents together look 0.75 times a second (node 0 hears cancel requests); of fewer each may look more often. While the
# others are started or wait for the end every second counts.
SECONDS_A_PEER = 2.0
_START = Pace(0.5, 2.0)
# How far the attempt is -> the pace of node 0, and that of the others.
PACES = {
    QUEUED: (Pace(1.0, 4.0), Pace(4.0, 18.0)),
    GATHERING: (Pace(0.5, 4.0), Pace(0.5, 8.0)),
    STARTING: (_START, _START),
    RUNNING: (Pace(1.0, 4.0), Pace(4.0, 18.0)),
    ENDING: (_START, _START),
}


class Index:
    """The index at the last look: what other writers have written; looked at quickly while there is news, else rarely.

    Args:
        listing: marker -> number of every marker there is.
        peers: how many others than node 0 look.
        matters: whether a marker that is new is news to this agent.
    """

    def __init__(
        self,
        listing: Callable[[], dict[str, int]],
        node: int,
        matters: Callable[[str], bool],
        peers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listing = listing
        self._paces = {phase: _of_node(first, other, node, peers) for phase, (first, other) in PACES.items()}
        self._matters = matters
        self._clock = clock
        self._pace = self._paces[QUEUED]
        # Whole lists are exchanged: the agent's other thread reads what it likes meanwhile.
        self._numbers: dict[str, int] = {}
        self._next = self._pace.news
        self._asked = clock() - self._next
        self._lock = threading.Lock()
        self.looked = clock()
        self.interval = self._pace.news

    def pace(self, phase: str) -> None:
        self._pace = self._paces[phase]
        self._next = self._pace.news

    def look(self) -> bool:
        """List the markers if it is time to; whether it was.

        Raises:
            OSError: it can't be done; it is tried again when it is time for the next look.
        """
        with self._lock:
            now, pace = self._clock(), self._pace
            wait = min(self._next, pace.idle)
            if now - self._asked < wait:
                return False
            self._asked = now
            numbers = self._listing()
            news = any(self._numbers.get(name) != number and self._matters(name) for name, number in numbers.items())
            self._next = pace.news if news else min(max(wait, pace.news) * SLOWER, pace.idle)
            self._numbers = numbers
            self.looked, self.interval = now, wait
            return True

    def has(self, marker: str) -> bool:
        return marker in self._numbers

    def count(self, marker: str) -> int:
        """The number of a marker; 0 if it wasn't there."""
        return self._numbers.get(marker, 0)

    def names(self, prefix: str) -> list[str]:
        return [name[len(prefix) :] for name in self._numbers if name.startswith(prefix)]


def _of_node(first: Pace, other: Pace, node: int, peers: int) -> Pace:
    """The pace of one node of a job: all together may ask for so much."""
    if node == 0:
        return first
    return Pace(min(other.news, first.news * max(1, peers)), min(other.idle, max(first.idle, SECONDS_A_PEER * peers)))


class IndexedFiles(Attempt):
    """An attempt whose files are asked for once the index has named them."""

    def __init__(self, share: RestShare, paths: JobPaths, node: int, nodes: int) -> None:
        self._share = share
        self._paths = paths
        self._writer = protocol.agent_writer(node)
        self._node = node
        self._index = Index(self._list, node, self._matters, nodes - 1)
        self._written: int | None = None
        self.heartbeat_seconds = HEARTBEAT_SECONDS
        self.flush_seconds = FLUSH_SECONDS
        self.linger_seconds = LINGER_SECONDS

    @property
    def looked(self) -> float:
        return self._index.looked

    @property
    def longest_silence(self) -> float:
        return self._index.interval + self.heartbeat_seconds

    def hasty(self) -> None:
        self._share.wire.hasty(HASTE_SECONDS)

    def look(self) -> None:
        self._index.look()

    def pace(self, phase: str) -> None:
        self._index.pace(phase)

    def read(self, marker: str, path: str) -> Record | None:
        return self._share.read_closed(path) if self._index.has(marker) else None

    def write(self, marker: str, path: str, records: Sequence[Record]) -> None:
        self._share.write_closed(path, records)
        self._share.claim(self._paths.marker(marker))

    def requests(self) -> list[str]:
        return self._index.names("request-")

    def segment(self, writer: str, sequence: int) -> list[Record] | None:
        if sequence >= self._index.count("segments-" + writer):
            return None
        return self._share.read_segment(self._paths.segment(writer, sequence))

    def went_on(self, writer: str, sequence: int) -> bool:
        return sequence < self._index.count("segments-" + writer)

    def send(self, writer: str, sequence: int, records: Sequence[Record]) -> int:
        # An error of the marker must not have a megabyte sent twice.
        if self._written != sequence:
            self._share.write(self._paths.segment(writer, sequence), protocol.encode(records, compress=True))
            self._written = sequence
        self._share.mark(self._paths.marker("segments-" + writer), sequence + 1)
        return 0

    def heartbeat(self, writer: str, number: int) -> bool:
        self._share.mark(self._paths.marker("beats-" + writer), number)
        return True

    def heartbeats(self, writer: str) -> int:
        return self._index.count("beats-" + writer)

    def _list(self) -> dict[str, int]:
        return {entry.name: entry.size for entry in self._share.entries(self._paths.index)}

    def _matters(self, name: str) -> bool:
        """Node 0 hears everyone, the others hear node 0; that someone lives is nothing to hurry for."""
        if name.startswith("beats-") or name == "segments-" + self._writer:
            return False
        return self._node == 0 or not name.startswith("segments-") or name == "segments-" + protocol.agent_writer(0)
