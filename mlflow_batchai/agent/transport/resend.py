"""Event files that the share has taken, kept for a while: what it has lost is written again."""

import collections
import time
from typing import Callable, Deque, Dict, List, NamedTuple

from mlflow_batchai.agent.protocol import Record

# How often it is looked whether the share still has what it took in the last minutes, and how much is kept for that: a server
# that crashes may lose what it has acknowledged (nfs(5): async), and somebody may remove a file.
CHECK_SECONDS, RECENT_SECONDS = 5.0, 120.0
MOST_KEPT, MOST_KEPT_BYTES = 2000, 8 << 20


class Sent(NamedTuple):
    """An event file of so many bytes that the share has taken at that time (``time.monotonic``)."""

    sequence: int
    records: List[Record]
    size: int
    at: float


class Resend:
    """What an agent has sent, the last of it.

    Args:
        sizes: given a sequence, the bytes of each of the agent's event files from that one on.
        send: writes one.
    """

    def __init__(self, sizes: Callable[[int], Dict[int, int]], send: Callable[[int, List[Record]], object]) -> None:
        self._sizes = sizes
        self._send = send
        self._sent: Deque[Sent] = collections.deque()
        self._bytes = 0
        self._checked = time.monotonic()
        self._is_over = False

    def add(self, sequence: int, records: List[Record], size: int) -> None:
        """Keep one; the oldest are given up."""
        self._sent.append(Sent(sequence, records, size, time.monotonic()))
        self._bytes += size
        while self._bytes > MOST_KEPT_BYTES or len(self._sent) > MOST_KEPT:
            self._bytes -= self._sent.popleft().size

    def check(self, last: bool) -> None:
        """Write again what is gone of the last minutes, if it is time to; of all that is kept, once, when nothing more comes.

        Raises:
            OSError: the share can't be looked at, or doesn't take it: it is looked for once more.
        """
        now = time.monotonic()
        if self._is_over or (now - self._checked < CHECK_SECONDS and not last):
            return
        kept = [sent for sent in self._sent if last or now - sent.at < RECENT_SECONDS]
        there = self._sizes(kept[0].sequence) if kept else {}
        for sent in kept:
            if there.get(sent.sequence) != sent.size:
                self._send(sent.sequence, sent.records)
        self._checked, self._is_over = now, last
