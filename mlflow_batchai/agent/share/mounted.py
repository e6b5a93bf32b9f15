"""The control share as a directory of this node, local or mounted."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Sequence

from mlflow_batchai.agent import permissions, protocol, safeopen
from mlflow_batchai.agent.protocol import JobPaths, Record, identity_path
from mlflow_batchai.agent.share import mountfiles
from mlflow_batchai.agent.share.base import RUNNING, TICK_SECONDS, Attempt, ControlShare, Entry, LogFile, NotMountedError

HEARTBEAT_SECONDS = 5.0
FLUSH_SECONDS = 0.5
# While ranks run, what others say is waited for less: half of what an agent costs then is its looks at the share.
RUNNING_TICK_SECONDS = 0.5
REQUEST_ENDING = ".json"


class MountedShare(ControlShare):
    """A directory; files that aren't there yet are asked for by name, in a way that a mount with a memory heeds."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self.root = root
        # The folder of the job, if any, and what lay at the root when something was last made in it.
        self._job = "/"
        self._seen: tuple[int, int] | None = None

    def where(self, path: str) -> str:
        return os.path.join(self.root, *path.split("/")) if path else self.root

    def trouble(self, identity: str) -> str | None:
        if not os.path.isdir(self.root):
            return "missing"
        try:
            os.close(safeopen.open_folder(self.root, identity_path(identity)))
        except OSError:
            return "another"
        return None if os.access(self.root, os.W_OK | os.X_OK) else "read-only"

    def content(self, path: str) -> bytes | None:
        try:
            return mountfiles.read_whole(self.root, path, protocol.longest(path))
        except (FileNotFoundError, safeopen.OddFolderError):
            return None

    def write_closed(self, path: str, records: Sequence[Record]) -> None:
        self.send(path, records)

    def send(self, path: str, records: Sequence[Record]) -> int:
        """The same; how many bytes the file has."""
        with self._making(path) as within:
            return mountfiles.write_closed(self.root, path, records, within)

    def claim(self, path: str) -> bool:
        made = permissions.opener(self.root)
        with self._making(path) as within:
            return permissions.patiently(lambda: safeopen.claim(self.root, path, made, within))

    def open_to_write(self, path: str, append: bool = False) -> int:
        """The descriptor of a file to be written from its beginning, or appended to."""
        made = permissions.opener(self.root)
        with self._making(path) as within:
            return permissions.patiently(lambda: safeopen.open_to_write(self.root, path, append, made, within))

    @contextlib.contextmanager
    def _making(self, path: str) -> Iterator[str]:
        """The folder that has to be there (``safeopen.make_folders``) for what is made at a path.

        Raises:
            FileNotFoundError: the job's folder is gone from the share.
            ControlError: the share isn't mounted.
        """
        if not path.startswith(self._job + "/"):
            yield ""
            return
        root = mountfiles.which(self.root)
        try:
            yield self._job
        except FileNotFoundError:
            raise self.gone(path) from None
        self._seen = root

    def gone(self, path: str) -> OSError:
        # An empty mount point is another folder than the share that was there; a share that was mounted anew may be, too, but
        # has the job's folder.
        if mountfiles.which(self.root) != self._seen:
            return NotMountedError(f"the control share is not mounted at {self.root}")
        return super().gone(path)

    def entries(self, path: str, prefix: str = "") -> list[Entry]:
        try:
            with self._folder(path) as folder, os.scandir(folder) as names:
                return [_entry(name) for name in names if name.name.startswith(prefix)]
        except FileNotFoundError:
            safeopen.freshen(self.root, path)
            return []

    def names(self, path: str) -> list[str]:
        try:
            with self._folder(path) as folder:
                return os.listdir(folder)
        except FileNotFoundError:
            safeopen.freshen(self.root, path)
            return []

    def sizes(self, path: str, prefix: str) -> dict[str, int]:
        return {entry.name: entry.size for entry in self.entries(path, prefix)}

    def _folder(self, path: str) -> safeopen.Descriptor:
        return permissions.patiently(lambda: safeopen.open_folder(self.root, path))

    def fetch(self, path: str, target: str) -> str:
        digest = hashlib.sha256()
        with safeopen.open_file(self.root, path) as incoming, open(target, "wb") as outgoing:
            while True:
                block = incoming.read(1 << 20)
                if not block:
                    return digest.hexdigest()
                digest.update(block)
                outgoing.write(block)

    def reserve(self, path: str, size: int) -> None:
        with os.fdopen(self.open_to_write(path), "wb") as file:
            file.write(os.urandom(size))  # zeros might take no room at all

    def release(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            safeopen.remove(self.root, path)

    def log_file(self, path: str) -> MountedLogFile:
        return MountedLogFile(self, path)

    def attempt(self, paths: JobPaths, node: int, nodes: int) -> NamedFiles:
        self._job, self._seen = paths.folder, mountfiles.which(self.root)
        return NamedFiles(self, paths)


def _entry(name: os.DirEntry[str]) -> Entry:
    try:
        if name.is_dir(follow_symlinks=False):
            return Entry(name.name, 0, True)
        return Entry(name.name, name.stat(follow_symlinks=False).st_size, False)
    except OSError:  # a file that has just gone: who reads it meets it too
        return Entry(name.name, 0, False)


class MountedLogFile(LogFile):
    """A file that is kept open and appended to."""

    def __init__(self, share: MountedShare, path: str) -> None:
        super().__init__()
        self._share = share
        self._path = path
        self._descriptor: int | None = None

    def flush(self, last: bool = False) -> None:
        if not self._data and (not last or self._descriptor is not None):
            return
        try:
            if self._descriptor is not None and not os.fstat(self._descriptor).st_nlink:
                self.close()  # somebody has removed the file
            if self._descriptor is None:
                self._descriptor = self._share.open_to_write(self._path, append=True)
            while self._data:
                del self._data[: os.write(self._descriptor, self._data)]
        except OSError:
            self.close()  # opened anew next time: the handle may be what is wrong
            raise

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):
                os.close(descriptor)


