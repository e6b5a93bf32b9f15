"""Find and open a job's files on a directory share without leaving the job's folder through links.

Links inside of that folder work. They say where to look: what is opened is the path that comes out of it, in which no link is
followed any more (``agent.safeopen``), and what is sent is what was opened.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from mlflow_batchai.agent.safeopen import OddFileError
from mlflow_batchai.errors import ShareError, ShareNotFoundError
from mlflow_batchai.storage.base import Entry
from mlflow_batchai.storage.directory import DirectoryShare

# Folders below one that are looked into, and how many of all that are found by links: a few links may name millions.
DEEPEST, MOST_LINKED = 100, 1000


@dataclass
class Found:
    """Entries of a folder and below; names are paths from there.

    Attributes:
        files: name -> (path on the share, without links; size in bytes; when it was written).
        astray: links that lead out of the bounds, to nothing, or back to where they lie.
        closed: folders that this account may not list.
        foreign: hard links to files of another user than the folder's.
    """

    files: dict[str, tuple[str, int, float]] = field(default_factory=dict)
    astray: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    deep: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


class Within:
    """A folder of a share out of which nothing leads."""

    def __init__(self, share: DirectoryShare, bounds: str) -> None:
        self._share = share
        self._bounds = bounds

    def real(self, path: str) -> str | None:
        """A path of the share without links; None if it leads out."""
        return self._share.real(path, self._bounds)

    def entries(self, path: str) -> list[Entry]:
        """Entries of a folder, links as their targets; links that lead out or to nothing are left out."""
        entries: list[Entry] = []
        for name, _, status in self._scan(self.real(path)):
            if status is not None:
                is_directory = stat.S_ISDIR(status.st_mode)
                entries.append(Entry(name, 0 if is_directory else status.st_size, is_directory, status.st_mtime))
        return entries

    def find(self, path: str) -> Found | None:
        """All files of a folder and below it; None if it is a link that leads out. One that isn't there is empty.

        Raises:
            ShareError: it can't be read.
        """
        top, found = self.real(path), Found()
        if top is None:
            return None
        folder = self._share.look(top)
        linked = 0

        def walk(inside: str, real: str, above: frozenset[str]) -> None:
            nonlocal linked
            for entry, below, status in self._scan(real, found.closed, inside):
                name, is_link = f"{inside}{entry}", below != f"{real}/{entry}"
                if status is None or below in above:
                    found.astray.append(name)
                elif stat.S_ISDIR(status.st_mode):
                    linked += is_link
                    if name.count("/") >= DEEPEST or linked > MOST_LINKED:
                        found.deep.append(name)
                    else:
                        walk(f"{name}/", below, above | {below})
                elif folder and is_foreign(status, folder):
                    found.foreign.append(name)
                elif stat.S_ISREG(status.st_mode):
                    found.files[name] = (below, status.st_size, status.st_mtime)

        walk("", top, frozenset({top}))
        return found

    def _scan(
        self, folder: str | None, closed: list[str] | None = None, name: str = ""
    ) -> Iterator[tuple[str, str, os.stat_result | None]]:
        """(name, path without links, what it leads to; None: nothing, or out) of each entry of a folder."""
        try:
            entries = self._share.scan(folder) if folder is not None else []
        except ShareNotFoundError:
            return
        except ShareError as error:
            if isinstance(error.__cause__, NotADirectoryError):
                return
            if closed is None or not isinstance(error.__cause__, PermissionError):
                raise
            closed.append(name or ".")
            return
        for entry in entries:
            path = f"{folder}/{entry.name}"
            if not entry.is_symlink():
                yield entry.name, path, entry.stat(follow_symlinks=False)
            elif (real := self.real(path)) is None:
                yield entry.name, "", None
            else:
                yield entry.name, real, self._share.look(real)

    def open(self, path: str) -> BinaryIO | None:
        """A file to read, through links inside of the bounds; None if there is none, or it leads out.

        Raises:
            ShareError: it can't be read.
        """
        real, folder = self.real(path), self._share.look(self._bounds)
        if real is None or folder is None:
            return None
        try:
            file = self._share.open(real)
        except ShareNotFoundError:
            return None
        except ShareError as error:
            if isinstance(error.__cause__, OddFileError):
                return None
            raise
        if is_foreign(os.fstat(file.fileno()), folder):
            file.close()
            return None
        return file


def is_foreign(status: os.stat_result, folder: os.stat_result) -> bool:
    """Whether a file is a hard link to a file of another user than the folder's, which its maker may not read."""
    return status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode) and status.st_uid != folder.st_uid


@contextlib.contextmanager
def as_file(file: BinaryIO, name: str) -> Iterator[Path]:
    """An open file as one of that name, for what wants a path: a link to this very descriptor, or a copy if need be."""
    with TemporaryDirectory(prefix="batchai-") as scratch:
        path, there = Path(scratch, name), f"/proc/{os.getpid()}/fd/{file.fileno()}"
        try:
            is_same = os.path.samestat(Path(there).stat(), os.fstat(file.fileno()))
        except OSError:
            is_same = False
        if is_same:
            path.symlink_to(there)
        else:
            with path.open("xb") as copy:
                shutil.copyfileobj(file, copy)
        yield path
