"""Records that nobody waits for: they leave with others, and alone only after a while."""

import collections
import threading
import time
from typing import Any, Callable, Deque, List, Optional

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.protocol import Record

# While the share takes nothing: of more the oldest are given up.
MOST = 4096
MOST_AT_ONCE = 256


class Unhurried:
    """A queue of such records, for several threads.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._records: Deque[Record] = collections.deque(maxlen=MOST)
        self._since: Optional[float] = None

    def add(self, kind: str, **fields: Any) -> None:
        """A record of now."""
        with self._lock:
            self._records.append(dict(fields, k=kind, t=protocol.now_ms()))
            if self._since is None:
                self._since = self._clock()

    def take(self, after: float = 0.0) -> List[Record]:
        """The oldest ones, if the oldest has waited for so many seconds; they are the caller's now."""
        with self._lock:
            if self._since is None or self._clock() - self._since < after:
                return []
            taken = [self._records.popleft() for _ in range(min(len(self._records), MOST_AT_ONCE))]
            if not self._records:
                self._since = None
            return taken