class NamedFiles(Attempt):
    """An attempt whose files are asked for by name: that costs nothing, and no index is needed."""

    tells_sizes = True

    def __init__(self, share: MountedShare, paths: JobPaths) -> None:
        self._share = share
        self._paths = paths
        self.flush_seconds = FLUSH_SECONDS
        self.heartbeat_seconds = HEARTBEAT_SECONDS
        # A heartbeat is a segment too.
        self.linger_seconds = 0.0

    @property
    def looked(self) -> float:
        return time.monotonic()

    @property
    def longest_silence(self) -> float:
        return self.heartbeat_seconds

    def pace(self, phase: str) -> None:
        self.tick_seconds = RUNNING_TICK_SECONDS if phase == RUNNING else TICK_SECONDS

    def read(self, marker: str, path: str) -> Record | None:
        return self._share.read_closed(path)

    def write(self, marker: str, path: str, records: Sequence[Record]) -> None:
        self._share.write_closed(path, records)

    def requests(self) -> list[str]:
        names = self._share.names(self._paths.requests)
        return [name[: -len(REQUEST_ENDING)] for name in names if name.endswith(REQUEST_ENDING)]

    def segment(self, writer: str, sequence: int) -> list[Record] | None:
        return self._share.read_segment(self._paths.segment(writer, sequence))

    def went_on(self, writer: str, sequence: int) -> bool:
        # A server may have lost many in a row.
        return any(number > sequence for number in self.sizes(writer, sequence + 1))

    def send(self, writer: str, sequence: int, records: Sequence[Record]) -> int:
        return self._share.send(self._paths.segment(writer, sequence), records)

    def sizes(self, writer: str, sequence: int) -> dict[int, int]:
        found: dict[int, int] = {}
        first = os.path.basename(self._paths.event_folder(sequence))
        for folder in self._share.names(self._paths.events):
            if folder >= first:
                for name, size in self._share.sizes(f"{self._paths.events}/{folder}", writer + "-").items():
                    number = name[len(writer) + 1 :].partition(".")[0]
                    if number.isdecimal():
                        found[int(number)] = size
        return found

    def heartbeat(self, writer: str, number: int) -> bool:
        return False

    def heartbeats(self, writer: str) -> int:
        """Those that it sends while it sleeps (``reservation.waiter``)."""
        folder, _, name = self._paths.heartbeats(writer).rpartition("/")
        return self._share.sizes(folder, name).get(name, 0)
