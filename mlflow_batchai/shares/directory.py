"""A share that is a directory: on this machine, or one that is mounted here."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from mlflow_batchai.errors import ShareError, ShareNotFoundError
from mlflow_batchai.node.mountfiles import freshen, read_fresh
from mlflow_batchai.shares.base import Entry

TEMPORARY = ".new-"
FILE_BITS = 0o666
BLOCK = 1 << 20
# How often a folder that is being removed may get something new.
REFILLED = 5


class DirectoryShare:
    """See ``Share`` for the promises. What it makes is as open to others as its root: nodes may be another user on it.

    Args:
        root: an absolute path; made with the first thing that is put there, if it isn't there.

    Raises:
        ShareError: something else than a directory is there, or it can't be looked at.
    """

    at_once = 1

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
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

    @property
    def url(self) -> str:
        return self.root.as_uri()

    def local(self, path: str) -> Path:
        """The file itself, for tools that want a path (uploading artifacts without a copy).

        Raises:
            ShareError: the path leads out of the share, or can't be one.
        """
        parts = path.split("/")
        if ".." in parts or "\0" in path:
            raise ShareError(f"share {self.root}: {path!r} is no path on it")
        return self.root.joinpath(*parts)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        with self._errors(path):
            return read_fresh(str(self.local(path)), start, -1 if length is None else length)

    def read_many(self, paths: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        looked: set[str] = set()
        for path in paths:
            with self._errors(path):
                data = self._read_if_there(path, looked)
            if data is not None:
                yield path, data

    def _read_if_there(self, path: str, looked: set[str]) -> bytes | None:
        """A file's content; ``looked``: folders that a mount was made to look at anew before, so that a miss there is true."""
        target, folder = self.local(path), path.rpartition("/")[0]
        try:
            return target.read_bytes()
        except FileNotFoundError:
            if folder in looked:
                return None
        looked.add(folder)
        freshen(str(target))
        with contextlib.suppress(FileNotFoundError):
            return target.read_bytes()
        return None

    def download(self, path: str, target: Path, progress: Callable[[int], None] | None = None) -> None:
        source = self.local(path)
        with self._errors(path):
            if not source.exists():
                freshen(str(source))
            incoming = source.open("rb")
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
        with self.open_write(path) as file:
            file.write(data)

    def claim(self, path: str) -> bool:
        target = self.local(path)
        with self._errors(path):
            self._make(target.parent)
            try:
                target.mkdir()
            except FileExistsError:
                return False
            self._open_up(target)
            return True

    def made(self, path: str) -> Path:
        """A directory of the share, made with its parents if it isn't there. Raises ShareError."""
        target = self.local(path)
        with self._errors(path):
            self._make(target)
        return target

    def _make(self, folder: Path) -> None:
        """A directory with its parents."""
        if folder.is_dir():
            return
        if folder == self.root:
            folder.mkdir(parents=True, exist_ok=True)
            return
        self._make(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            self._open_up(folder)

    def _open_up(self, made: Path, bits: int = 0o7777 & ~stat.S_ISVTX) -> None:
        """Give what was made those of the bits that the root's mode has, whatever our umask is."""
        wanted = stat.S_IMODE(self.root.stat().st_mode) & bits
        # A mount that knows no such thing says so; then it is its mount options that decide.
        with contextlib.suppress(OSError):
            if wanted & ~stat.S_IMODE(made.stat().st_mode):
                made.chmod(wanted)

    def list(self, path: str) -> list[Entry]:
        entries = []
        try:
            with self._errors(path), os.scandir(self.local(path)) as found:
                for entry in found:
                    # A name that is gone by now, or a link to nothing, must not hide the others.
                    with contextlib.suppress(FileNotFoundError):
                        if not entry.name.startswith(TEMPORARY):
                            is_directory, status = entry.is_dir(), entry.stat()
                            entries.append(
                                Entry(entry.name, 0 if is_directory else status.st_size, is_directory, status.st_mtime)
                            )
        except (ShareNotFoundError, _NoDirectoryError):
            return []
        return sorted(entries)

    def delete(self, path: str) -> None:
        target = self.local(path)
        with contextlib.suppress(ShareNotFoundError), self._errors(path):
            if target.is_dir() and not target.is_symlink():
                self._remove_tree(target)
            else:
                target.unlink()

    def _remove_tree(self, folder: Path) -> None:
        """Remove a folder though others remove the same, and something is put into it meanwhile, a few times."""
        filled = 0
        while folder.exists():
            try:
                shutil.rmtree(folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                filled += 1
                if error.errno != errno.ENOTEMPTY or filled > REFILLED:
                    raise

    @contextlib.contextmanager
    def open_write(self, path: str, size: int | None = None) -> Iterator[BinaryIO]:
        target = self.local(path)
        temporary = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        with self._errors(path):
            self._make(target.parent)
            try:
                with temporary.open("xb") as file:
                    yield file
                self._open_up(temporary, FILE_BITS)
                temporary.replace(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
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
    """What should be a directory is a file."""
