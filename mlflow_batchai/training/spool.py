"""The file that one process of a rank reports in: what its disk can't take waits in memory, and all is counted.

The file begins with a head of fixed length: how many records, and how many points in them, the process has handed in. It is
written over in place, which a full disk allows, so who reads the file knows what is missing of it. Standard library only.
"""

import atexit
import collections
import errno
import json
import logging
import os
import threading
import time
from typing import Any, Deque, Dict, Mapping, Optional, Sequence, Tuple

_log = logging.getLogger("mlflow_batchai.training.report")

HEAD = '{"type":"count","records":%12d,"points":%12d}\n'
HEAD_BYTES = len(HEAD % (0, 0))
# Records that are kept in memory: those that wait, and the last ones that were written, for a file that somebody removes.
MOST_BYTES = 8 << 20
AGAIN_SECONDS = 1.0
# How long a process that ends waits for a disk that is full.
LAST_SECONDS = 5.0


# A line, and the names of the points in it.
_Line = Tuple[bytes, Sequence[str]]

_encoder = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def _encoded(record: Mapping[str, Any]) -> bytes:
    return (_encoder.encode(record) + "\n").encode("ascii")


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
        self._waiting: Deque[_Line] = collections.deque()
        self._written: Deque[_Line] = collections.deque()
        self._bytes = 0
        self._lost: Dict[str, int] = {}
        self._retrying = self._complained = False
        atexit.register(self.finish)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record, or keep it until it can be written."""
        names = list(record["values"]) if record["type"] == "metric" else []
        with self.lock:
            self._records += 1
            self._points += len(names)
            self._keep(dict(record, n=self._records), names)
            self._try()

    def finish(self) -> None:
        """The process ends: wait a while for a disk that is full."""
        until = time.monotonic() + LAST_SECONDS
        with self.lock:
            self._retrying = True  # no thread can be started any more
            while self._waiting and not self._try() and time.monotonic() < until:
                time.sleep(0.1)

    def forget(self) -> None:
        """In a child process, which has a file of its own: what waits is written by its parent."""
        atexit.unregister(self.finish)
        self._close()

    def _keep(self, record: Mapping[str, Any], names: Sequence[str]) -> None:
        data = _encoded(record)
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
        try:
            self._flush()
        except OSError as error:
            if not self._complained:
                self._complained = True
                _log.warning("records wait in memory, as %s can't be written: %s", self.path, error.strerror or error)
            if not self._retrying:
                self._retrying = True
                timer = threading.Timer(AGAIN_SECONDS, self._again)
                timer.daemon = True
                timer.start()
            return False
        return True

    def _again(self) -> None:
        with self.lock:
            self._retrying = False
            self._try()

    def _flush(self) -> None:
        # Cleaners of old files take the folder, too.
        if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:
            self._close()
        if self._descriptor is None:
            self._open()
        try:
            while self._waiting:
                self._put(self._waiting[0][0])
                self._written.append(self._waiting.popleft())
            if self._lost:
                self._put(_encoded({"type": "lost", "values": self._lost}))
                self._lost = {}
        finally:
            if self._descriptor is not None and self._size:
                os.pwrite(self._descriptor, self._head(), 0)

    def _open(self) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor, self._size = os.open(self.path, flags, 0o644), 0
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
