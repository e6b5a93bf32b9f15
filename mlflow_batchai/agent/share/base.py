"""Interface of the control share for agents, and of an attempt's files on it."""

from __future__ import annotations

import abc
import errno
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from mlflow_batchai.agent.protocol import JobPaths, Record, TornFileError, decode
from mlflow_batchai.agent.records import TornFiles

MAX_PENDING_BYTES = 16 << 20
TICK_SECONDS = 0.25

# How far an attempt is on a node: how soon what others say has to be heard.
QUEUED, GATHERING, STARTING, RUNNING, ENDING = "queued", "gathering", "starting", "running", "ending"

_ADDRESS = re.compile(r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])(\.(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])){3}")


def is_numbered(host: str) -> bool:
    """Whether a server is named by its IP address, or is this machine: one for tests, which may be asked by http."""
    return host == "localhost" or ":" in host or _ADDRESS.fullmatch(host) is not None


class ControlError(OSError):
    """The control share can't be used; the message is one sentence, which names the share and holds no secret."""

    def __init__(self, sentence: str, number: int | None = None) -> None:
        super().__init__(sentence)
        self.errno = number


class NotMountedError(ControlError):
    """The control share isn't mounted here now: waited for as if it hung."""


class Entry(NamedTuple):
    """One name in a directory: ``size`` in bytes, 0 for a directory."""

    name: str
    size: int
    is_directory: bool


class LogFile(abc.ABC):
    """A log file on the share: what could not be written is kept and tried again, so nothing is lost or doubled."""

    def __init__(self) -> None:
        self._data = bytearray()

    def append(self, data: bytes) -> None:
        """Write at the next flush; past ``MAX_PENDING_BYTES`` the oldest is given up."""
        self._data += data
        if len(self._data) > MAX_PENDING_BYTES:
            del self._data[: len(self._data) - MAX_PENDING_BYTES]

    @abc.abstractmethod
    def flush(self, last: bool = False) -> None:
        """Write what is pending, if it is time to.

        Args:
            last: whether it is in any case; a file of which nothing was written is made, empty.

        Raises:
            OSError: the share didn't take it.
        """

    def close(self) -> None:
        """Close the file, if it is open; what is pending stays."""
        return


class ControlShare(abc.ABC):
    """The control share; paths are relative to its root, with ``/``.

    Promises, beside what the methods say:
        1. Every failure is an OSError; over the network a ControlError, after it was tried for a while.
        2. Everything may be done twice with the same effect, ``claim`` excepted.
        3. All methods may be called by several threads at once; a LogFile by one.

    Attributes:
        at_once: how many files are fetched at a time with profit.
        torn: files of one record that were not closed when they were read.
    """

    at_once = 1

    def __init__(self) -> None:
        self.torn = TornFiles()

    @abc.abstractmethod
    def where(self, path: str) -> str:
        """A path of the share as people know it."""

    @abc.abstractmethod
    def trouble(self, identity: str) -> str | None:
        """Why this can't be used as the control share: None (it can), ``missing``, ``another`` (it hasn't that identity),
        ``read-only``, or ``unreachable: `` and a sentence."""

    @abc.abstractmethod
    def content(self, path: str) -> bytes | None:
        """A file's content, empty if it is no file or longer than may be; None if it isn't there."""

    def read_closed(self, path: str) -> Record | None:
        """The record of a closed file; None while there is none (``torn``)."""
        return self.torn.record(path, self.content(path))

    def read_segment(self, path: str) -> list[Record] | None:
        """The records of a segment; None while it isn't there, or isn't closed."""
        data = self.content(path)
        try:
            return None if data is None else decode(data)
        except TornFileError:
            return None

    @abc.abstractmethod
    def write_closed(self, path: str, records: Sequence[Record]) -> None:
        """Write a closed file under its final name; folders are made, but not that of the job (``attempt``)."""

    @abc.abstractmethod
    def claim(self, path: str) -> bool:
        """Create a directory, and its parents, but not the job's folder; False if it was there."""

    @abc.abstractmethod
    def entries(self, path: str) -> list[Entry]:
        """Names directly in a directory; none if there is no directory."""

    @abc.abstractmethod
    def fetch(self, path: str, target: str) -> str:
        """Copy a file to this node's disk; its SHA-256 in hexadecimal. FileNotFoundError if it isn't there."""

    @abc.abstractmethod
    def log_file(self, path: str) -> LogFile:
        """A log file, made when there is something to write; continued if it is there."""

    @abc.abstractmethod
    def attempt(self, paths: JobPaths, node: int, nodes: int) -> Attempt:
        """The files of one attempt, as the agent of a node (of so many) reads and writes them.

        From now on the job's folder has to be there for anything to be written below it: its submitter has made it.
        """

    def close(self) -> None:
        """Give back what is kept open between two calls, if anything; there may be more calls."""
        return

    def gone(self, path: str) -> OSError:
        """What it means that something isn't there which comes with the job's folder."""
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.where(path))

    def refused(self, seconds: float) -> str | None:
        """A sentence on why we are not let in any more, if that has been so for that long: time won't mend it."""
        return None

    def reserve(self, path: str, size: int) -> None:
        """Keep room for so many bytes until ``release``, where others could fill the share first."""
        return

    def release(self, path: str) -> None:
        """Give back what was reserved, if anything."""
        return

    def names(self, path: str) -> list[str]:
        return [entry.name for entry in self.entries(path)]


