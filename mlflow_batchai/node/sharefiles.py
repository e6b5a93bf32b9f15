"""Files of the share that an agent follows, or has to wait for: a peer's segments, the last word of a job."""

import contextlib
import time
from typing import Callable, List, Optional

from mlflow_batchai.node.control.base import Attempt
from mlflow_batchai.node.protocol import Record

PATIENCE_SECONDS = 60.0


class Follower:
    """Reads one writer's segments in order, each once.

    Attributes:
        sequence: number of segments read.
        beats: the last beat that was seen apart from segments.
        silent: for how many seconds we have looked and seen nothing new. Time in which the share let us see nothing at all
            says nothing of the writer, so a look adds ``Attempt.longest_silence`` at most.
    """

    def __init__(self, writer: str) -> None:
        self.writer = writer
        self.sequence = 0
        self.beats = 0
        self.silent = 0.0
        self._looked = time.monotonic()

    def read(self, attempt: Attempt) -> List[Record]:
        """Records of the segments that have been closed since the last call.

        Raises:
            OSError: the share can't be read (what was read before that is returned first).
        """
        found: List[Record] = []
        before = self.sequence
        while True:
            try:
                records = attempt.segment(self.writer, self.sequence)
            except OSError:
                if self.sequence == before:
                    raise
                break
            if records is None:
                break
            found.extend(records)
            self.sequence += 1
        looked, beats = attempt.looked, attempt.beats(self.writer)
        if self.sequence > before or beats > self.beats:
            self.silent = 0.0
        else:
            self.silent += min(max(0.0, looked - self._looked), attempt.longest_silence)
        self._looked, self.beats = looked, beats
        return found


def patiently(step: Callable[[], None]) -> None:
    """Do something on a share that may be failing just now: the last word of a job is worth waiting for.

    Raises:
        OSError: it still failed after ``PATIENCE_SECONDS``, or at once for a file that is there already.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return step()
        except FileExistsError:
            raise
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(0.2)


def comes(ask: Callable[[], Optional[Record]], seconds: float) -> bool:
    """Whether a closed file is there within so many seconds; a share that can't be read just now shows none.

    Args:
        ask: reads it.
    """
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if ask() is not None:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
