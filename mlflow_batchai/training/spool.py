"""The file that one process of a rank reports in: what its disk can't take waits in memory, and all is counted.

The file begins with a head of fixed length: how many records, and how many points in them, the process has handed in. It is
written over in place, which a full disk allows, so who reads the file knows what is missing of it. Standard library only.
"""

import atexit
import collections
import contextlib
import errno
import itertools
import json
import logging
import os
import threading
import time
from typing import Any, Deque, Dict, Mapping, Optional, Sequence, Tuple

_log = logging.getLogger("mlflow_batchai.training.report")

HEAD = '{"type":"count","records":%12d,"points":%12d}\n'
# Records that are kept in memory: those that wait, and the last ones that were written, for a file that somebody removes.
MOST_BYTES = 8 << 20
AGAIN_SECONDS = 1.0
# How long a process that ends waits for a disk that is full.
LAST_SECONDS = 5.0


# A line, and the names of the points in it.
_Line = Tuple[bytes, Sequence[str]]
# Names in one record of what was dropped.
_MOST_NAMES = 1000

_encoder = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def _encoded(text: str, more: str = "") -> bytes:
    """A line of a JSON object, with another key."""
    return (text[:-1] + more + "}\n").encode("ascii")


class Spool:
    """The file of this process.

    Records are numbered (``n``, from 1): a file that is written anew, since somebody removed it, has some of them again.

    Args:
        folder: made if it isn't there.
        rank: part of the file's name.
    """

    def __init__(self, folder: str, rank: int) -> None:
        # A program that was started in a process's place has its number.
        name = "report-%d-%d-%x.jsonl" % (rank, os.getpid(), time.time_ns())
        self.path = os.path.join(folder, name)
        self.lock = threading.Lock()
        self._descriptor: Optional[int] = None
        self._size = 0
        self._records = self._points = 0
        # What was handed in, and what is numbered and waits for the disk.
        self._incoming: Deque[Tuple[str, Sequence[str]]] = collections.deque()
        self._waiting: Deque[_Line] = collections.deque()
        self._written: Deque[_Line] = collections.deque()
        self._bytes = 0
        self._lost: Dict[str, int] = {}
        self._retrying = self._complained = False
        atexit.register(self.finish)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record, or keep it until it can be written.

        Raises:
            TypeError, ValueError: JSON can't say it.
        """
        names = list(record["values"]) if record["type"] == "metric" else []
        self._incoming.append((_encoder.encode(record), names))
        self._work()

    def _work(self) -> None:
        """Write what was handed in. Whoever holds the lock looks once more when it is free: it may be this very thread, that a
        signal has interrupted, and must not be waited for."""
        while self._incoming and self.lock.acquire(blocking=False):
            try:
                self._try()
            finally:
                self.lock.release()

    def finish(self) -> None:
        """The process ends: wait a while for a disk that is full."""
        until = time.monotonic() + LAST_SECONDS
        with self.lock:
            self._retrying = True  # no thread can be started any more
            while (self._waiting or self._incoming) and not self._try() and time.monotonic() < until:
                time.sleep(0.1)

    def forget(self) -> None:
        """In a child process, which has a file of its own: what waits is written by its parent."""
        atexit.unregister(self.finish)
        self._close()

    def _take(self) -> None:
        """Number what was handed in; past ``MOST_BYTES`` the oldest is dropped and counted."""
        while self._incoming:
            text, names = self._incoming.popleft()
            self._records += 1
            self._points += len(names)
            data = _encoded(text, ',"n":%d' % self._records)
            self._waiting.append((data, names))
            self._bytes += len(data)
        while self._bytes > MOST_BYTES and (self._written or len(self._waiting) > 1):
            if self._written:
                self._bytes -= len(self._written.popleft()[0])
                continue
            dropped, of = self._waiting.popleft()
            self._bytes -= len(dropped)
            for name in of or ("",):
                self._lost[name] = self._lost.get(name, 0) + 1

    def _try(self) -> bool:
        """Write what waits; whether all of it could be written. If not, it is tried again from time to time."""
        self._take()
        try:
            self._flush()
        except OSError as error:
            if not self._complained:
                self._complained = True
                _log.warning("records wait in memory, as %s can't be written: %s", self.path, error.strerror or error)
            self._try_again()
            return False
        return True

    def _try_again(self) -> None:
        if self._retrying:
            return
        timer = threading.Timer(AGAIN_SECONDS, self._again)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread can be started now: the next record tries
            timer.start()
            self._retrying = True

    def _again(self) -> None:
        with self.lock:
            self._retrying = False
            self._try()
        self._work()

    def _flush(self) -> None:
        if self._descriptor is None or os.fstat(self._descriptor).st_nlink == 0:
            try:
                self._open()
            except OSError:
                if self._descriptor is None:
                    raise
                # The agent has the file open that was removed: it reads on.
        try:
            while self._waiting:
                self._put(self._waiting[0][0])
                self._written.append(self._waiting.popleft())
            while self._lost:
                some = dict(itertools.islice(self._lost.items(), _MOST_NAMES))
                self._put(_encoded(_encoder.encode({"type": "lost", "values": some})))
                for name in some:
                    del self._lost[name]
        finally:
            if self._descriptor is not None and self._size:
                os.pwrite(self._descriptor, self._head(), 0)

    def _open(self) -> None:
        """Make the file, anew if it was removed (cleaners of old files take the folder, too), with all that is still known."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags, 0o644)
        self._close()
        self._descriptor, self._size = descriptor, 0
        self._waiting.extendleft(reversed(self._written))
        self._written.clear()

    def _head(self) -> bytes:
        return (HEAD % (self._records, self._points)).encode("ascii")

    def _put(self, data: bytes) -> None:
        assert self._descriptor is not None
        if not self._size:
            data = self._head() + data
        if os.pwrite(self._descriptor, data, self._size) < len(data):
            os.ftruncate(self._descriptor, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        self._size += len(data)

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)