class Attempt(abc.ABC):
    """One attempt's files. A marker that stands beside a path is the name by which the index says that the file is there.

    Where every look at the share costs a request, nothing is asked for before the index has named it, and only ``look`` looks
    at the index; elsewhere files are asked for by name.

    Attributes:
        heartbeat_seconds: after so many seconds in which it had nothing to say an agent shows that it lives.
        flush_seconds: for how long records wait for more.
        linger_seconds: for how long those that nobody waits for do, at least, before they leave alone in place of a heartbeat.
        tells_sizes: whether the sizes of files cost next to nothing.
        tick_seconds: how often our thread calls ``look``, reads, and writes what is due.
    """

    tells_sizes = False
    tick_seconds = TICK_SECONDS

    heartbeat_seconds: float
    flush_seconds: float
    linger_seconds: float

    @property
    @abc.abstractmethod
    def looked(self) -> float:
        """Moment (``time.monotonic``) up to which we know what others have written."""

    @property
    @abc.abstractmethod
    def longest_silence(self) -> float:
        """Longest silence in seconds that one look shows: time in which we saw nothing of the share doesn't count."""

    def hasty(self) -> None:
        """The calling thread asks again by itself: from now on what it asks is given up soon, where that can be set."""
        return

    def look(self) -> None:
        """Called every moment by one thread: look at what is new, if it is time to, where not every reading looks."""
        return

    def pace(self, phase: str) -> None:
        """Set how far the attempt is, which may decide how often others are looked at: ``QUEUED`` at first."""
        return

    @abc.abstractmethod
    def read(self, marker: str, path: str) -> Record | None:
        """The record of a closed file; None while it isn't there."""

    @abc.abstractmethod
    def write(self, marker: str, path: str, records: Sequence[Record]) -> None:
        """Write a closed file, then its marker."""

    @abc.abstractmethod
    def requests(self) -> list[str]:
        """The ids of the requests that people have made."""

    @abc.abstractmethod
    def segment(self, writer: str, sequence: int) -> list[Record] | None:
        """A writer's records of that number; None while they aren't there, or aren't closed."""

    @abc.abstractmethod
    def went_on(self, writer: str, sequence: int) -> bool:
        """Whether a writer has written what comes behind that segment: then it will not be written any more."""

    @abc.abstractmethod
    def send(self, writer: str, sequence: int, records: Sequence[Record]) -> int:
        """Write a segment; how many bytes its file has, where ``tells_sizes``.

        After an error the same one has to be sent again.
        """

    def sizes(self, writer: str, sequence: int) -> dict[int, int]:
        """The bytes of each of a writer's segments from that one on, where ``tells_sizes``."""
        raise NotImplementedError

    @abc.abstractmethod
    def heartbeat(self, writer: str, number: int) -> bool:
        """Show that a writer lives, by a number that rises; False where that takes a segment of its own."""

    @abc.abstractmethod
    def heartbeats(self, writer: str) -> int:
        """The number that a writer gave last to ``heartbeat``; 0 if none is known."""
