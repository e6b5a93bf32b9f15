"""Interface of shares: promises that the conformance suite (``tests/storage``) checks of each implementation."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from mlflow_batchai.agent.protocol import LONGEST_SEGMENT, identity_path, longest
from mlflow_batchai.errors import ShareError

# Begins the names of files that are being written: no listing has them.
TEMPORARY = ".new-"


class Entry(NamedTuple):
    """One name in a directory of a share.

    Attributes:
        size: bytes; 0 for a directory.
        modified: when it was last written, in seconds since the epoch; None where the service doesn't say.
    """

    name: str
    size: int
    is_directory: bool
    modified: float | None = None


class ShareEntry(NamedTuple):
    """One file share of a storage account.

    Attributes:
        quota: how much it may hold, in GiB; None: as much as the disk has.
        modified: when it was last changed itself, in seconds since the epoch.
    """

    name: str
    quota: int | None
    modified: float


class Readable(Protocol):
    """A source to send: a file that is open for reading bytes, or an object like one."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at its end."""


class Share(Protocol):
    """A file share as the submitting machine sees it; paths are relative to its root, with ``/``.

    Promises:
        1. ``read`` of a file that ``write`` or ``send`` has made returns all of it; a reader never sees half.
        2. ``write`` and ``send`` replace a file whole, or leave what was there; parents are made.
        3. ``claim`` succeeds for exactly one of any number of callers, on any machines.
        4. ``list`` and ``read`` see what this process wrote, at once.
        5. ``delete`` of what isn't there is no error; a directory goes with all that is in it.
        6. Other failures of the share are ShareError, with the share's address and the path in it.
        7. ``read_many`` finds what was there when it was called, and costs little where next to nothing is: a name is asked for
           once, and a mount, which may remember that a name was missing, has to look anew once a folder.
        8. ``download`` gives a file whole, of one time, or fails; then the next call goes on where it was, if that saves time.
        9. All of it may be called by many threads at once.
        10. ``list`` tells when a file was last written, by the clock of what keeps it, and costs nothing more for that.
        11. No path leads out of it: a link is an entry like any other, and is never followed.
        12. Of a file that is longer than is asked for no more is read.
        13. What ``keeping`` returns is the same share; that folder is not made anew on another share that lies at its path by
            then, or in an empty mount point: that is a ShareError.
    """

    @property
    def at_once(self) -> int:
        """Number of parallel calls that pay: 1 where each takes no longer than the data needs."""

    @property
    def url(self) -> str:
        """The address that ``open_share`` takes; it holds no secret."""

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from ``start``; ShareNotFoundError if it isn't there."""

    def read_many(self, paths: Iterable[str], most: int = LONGEST_SEGMENT) -> Iterator[tuple[str, bytes]]:
        """(path, content) of those files that are there, in the order given; at most ``at_once`` are read ahead.

        Args:
            most: bytes of each. The content of one that is longer, and of what is no file, is empty: as damaged ones may be.
        """

    def download(self, path: str, target: Path, progress: Callable[[int], None] | None = None) -> None:
        """Copy a file to one of this machine, whose folder is made.

        Args:
            progress: called with the number of bytes that came since its last call.

        Raises:
            ShareNotFoundError: it isn't there.
        """

    def write(self, path: str, data: bytes) -> None:
        """Write a whole file, atomically."""

    def claim(self, path: str) -> bool:
        """Create a directory; False if it was there. Parents are made."""

    def list(self, path: str) -> list[Entry]:
        """List a directory by name; empty if there is no such directory."""

    def delete(self, path: str) -> None:
        """Remove a file or a directory."""

    def touch(self, path: str) -> bool:
        """Have a file look as if it were written now; False if it isn't there, or that is not permitted."""

    def keeping(self, folder: str) -> Share:
        """The same share for writers in a folder that must exist already."""

    def send(self, path: str, source: Readable, size: int) -> None:
        """Write a whole file, atomically, from what is read; if that fails, nothing is written.

        Args:
            source: read to its end.

        Raises:
            ShareError: it has not so many, or reading it raised OSError or ValueError; what else that raises is raised.
        """


def job_file(share: Share, path: str) -> bytes | None:
    """A file of a job folder; None if it isn't there, and empty if it is longer than such a file may be, or none."""
    return next((data for _, data in share.read_many([path], longest(path))), None)


class Source:
    """A file to send, as shares read it: its errors are told from the share's, and its end must come where it was said."""

    def __init__(self, path: str, file: Readable, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._taken = 0

    def read(self, size: int) -> bytes:
        """At most so many bytes; none at its end, which has to be asked for.

        Raises:
            ShareError: it can't be read, or is longer or shorter than was said.
        """
        try:
            data = self._file.read(size)
        except (OSError, ValueError) as error:
            said = getattr(error, "strerror", None) or error
            raise ShareError(f"'{self._path}' was not sent: what was to be sent can't be read: {said}") from error
        self._taken += len(data)
        at_end = size and not data
        if self._taken > self._size or (at_end and self._taken < self._size):
            raise ShareError(
                f"'{self._path}' has not the {self._size} bytes that were to be sent: it changed meanwhile; send it again"
            )
        return data

    def read_all(self) -> bytes:
        """All of it; raises as ``read``."""
        return b"".join(iter(functools.partial(self.read, max(1, self._size)), b""))


def identify(share: Share) -> str:
    """A mark that tells a share from any other folder that is mounted at its path elsewhere; made at the first call.

    Two clients at once may make two: each that lies there is true.
    """
    folder = identity_path("x").rpartition("/")[0]
    known = [entry.name for entry in share.list(folder)]
    if known:
        return known[0]
    made = uuid.uuid4().hex
    share.claim(identity_path(made))
    return made
