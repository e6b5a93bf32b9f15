"""Files of the share that a node writes, or the agent follows or grows: a peer's segments, and log files."""

import contextlib
import os
import time
from typing import Callable, Iterator, List, Optional

from mlflow_batchai.node import protocol
from mlflow_batchai.node.layout import NodeLayout
from mlflow_batchai.node.protocol import Record

BEAT_SECONDS = 5.0
MAX_PENDING_BYTES = 16 << 20
PATIENCE_SECONDS = 60.0


class Follower:
    """Reads one writer's segments in order, each once.

    Attributes:
        sequence: number of segments read.
        silent: for how many seconds we have looked and seen nothing new. Time in which the share let us see nothing at all
            says nothing of the writer, so a look adds ``BEAT_SECONDS`` at most.
    """

    def __init__(self, writer: str) -> None:
        self.writer = writer
        self.sequence = 0
        self.silent = 0.0
        self._looked = time.monotonic()

    def read(self, layout: NodeLayout) -> List[Record]:
        """Records of the segments that have been closed since the last call.

        Raises:
            OSError: the share can't be read (what was read before that is returned first).
        """
        found: List[Record] = []
        before = self.sequence
        while True:
            path = layout.on_share(layout.paths.segment(self.writer, self.sequence))
            try:
                found.extend(protocol.decode(protocol.read_fresh(path)))
            except (FileNotFoundError, protocol.TornFileError):
                break
            except OSError:
                if self.sequence == before:
                    raise
                break
            self.sequence += 1
        now = time.monotonic()
        self.silent = 0.0 if self.sequence > before else self.silent + min(now - self._looked, BEAT_SECONDS)
        self._looked = now
        return found


@contextlib.contextmanager
def as_open_as_root(share: str) -> Iterator[None]:
    """What this process makes meanwhile is as open to others as the share's root: the client may be another user on it.

    It sets the process's umask, which a share that can't be looked at leaves as it is.
    """
    before = None
    with contextlib.suppress(OSError):
        before = os.umask(0o777 & ~os.stat(share).st_mode & 0o077)
    try:
        yield
    finally:
        if before is not None:
            os.umask(before)


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


def comes(path: str, seconds: float) -> bool:
    """Whether a closed file is there within so many seconds; a share that can't be read just now shows none."""
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if protocol.read_closed(path) is not None:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.2)


class LogFile:
    """A log file on the share: what could not be written is kept and tried again, so nothing is lost or doubled."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._data = bytearray()
        self._descriptor: Optional[int] = None

    def append(self, data: bytes) -> None:
        """Write at the next flush; past ``MAX_PENDING_BYTES`` the oldest is given up."""
        self._data += data
        if len(self._data) > MAX_PENDING_BYTES:
            del self._data[: len(self._data) - MAX_PENDING_BYTES]

    def flush(self) -> None:
        """Write what is pending.

        Raises:
            OSError: the share didn't take it.
        """
        if not self._data:
            return
        try:
            if self._descriptor is None:
                os.makedirs(os.path.dirname(self._path), exist_ok=True)
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            while self._data:
                del self._data[: os.write(self._descriptor, self._data)]
        except OSError:
            self.close()  # opened anew next time: the handle may be what is wrong
            raise

    def close(self) -> None:
        """Close the file; what is pending stays."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):
                os.close(descriptor)
