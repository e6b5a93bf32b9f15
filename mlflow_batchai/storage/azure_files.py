"""An Azure file share over REST: no mount anywhere, and few requests."""

from __future__ import annotations

import contextlib
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

from mlflow_batchai.agent.protocol import LONGEST_SEGMENT
from mlflow_batchai.errors import ShareError, ShareNotFoundError
from mlflow_batchai.storage import credentials
from mlflow_batchai.storage.base import Entry
from mlflow_batchai.storage.location import AzureLocation
from mlflow_batchai.storage.transfer import AT_ONCE, PIECE, READS, ChangedError, UploadStream, download

if TYPE_CHECKING:
    from mlflow_batchai.storage.azure_sdk import Files

Result = TypeVar("Result")

TEMPORARY = ".new-"
# rclone 1.75 leaves an empty folder of this name (a full-width dot) at the root of a share that it has written to.
STRAY = "\uff0e"
# https://learn.microsoft.com/rest/api/storageservices/naming-and-referencing-shares--directories--files--and-metadata
NOT_IN_NAMES = frozenset('"\\:|<>*?') | {chr(code) for code in (*range(32), 127)}


class AzureFilesShare:
    """See ``Share`` for the promises. Names are those that Azure Files takes: without ``" \\ : | < > * ?``, case disregarded.

    Args:
        location: the share, or a folder of one, which is made when something is first written there.

    Raises:
        ShareError: what opens it can't be used, or the SDK isn't installed.
    """

    at_once = AT_ONCE

    def __init__(self, location: AzureLocation) -> None:
        self.location = location
        try:
            from mlflow_batchai.storage.azure_sdk import Files
        except ImportError as error:
            raise ShareError(
                f"Azure file shares need Microsoft's SDK ({error.name} can't be imported): pip install 'mlflow-batchai[azure]'"
            ) from error
        self._files: Files = Files(location, credentials.at(location.endpoint, location.account))
        # Folders that this process knows to be there.
        self._made: set[str] = set()

    @property
    def url(self) -> str:
        return self.location.url

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        """For ranges of one file and for small reads: nothing that runs in it waits for something else that does."""
        return ThreadPoolExecutor(AT_ONCE, "batchai-share")

    def _full(self, path: str) -> str:
        """The path from the share's root."""
        parts = [part for part in path.split("/") if part]
        if ".." in parts or "." in parts:
            raise ShareError(f"share {self.url}: {path!r} is no path on it")
        if not NOT_IN_NAMES.isdisjoint(path) or not _encodes(path):
            raise ShareError(f"share {self.url}: {path!r} can't be a path on an Azure file share; rename it")
        return "/".join([*self.location.folder.split("/"), *parts] if self.location.folder else parts)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        full = self._full(path)
        if length == 0:
            self._files.size(full)
            return b""
        for _ in range(READS):
            first = self._files.get(full, start, PIECE if length is None else min(length, PIECE))
            end = first.size if length is None else min(first.size, start + length)
            pieces = [first.data]
            position = start + len(first.data)
            while position < end and first.data:
                piece = self._files.get(full, position, min(PIECE, end - position))
                if piece.etag != first.etag or not piece.data:
                    break
                pieces.append(piece.data)
                position += len(piece.data)
            else:
                return b"".join(pieces)
        raise ShareError(f"share {self.url}: '{path}' was replaced again and again while it was read; try again")

    def read_many(self, paths: Iterable[str], most: int = LONGEST_SEGMENT) -> Iterator[tuple[str, bytes]]:
        waiting: deque[tuple[str, Future[bytes | None]]] = deque()
        try:
            for path in paths:
                waiting.append((path, self._pool.submit(self._read_if_there, path, most)))
                if len(waiting) >= AT_ONCE:
                    yield from _found(waiting.popleft())
            while waiting:
                yield from _found(waiting.popleft())
        finally:
            for _, future in waiting:
                future.cancel()

    def _read_if_there(self, path: str, most: int) -> bytes | None:
        try:
            data = self.read(path, 0, most + 1)
        except ShareNotFoundError:
            return None
        return data if len(data) <= most else b""

    def download(self, path: str, target: Path, progress: Callable[[int], None] | None = None) -> None:
        full = self._full(path)
        try:
            download(lambda start: self._files.get(full, start, PIECE), target, self._pool, progress)
        except ChangedError:
            raise ShareError(f"share {self.url}: '{path}' was replaced again and again while it was read; try again") from None
        except OSError as error:
            raise ShareError(f"'{target}' can't be written: {error.strerror or error}") from error

    def write(self, path: str, data: bytes) -> None:
        with self.open_write(path) as file:
            file.write(data)

    def claim(self, path: str) -> bool:
        full, mark = self._full(path), uuid.uuid4().hex
        return self._in_folder(full, lambda: self._files.make_directory(full, mark))

    def list(self, path: str) -> list[Entry]:
        try:
            found = self._files.list(self._full(path))
        except ShareNotFoundError:
            return []
        return sorted(entry for entry in found if not entry.name.startswith(TEMPORARY) and entry.name != STRAY)

    def delete(self, path: str) -> None:
        full = self._full(path)
        if self._files.delete_file(full):
            return
        self._forget(full)
        with contextlib.suppress(ShareNotFoundError):
            if not self._files.delete_directory(full):
                self._empty(full)
                self._files.delete_directory(full)

    def _empty(self, full: str) -> None:
        """Remove all that lies in a directory."""
        folders = []
        running = []
        for entry in self._files.list(full):
            if entry.is_directory:
                folders.append(f"{full}/{entry.name}")
            else:
                running.append(self._pool.submit(self._files.delete_file, f"{full}/{entry.name}"))
        for future in running:
            future.result()
        for folder in folders:
            self._empty(folder)
            with contextlib.suppress(ShareNotFoundError):
                self._files.delete_directory(folder)

    def keeping(self, folder: str) -> AzureFilesShare:
        return self

    @contextlib.contextmanager
    def open_write(self, path: str, size: int | None = None) -> Iterator[BinaryIO]:
        full = self._full(path)
        stream = UploadStream(self._files, full, f"{TEMPORARY}{uuid.uuid4().hex}", self._in_folder, self._pool, size)
        try:
            yield cast(BinaryIO, stream)
            stream.finish()
        except BaseException:
            stream.abandon()
            raise

    def _in_folder(self, full: str, request: Callable[[], Result]) -> Result:
        """Do what needs the path's folder, which is made if it isn't there."""
        try:
            return request()
        except ShareNotFoundError:
            folder = full.rpartition("/")[0]
            if not folder:
                raise
        self._forget(folder)
        self._make(folder)
        try:
            return request()
        except ShareNotFoundError:
            raise ShareError(f"share {self.location.root}: '{full}' can't be written: '{folder}' is a file") from None

    def _make(self, folder: str) -> None:
        """A directory with its parents."""
        if not folder or folder in self._made:
            return
        mark = uuid.uuid4().hex
        try:
            self._files.make_directory(folder, mark)
        except ShareNotFoundError:
            parent = folder.rpartition("/")[0]
            if not parent:
                raise
            self._make(parent)
            with contextlib.suppress(ShareNotFoundError):
                self._files.make_directory(folder, mark)
        self._made.add(folder)

    def _forget(self, folder: str) -> None:
        """Someone has removed a folder, or one above or below it."""
        self._made = {known for known in self._made.copy() if not _related(known, folder)}


def _found(read: tuple[str, Future[bytes | None]]) -> Iterator[tuple[str, bytes]]:
    path, future = read
    data = future.result()
    if data is not None:
        yield path, data


def _encodes(path: str) -> bool:
    """Whether a path is text, and no undecoded bytes of a file system."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _related(one: str, other: str) -> bool:
    """Whether two paths are the same, or one lies in the other."""
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")
