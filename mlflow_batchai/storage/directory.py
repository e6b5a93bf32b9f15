"""A share that is a directory: on this machine, or mounted here."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from mlflow_batchai.agent import permissions, protocol, safeopen
from mlflow_batchai.agent.share import mountfiles
from mlflow_batchai.errors import ShareError, ShareNotFoundError
from mlflow_batchai.storage.base import TEMPORARY, Entry, Readable, Source

FILE_BITS = 0o666
BLOCK = 1 << 20

Made = TypeVar("Made")


class DirectoryShare:
    """See ``Share`` for the promises. What it makes is as open to others as its root: nodes may be another user on it.

    No link below its root is followed by anything that it does (``agent.safeopen``): others may put one there.

    Args:
        root: an absolute path; made with the first thing that is put there, if it isn't there.

    Raises:
        ShareError: something else than a directory is there, or it can't be looked at.
    """

    at_once = 1

    def __init__(self, root: str | Path) -> None:
        self.root = self._base = Path(root).absolute()
        self._before = ""
        # A folder that isn't made anew elsewhere, and what lay at the base when it was last seen there.
        self._kept = "/"
        self._seen: tuple[int, int] | None = None
        try:
            if self.root.exists() and not self.root.is_dir():
                raise ShareError(f"{self.root} is no folder")
        except OSError as error:
            raise ShareError(f"the folder {self.root} can't be used: {error.strerror}") from error

    @classmethod
    def existing(cls, root: str | Path) -> DirectoryShare:
        """The share at a directory that has to be there already: an empty mount point must not become one.

        Raises:
            ShareError: it isn't.
        """
        if not Path(root).is_dir():
            raise ShareError(f"there is no folder {root} on this machine; mount the share there")
        return cls(root)

    def inside(self, path: str) -> DirectoryShare:
        """A folder of the share as a share of its own, which no link in place of that folder leads elsewhere.

        Raises:
            ShareError: there is no such folder.
        """
        found = DirectoryShare.existing(self.local(path))
        found._base, found._before = self._base, self._below("/".join(safeopen.parts_of(path)))
        return found

    @property
    def url(self) -> str:
        return self.root.as_uri()

    def local(self, path: str) -> Path:
        """Where a file is on this machine, for people and for other programs; others may have put a link there.

        Raises:
            ShareError: the path leads out of the share, or can't be one.
        """
        with self._errors(path):
            return self.root.joinpath(*safeopen.parts_of(path))

    def _below(self, path: str) -> str:
        """A path from the folder that was chosen here: the root, or that of the share that the root lies in."""
        return f"{self._before}/{path}" if self._before else path

    def real(self, path: str, bounds: str) -> str | None:
        """The path without links of what lies at a path; None: it lies outside of a folder of the share.

        It only says where to look: what is opened there is opened without following any link.
        """
        top = Path(os.path.realpath(self._base), self._before)
        try:
            found = Path(os.path.realpath(top / path.lstrip("/")))
            within = top.joinpath(*safeopen.parts_of(bounds))
        except (OSError, RecursionError, ValueError):
            return None
        return found.relative_to(top).as_posix() if found.is_relative_to(within) else None

    def open(self, path: str) -> BinaryIO:
        """A file to read, as it is now.

        Raises:
            ShareNotFoundError: it isn't there.
            ShareError: something else is, or it can't be read.
        """
        with self._errors(path):
            return safeopen.open_file(str(self._base), self._below(path))

    def scan(self, path: str) -> list[os.DirEntry[str]]:
        """Entries of a folder by name, links as links; errors as ``open``."""
        with self._errors(path), self._listed(path) as folder, os.scandir(folder) as found:
            entries = []
            for entry in found:
                # A name that is gone by now must not hide the others.
                with contextlib.suppress(FileNotFoundError):
                    entry.stat(follow_symlinks=False)  # which is kept, and can't be had later
                    entries.append(entry)
            return sorted(entries, key=lambda entry: entry.name)

    def look(self, path: str) -> os.stat_result | None:
        """Status of a path, a link as a link; None if nothing lies there."""
        with self._errors(path):
            return safeopen.look(str(self._base), self._below(path))

    def _listed(self, path: str) -> safeopen.Descriptor:
        return permissions.patiently(lambda: safeopen.open_folder(str(self._base), self._below(path)))

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        with self._errors(path):
            return mountfiles.read_fresh(str(self._base), self._below(path), start, -1 if length is None else length)

    def read_many(self, paths: Iterable[str], most: int = protocol.LONGEST_SEGMENT) -> Iterator[tuple[str, bytes]]:
        looked: set[str] = set()
        for path in paths:
            with self._errors(path):
                data = self._read_if_there(path, looked, most)
            if data is not None:
                yield path, data

    def _read_if_there(self, path: str, looked: set[str], most: int) -> bytes | None:
        """A file's content; ``looked``: folders that a mount was made to look at anew before, so that a miss there is true."""
        base, whole, folder = str(self._base), self._below(path), path.rpartition("/")[0]
        with contextlib.suppress(FileNotFoundError, safeopen.OddFolderError):
            return mountfiles.read_whole(base, whole, most, fresh=folder not in looked)
        looked.add(folder)
        return None

    def download(self, path: str, target: Path, progress: Callable[[int], None] | None = None) -> None:
        with self._errors(path):
            incoming = mountfiles.open_fresh(str(self._base), self._below(path))
        partial = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        try:
            with incoming:
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    with partial.open("xb") as outgoing:
                        while block := incoming.read(BLOCK):
                            outgoing.write(block)
                            if progress:
                                progress(len(block))
                    partial.replace(target)
                except BaseException:
                    partial.unlink(missing_ok=True)
                    raise
        except OSError as error:
            raise ShareError(f"share {self.root}: '{path}' can't be copied to '{target}': {error.strerror or error}") from error

    def write(self, path: str, data: bytes) -> None:
        self.send(path, io.BytesIO(data), len(data))

    def claim(self, path: str) -> bool:
        with self._errors(path):
            return self._making(path, lambda *how: safeopen.claim(str(self._base), self._below(path), *how))

    def made(self, path: str) -> Path:
        """A directory of the share, made with its parents if it isn't there. Raises ShareError."""
        with self._errors(path), self._make(path):
            return self.local(path)

    def _make(self, path: str) -> safeopen.Descriptor:
        return self._making(path, lambda *how: safeopen.make_folders(str(self._base), self._below(path), *how))

    def _making(self, path: str, step: Callable[..., Made]) -> Made:
        """Do something that makes folders; ``step``: takes ``made`` and ``within`` (``safeopen.make_folders``)."""
        if f"{path}/".startswith(f"{self._kept}/"):
            root = mountfiles.which(str(self._base))
            try:
                made = step(self._open_up, self._below(self._kept))
            except FileNotFoundError as error:
                if mountfiles.which(str(self._base)) != self._seen:
                    raise ShareError(f"the share isn't mounted at {self._base} any more; mount it there again") from error
            else:
                self._seen = root
                return made
        if not self._base.is_dir():
            self._base.mkdir(parents=True, exist_ok=True)
        return step(self._open_up)

    def _open_up(self, made: int, bits: int = 0o7777 & ~stat.S_ISVTX) -> None:
        """Give what was made those of the bits that the root's mode has, whatever our umask is."""
        wanted = stat.S_IMODE(self.root.stat().st_mode) & bits
        # A mount that knows no such thing says so; then it is its mount options that decide.
        with contextlib.suppress(OSError):
            if wanted & ~stat.S_IMODE(os.fstat(made).st_mode):
                os.fchmod(made, wanted)

    def list(self, path: str) -> list[Entry]:
        try:
            found = [entry for entry in self.scan(path) if not entry.name.startswith(TEMPORARY)]
        except (ShareNotFoundError, _NoDirectoryError):
            return []
        folders = {entry.name for entry in found if entry.is_dir(follow_symlinks=False)}
        stats = {entry.name: entry.stat(follow_symlinks=False) for entry in found}
        return [
            Entry(name, 0 if name in folders else status.st_size, name in folders, status.st_mtime)
            for name, status in stats.items()
        ]

    def delete(self, path: str) -> None:
        with contextlib.suppress(ShareNotFoundError), self._errors(path):
            safeopen.remove(str(self._base), self._below(path))

    def touch(self, path: str) -> bool:
        with self._errors(path):
            *above, name = safeopen.parts_of(self._below(path))
            try:
                with safeopen.open_folder(str(self._base), "/".join(above)) as folder:
                    os.utime(name, dir_fd=folder, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                return False
        return True

    def keeping(self, folder: str) -> DirectoryShare:
        if folder == self._kept:
            return self
        found = copy.copy(self)
        with self._errors(folder):
            found._kept, found._seen = folder, mountfiles.which(str(self._base))
        return found

    def send(self, path: str, source: Readable, size: int) -> None:
        temporary, whole = f"{TEMPORARY}{uuid.uuid4().hex}", Source(path, source, size)
        with self._errors(path):
            *above, name = safeopen.parts_of(path)
            with self._make("/".join(above)) as folder:

                def opener(new: str, flags: int) -> int:
                    return os.open(new, flags | os.O_NOFOLLOW, FILE_BITS, dir_fd=folder)

                try:
                    with open(temporary, "xb", opener=opener) as file:
                        while block := whole.read(BLOCK):
                            file.write(block)
                        file.flush()
                        self._open_up(file.fileno(), FILE_BITS)
                    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                except BaseException:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(temporary, dir_fd=folder)
                    raise

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise ShareNotFoundError(f"there is no '{path}' on the share {self.root}") from error
        except NotADirectoryError as error:
            raise _NoDirectoryError(f"share {self.root}: '{path}': {error.strerror}") from error
        except OSError as error:
            raise ShareError(f"share {self.root}: '{path}': {error.strerror or error}") from error


class _NoDirectoryError(ShareError):
    """A file lies where a directory should be."""
