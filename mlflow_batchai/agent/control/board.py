"""The board of an attempt as an agent reads it: one listing says all that is new, at a pace that follows the news."""

import threading
import time
from typing import Callable, Dict, List, NamedTuple, Tuple

from mlflow_batchai.agent.control.base import ENDING, GATHERING, QUEUED, RUNNING, STARTING

SLOWER = 1.5


class Pace(NamedTuple):
    """Seconds between two looks: just after news, and when there were none for long."""

    news: float
    idle: float


# Ten idle agents together look 0.75 times a second (node 0 hears cancel requests); of fewer each may look more often. While the
# others are started or wait for the end every second counts.
SECONDS_A_PEER = 2.0
_START = Pace(0.5, 2.0)
PACES = {
    QUEUED: (Pace(1.0, 4.0), Pace(4.0, 18.0)),
    GATHERING: (Pace(0.5, 4.0), Pace(0.5, 8.0)),
    STARTING: (_START, _START),
    RUNNING: (Pace(1.0, 4.0), Pace(4.0, 18.0)),
    ENDING: (_START, _START),
}


class Board:
    """What others have put up.

    Args:
        listing: name -> number of every notice there is.
        node: whose agent looks.
        peers: how many others than node 0 look.
        matters: whether a notice that is new is news to this agent.
        clock: seconds.

    Attributes:
        looked: moment at which it was last looked at, by the clock.
        interval: seconds between the last two looks as they were planned.
    """

    def __init__(
        self,
        listing: Callable[[], Dict[str, int]],
        node: int,
        matters: Callable[[str], bool],
        peers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listing = listing
        self._paces = {phase: _of_node(paces, node, peers) for phase, paces in PACES.items()}
        self._matters = matters
        self._clock = clock
        self._pace = self._paces[QUEUED]
        # Whole lists are exchanged: the agent's other thread reads what it likes meanwhile.
        self._numbers: Dict[str, int] = {}
        self._next = self._pace.news
        self._asked = clock() - self._next
        self._lock = threading.Lock()
        self.looked = clock()
        self.interval = self._pace.news

    def pace(self, phase: str) -> None:
        """The attempt has come that far here."""
        self._pace = self._paces[phase]
        self._next = self._pace.news

    def look(self) -> bool:
        """List the notices if it is time to; whether it was.

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

    def has(self, name: str) -> bool:
        """Whether a notice was there at the last look."""
        return name in self._numbers

    def count(self, name: str) -> int:
        """The number of a notice; 0 if it wasn't there."""
        return self._numbers.get(name, 0)

    def names(self, prefix: str) -> List[str]:
        """Notices whose names begin so, without that beginning."""
        return [name[len(prefix) :] for name in self._numbers if name.startswith(prefix)]


def _of_node(paces: Tuple[Pace, Pace], node: int, peers: int) -> Pace:
    """The pace of one node of a job: all together may ask for so much."""
    first, other = paces
    if node == 0:
        return first
    return Pace(min(other.news, first.news * max(1, peers)), min(other.idle, max(first.idle, SECONDS_A_PEER * peers)))
