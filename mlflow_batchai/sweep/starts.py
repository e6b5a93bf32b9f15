"""Which job of a sweep is started next, and what it means that some can't be. Pure, but for the clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from enum import Enum

from mlflow_batchai.errors import ClusterError, ShareError, TrackingError

# Jobs in a row that can't be started before the sweep is left, times that one is tried, and the pause after the first.
MOST, PAUSE_SECONDS = 3, 5.0
# What may keep every job from starting: one that is the last tells nothing of itself by it.
_OF_ALL = (ShareError, ClusterError, TrackingError)


class Outcome(Enum):
    """What becomes of a job that could not be started."""

    AGAIN = "it is tried once more, after the others"
    LOST = "it never can be"
    STOP = "no job can be, now"


class Starts:
    """The starts of one process that drives a sweep."""

    def __init__(self) -> None:
        self._tries: Counter[int] = Counter()
        self._in_a_row: list[int] = []
        self._next = 0.0

    def now(self, unstarted: Sequence[int]) -> list[int]:
        """Those that may be started now, in their order: what has failed waits for the others."""
        return [] if time.monotonic() < self._next else sorted(unstarted, key=self._tries.__getitem__)

    def succeeded(self) -> None:
        """A job was started."""
        self._in_a_row.clear()

    def failed(self, index: int, error: Exception) -> Outcome:
        """A job could not be started."""
        self._tries[index] += 1
        self._in_a_row.append(index)
        self._next = time.monotonic() + PAUSE_SECONDS * len(self._in_a_row)
        if len(set(self._in_a_row)) >= MOST:
            return Outcome.STOP
        if self._tries[index] < MOST:
            return Outcome.AGAIN
        of_all = isinstance(error, _OF_ALL) and len(self._in_a_row) >= MOST
        return Outcome.STOP if of_all else Outcome.LOST
