"""The index of an attempt (its folder is ``board``), whose listing says all that is new, where every look costs a request.

Who writes a file of the job folder puts a marker there after it (``docs/internals.md``, "The index"). Readers look at
a pace that follows what they see: once a second while there is news, every few seconds while there is none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from mlflow_batchai.agent.protocol import JobPaths
from mlflow_batchai.storage import Share

FAST_SECONDS, IDLE_SECONDS = 1.0, 5.0
SLOWER = 1.25


class Board:
    """What the board of one attempt says, as of the last look that was worth its request.

    Args:
        clock: seconds.
    """

    def __init__(self, share: Share, paths: JobPaths, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._paths = paths
        self._clock = clock
        self._seen: dict[str, int] = {}
        self._pace = FAST_SECONDS
        self._next = 0.0
        # The relay and the keeper of a job look at the same board, each from its thread.
        self._looking = threading.Lock()

    def look(self, now: bool = False) -> Mapping[str, int]:
        """Notice -> its number (0 for those that only say that something is there).

        Args:
            now: whether to look whatever the pace.

        Raises:
            ShareError: it can't be read; the next call tries again.
        """
        with self._looking:
            if now or self._clock() >= self._next:
                seen = {entry.name: entry.size for entry in self._share.list(self._paths.index)}
                # Beats say only that someone lives: no reason to hurry.
                news = any(seen[name] != self._seen.get(name) for name in seen if not name.startswith("beats-"))
                self._pace = FAST_SECONDS if news else min(self._pace * SLOWER, IDLE_SECONDS)
                self._seen = seen
                self._next = self._clock() + self._pace
            return self._seen

    def count(self, name: str) -> int:
        """The number of a notice as of the last look, 0 if it wasn't there."""
        return self._seen.get(name, 0)

    def put(self, name: str) -> None:
        """Put up a notice that something is there."""
        self._share.claim(self._paths.marker(name))
