"""Large files in pieces, several at once: a stream that is sent while it is written, and a download that can go on."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlflow_batchai.errors import ShareError

if TYPE_CHECKING:
    from mlflow_batchai.storage.azure_sdk import Files

# Requests in flight for one caller.
AT_ONCE = 16
# Of these for one file that is read: memory holds each piece twice for a moment.
READ_AT_ONCE = 8
# What one request writes, by the service's limits, and what one reads.
RANGE = PIECE = 4 << 20
# A file whose length isn't known yet is made longer by doubling, but by no more than this.
LARGEST_GROWTH = 1 << 30
# How often a file is read anew that was replaced meanwhile.
READS = 8


class Piece(NamedTuple):
    """What one ranged read gave.

    Attributes:
        data: the bytes.
        etag: which content of the file they are of.
        size: bytes of the whole file.
    """

    data: bytes
    etag: str
    size: int


class ChangedError(Exception):
    """The file was replaced while it was read."""


class NotTakenError(Exception):
    """The service doesn't know this form of a request."""


class UploadStream(io.RawIOBase):
    """What is written to it is a file once ``finish`` has returned, and nothing before.

    Up to RANGE bytes are one request; more are ranges of a file of another name, sent while more is written.

    Args:
        files: requests of the share.
        path: the file's.
        temporary: a name in the same folder that nobody else takes.
        within: does a request that needs the folder of a path, which is made if it isn't there.
        pool: where ranges are sent.
        size: how many bytes will be written, if that is known.
    """

    def __init__(
        self,
        files: Files,
        path: str,
        temporary: str,
        within: Callable[[str, Callable[[], None]], None],
        pool: ThreadPoolExecutor,
        size: int | None = None,
    ) -> None:
        self._files = files
        self._expected = size or 4 * RANGE
        self._path = path
        folder = path.rpartition("/")[0]
        self._temporary = f"{folder}/{temporary}" if folder else temporary
        self._within = within
        self._pool = pool
        self._buffer = bytearray()
        self._begun = False
        self._sent = 0
        self._length = 0
        self._running: deque[Future[None]] = deque()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        taken = 0
        while taken < len(view):
            part = view[taken : taken + RANGE - len(self._buffer)]
            self._buffer += part
            taken += len(part)
            # A full buffer waits: if nothing follows, it is a file of one request.
            if len(self._buffer) == RANGE and taken < len(view):
                self._send_buffer()
        return taken

    def finish(self) -> None:
        """Send what is left, and give the file its name. Raises ShareError."""
        if not self._begun and self._files.takes_content:
            data = bytes(self._buffer)
            with contextlib.suppress(NotTakenError):
                self._within(self._path, lambda: self._files.create(self._path, len(data), data))
                return
        if self._buffer or not self._begun:
            self._send_buffer(last=True)
        while self._running:
            self._running.popleft().result()
        if self._length != self._sent:
            self._files.resize(self._temporary, self._sent)
        self._files.rename(self._temporary, self._path, self._sent)

    def abandon(self) -> None:
        """Leave nothing behind."""
        for future in self._running:
            future.cancel()
        wait(self._running)
        if self._begun:
            with contextlib.suppress(ShareError):
                self._files.delete_file(self._temporary)

    def _send_buffer(self, last: bool = False) -> None:
        data, start = bytes(self._buffer), self._sent
        self._buffer.clear()
        self._sent += len(data)
        if not self._begun:
            self._length = len(data) if last else max(len(data), self._expected)
            self._within(self._temporary, lambda: self._files.create(self._temporary, self._length))
            self._begun = True
        elif self._sent > self._length:
            self._length = max(self._sent, min(2 * self._length, self._length + LARGEST_GROWTH))
            self._files.resize(self._temporary, self._length)
        if data:
            self._running.append(self._pool.submit(self._files.put, self._temporary, start, data))
        # Memory holds so many ranges and no more; one that failed is noticed soon.
        while len(self._running) > AT_ONCE or (self._running and self._running[0].done()):
            self._running.popleft().result()


def download(
    fetch: Callable[[int], Piece], target: Path, pool: ThreadPoolExecutor, progress: Callable[[int], None] | None = None
) -> None:
    """Write a file of a share to ``target``, whole or not at all; its folder is made.

    What there was of a large one before a failure lies beside it, named by its content's ETag, and the next call goes on there.

    Args:
        fetch: the piece of PIECE bytes at an offset.
        pool: where pieces are fetched.
        progress: called with the number of bytes that came since the last time.

    Raises:
        ChangedError: the file was replaced too often meanwhile.
        ShareError: it can't be read.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(READS):
        first = fetch(0)
        digest = hashlib.sha256(f"{target.name}\0{first.etag}".encode("utf-8", "surrogateescape")).hexdigest()
        partial = target.with_name(f".{digest[:32]}.part")
        try:
            _fetch_all(fetch, first, partial, pool, progress or (lambda count: None))
        except ChangedError:
            partial.unlink(missing_ok=True)
            continue
        partial.replace(target)
        return
    raise ChangedError


def _fetch_all(
    fetch: Callable[[int], Piece], first: Piece, partial: Path, pool: ThreadPoolExecutor, progress: Callable[[int], None]
) -> None:
    """Append pieces in their order, so that the file's length is how far it has come even if we are killed."""
    with partial.open("ab") as file:
        have = min(file.tell(), first.size)
        if have < len(first.data):
            file.truncate(0)
            file.write(first.data)
            have = len(first.data)
        progress(have)
        running: deque[Future[Piece]] = deque()
        offsets = iter(range(have, first.size, PIECE))
        try:
            while have < first.size:
                running.extend(pool.submit(fetch, offset) for offset in itertools.islice(offsets, READ_AT_ONCE - len(running)))
                piece = running.popleft().result()
                if piece.etag != first.etag or len(piece.data) != min(PIECE, first.size - have):
                    raise ChangedError
                file.write(piece.data)
                have += len(piece.data)
                progress(len(piece.data))
        finally:
            for future in running:
                future.cancel()
