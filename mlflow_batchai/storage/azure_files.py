"""Azure file shares by Microsoft's SDK: without a mount, with few requests.

Raises ImportError where the SDK isn't installed: import it where it is used (``opening.needs_sdk``).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar, cast

from azure.core.exceptions import HttpResponseError, ResourceModifiedError, ServiceResponseError
from azure.storage.fileshare import ContentSettings

from mlflow_batchai.agent.azure_errors import moment
from mlflow_batchai.agent.protocol import LONGEST_SEGMENT
from mlflow_batchai.errors import ShareError, ShareMissingError, ShareNotFoundError
from mlflow_batchai.storage import credentials
from mlflow_batchai.storage.azure_client import FIRST_PAUSE_SECONDS, Again, service_client
from mlflow_batchai.storage.azure_errors import ExistsError, code_of, of_network, translated
from mlflow_batchai.storage.base import TEMPORARY, Entry, Readable, ShareEntry, Source
from mlflow_batchai.storage.location import AzureLocation

Item = TypeVar("Item")
Result = TypeVar("Result")

# Requests in flight for one caller; of these for one file that is read: memory holds each piece twice for a moment.
AT_ONCE, READ_AT_ONCE = 16, 8
# What one request writes, by the service's limits, and what one reads.
PIECE = 4 << 20
# How often a piece is asked for whose answer was cut, and how often a file is read anew that was replaced meanwhile.
ATTEMPTS, READS = 6, 8
# rclone 1.75 leaves an empty folder of this name (a full-width dot) at the root of a share that it has written to.
STRAY = "\uff0e"
# https://learn.microsoft.com/rest/api/storageservices/naming-and-referencing-shares--directories--files--and-metadata
NOT_IN_NAMES = frozenset('"\\:|<>*?') | {chr(code) for code in (*range(32), 127)}
# Endpoints that were seen to keep what a file is made with.
_proven: set[str] = set()
# A request that the service does not know in this form.
NOT_KNOWN = ("UnsupportedHeader", "ContentLengthMustBeZero", "InvalidHeaderValue", "InvalidInput", "RequestBodyTooLarge")


class Piece(NamedTuple):
    """Result of one ranged read.

    Attributes:
        etag: which content of the file they are of.
        size: bytes of the whole file.
    """

    data: bytes
    etag: str
    size: int


class _ChangedError(Exception):
    """The file was replaced while it was read."""


class AzureFilesShare:
    """See ``Share`` for the promises. Names are those that Azure Files takes: without ``" \\ : | < > * ?``, case disregarded.

    Args:
        location: the share, or a folder of one, which is made when something is first written there.

    Raises:
        ShareError: its key, SAS or login can't be used.
    """

    at_once = AT_ONCE

    def __init__(self, location: AzureLocation) -> None:
        self.location = location
        self._credential = credentials.at(location.endpoint, location.account, share=location.share)
        with self._errors(""):
            self._share = service_client(location, self._credential).get_share_client(location.share)
        # Whether a new file may be sent with its content (x-ms-version 2026-10-06 and later), as far as is known.
        self._takes_content = True

    @property
    def url(self) -> str:
        return self.location.url

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        """For pieces of one file and for small reads: nothing that runs in it waits for something else that does."""
        return ThreadPoolExecutor(AT_ONCE, "batchai-share")

    def _full(self, path: str) -> str:
        parts = [part for part in path.split("/") if part]
        if ".." in parts or "." in parts:
            raise ShareError(f"share {self.url}: {path!r} is no path on it")
        # Undecoded bytes of a file system are no text.
        if not NOT_IN_NAMES.isdisjoint(path) or any("\ud800" <= letter <= "\udfff" for letter in path):
            raise ShareError(f"share {self.url}: {path!r} can't be a path on an Azure file share; rename it")
        return "/".join([*self.location.folder.split("/"), *parts] if self.location.folder else parts)

    def _errors(self, full: str) -> contextlib.AbstractContextManager[None]:
        return translated(self.location._replace(folder=""), self._credential, full)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        full = self._full(path)
        if length == 0:
            self._get(full, 0, 1)
            return b""
        for _ in range(READS):
            first = self._get(full, start, PIECE if length is None else min(length, PIECE))
            end = first.size if length is None else min(first.size, start + length)
            with contextlib.suppress(_ChangedError):
                return b"".join((first.data, *self._rest(full, first, start + len(first.data), end, map)))
        raise self._replaced(path)

    def read_many(self, paths: Iterable[str], most: int = LONGEST_SEGMENT) -> Iterator[tuple[str, bytes]]:
        for path, data in self._ahead(lambda path: (path, self._read_if_there(path, most)), paths, AT_ONCE):
            if data is not None:
                yield path, data

    def _read_if_there(self, path: str, most: int) -> bytes | None:
        try:
            data = self.read(path, 0, most + 1)
        except ShareNotFoundError:
            return None
        return data if len(data) <= most else b""

    def download(self, path: str, target: Path, progress: Callable[[int], None] | None = None) -> None:
        # What there was before a failure lies beside the target, named by its content's ETag: the next call goes on there.
        full, tell = self._full(path), progress or (lambda count: None)

        def ahead(fetch: Callable[[int], Piece], positions: Iterable[int]) -> Iterator[Piece]:
            return self._ahead(fetch, positions, READ_AT_ONCE)

        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            for _ in range(READS):
                first = self._get(full, 0, PIECE)
                digest = hashlib.sha256(f"{target.name}\0{first.etag}".encode("utf-8", "surrogateescape")).hexdigest()
                partial = target.with_name(f".{digest[:32]}.part")
                try:
                    with partial.open("ab") as file:
                        have = file.tell()
                        if have < len(first.data):
                            file.truncate(0)
                            have = file.write(first.data)
                        tell(have)
                        # In their order: the file's length is how far it has come even if we are killed.
                        for data in self._rest(full, first, have, first.size, ahead):
                            file.write(data)
                            tell(len(data))
                except _ChangedError:
                    partial.unlink(missing_ok=True)
                    continue
                partial.replace(target)
                return
        except OSError as error:
            raise ShareError(f"'{target}' can't be written: {error.strerror or error}") from error
        raise self._replaced(path)

    def _replaced(self, path: str) -> ShareError:
        return ShareError(f"share {self.url}: '{path}' was replaced again and again while it was read; try again")

    def _rest(
        self,
        full: str,
        first: Piece,
        start: int,
        end: int,
        each: Callable[[Callable[[int], Piece], Iterable[int]], Iterator[Piece]],
    ) -> Iterator[bytes]:
        """Content between two positions of the version that ``first`` is of; raises _ChangedError if it has changed.

        Args:
            each: calls a function for each of several, as ``map``.
        """
        positions = range(start, end, PIECE)
        pieces = each(lambda position: self._get(full, position, min(PIECE, end - position)), positions)
        for position, piece in zip(positions, pieces, strict=True):
            if piece.etag != first.etag or len(piece.data) != min(PIECE, end - position):
                raise _ChangedError
            yield piece.data

    def _ahead(self, act: Callable[[Item], Result], items: Iterable[Item], most: int) -> Iterator[Result]:
        """Results of a function for each item, in order, computed so many ahead."""
        running: deque[Future[Result]] = deque()
        try:
            for item in items:
                running.append(self._pool.submit(act, item))
                if len(running) >= most:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()

    def _get(self, full: str, start: int, length: int) -> Piece:
        """Bytes of a file; none where it ends before ``start``. An answer that is cut is asked for again: the SDK doesn't."""
        for attempt in range(ATTEMPTS):
            with self._errors(full):
                client = self._share.get_file_client(full)
                try:
                    found = client.download_file(offset=start, length=length)
                    data = b"".join(found.chunks())
                except HttpResponseError as error:
                    if error.status_code == 416:
                        # Nothing lies there: the file is shorter, or empty.
                        known = client.get_file_properties()
                        return Piece(b"", known.etag, known.size)
                    if error.status_code not in (200, 206) or isinstance(error, ResourceModifiedError):
                        raise
                else:
                    size = int(str(found.properties.content_range).rpartition("/")[2])
                    return Piece(data, found.properties.etag, size)
            time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        raise of_network(self.location._replace(folder=""), full, ServiceResponseError("cut"))

    def list(self, path: str) -> list[Entry]:
        full = self._full(path)
        try:
            with self._errors(full):
                found = []
                for one in self._share.get_directory_client(full).list_directories_and_files(include=["timestamps"]):
                    # Its Last-Modified changes with its attributes, too.
                    written = moment(str(one.last_write_time))
                    size = int(getattr(one, "size", None) or 0)
                    found.append(Entry(one.name, size, bool(one.is_directory), written.timestamp() if written else None))
        except ShareNotFoundError:
            return []
        return sorted(entry for entry in found if not entry.name.startswith(TEMPORARY) and entry.name != STRAY)

    def write(self, path: str, data: bytes) -> None:
        self.send(path, io.BytesIO(data), len(data))

    def send(self, path: str, source: Readable, size: int) -> None:
        full, whole = self._full(path), Source(path, source, size)
        if size <= PIECE and self._takes_content:
            data = whole.read_all()
            self._takes_content = self._in_folder(full, lambda: self._create(full, data))
            if self._takes_content:
                return
            whole = Source(path, io.BytesIO(data), size)
        # Ranges of a file of another name in the same folder, as the SDK sends them; then it gets its own.
        folder = full.rpartition("/")[0]
        temporary = f"{folder}/{TEMPORARY}{uuid.uuid4().hex}" if folder else f"{TEMPORARY}{uuid.uuid4().hex}"
        try:
            self._in_folder(temporary, lambda: self._upload(temporary, whole, size))
            whole.read(1)  # is there more of it?
            self._rename(temporary, full, size)
        except BaseException:
            with contextlib.suppress(ShareError):
                self._delete_file(temporary)
            raise

    def _create(self, full: str, data: bytes) -> bool:
        """Make a file with all of its content by one request; False if the service doesn't know such a request."""
        with self._errors(full):
            client = self._share.get_file_client(full)
            if data.count(0) == len(data):  # as any new file
                client.create_file(len(data))
                return True
            try:
                client.create_file(len(data), data=data)
            except HttpResponseError as error:
                if code_of(error) in NOT_KNOWN or error.status_code in (411, 413, 501):
                    return False
                raise
        if self.location.endpoint not in _proven:
            # A service or a proxy that passes over the content makes a file of NULs: the first one is looked at.
            if not any(self._get(full, 0, len(data)).data):
                return False
            _proven.add(self.location.endpoint)
        return True

    def _upload(self, full: str, source: Source, size: int) -> None:
        with self._errors(full):
            self._share.get_file_client(full).upload_file(cast(BinaryIO, source), length=size, max_concurrency=AT_ONCE)

    def _rename(self, full: str, target: str, size: int) -> None:
        again = Again()
        try:
            with self._errors(target):
                self._share.get_file_client(full).rename_file(target, overwrite=True, retry_hook=again)
        except ShareNotFoundError:
            # An answer that was lost: the first request did it, and the second found no source any more.
            if not again.happened or self._get(target, 0, 1).size != size:
                raise

    def claim(self, path: str) -> bool:
        full = self._full(path)
        return self._in_folder(full, lambda: self._make_directory(full))

    def _make_directory(self, full: str) -> bool:
        """Make a directory; False if something of that name was there."""
        again, mark = Again(), uuid.uuid4().hex
        client = self._share.get_directory_client(full)
        try:
            with self._errors(full):
                client.create_directory(metadata={"batchai": mark}, retry_hook=again)
        except ExistsError:
            if not again.happened:
                return False
            # An answer may have been lost: then it is our own that is there already.
            with self._errors(full):
                found: dict[str, str] = client.get_directory_properties().metadata or {}
            return mark in found.values()
        return True

    def _in_folder(self, full: str, request: Callable[[], Result]) -> Result:
        """Do what needs the path's folder, which is made if it isn't there."""
        try:
            return request()
        except ShareNotFoundError:
            folder = full.rpartition("/")[0]
            if not folder:
                raise
        self._make(folder)
        try:
            return request()
        except ShareNotFoundError:
            raise ShareError(f"share {self.location.root}: '{full}' can't be written: '{folder}' is a file") from None

    def _make(self, folder: str) -> None:
        try:
            self._make_directory(folder)
        except ShareNotFoundError:
            parent = folder.rpartition("/")[0]
            if not parent:
                raise
            self._make(parent)
            with contextlib.suppress(ShareNotFoundError):
                self._make_directory(folder)

    def delete(self, path: str) -> None:
        full = self._full(path)
        if self._delete_file(full):
            return
        with contextlib.suppress(ShareNotFoundError):
            if not self._delete_directory(full):
                self._empty(full)
                self._delete_directory(full)

    def _empty(self, full: str) -> None:
        folders = []
        running = []
        with self._errors(full):
            for entry in self._share.get_directory_client(full).list_directories_and_files():
                if entry.is_directory:
                    folders.append(f"{full}/{entry.name}")
                else:
                    running.append(self._pool.submit(self._delete_file, f"{full}/{entry.name}"))
        for future in running:
            future.result()
        for folder in folders:
            self._empty(folder)
            with contextlib.suppress(ShareNotFoundError):
                self._delete_directory(folder)

    def _delete_file(self, full: str) -> bool:
        """Remove a file; False if there is none, or a directory of that name."""
        try:
            with self._errors(full):
                self._share.get_file_client(full).delete_file()
        except (ShareNotFoundError, ExistsError):
            return False
        return True

    def _delete_directory(self, full: str) -> bool:
        """Remove an empty directory; False if it isn't empty."""
        with self._errors(full):
            try:
                self._share.get_directory_client(full).delete_directory()
            except HttpResponseError as error:
                if code_of(error) != "DirectoryNotEmpty":
                    raise
                return False
        return True

    def touch(self, path: str) -> bool:
        full, now = self._full(path), datetime.now(timezone.utc)
        try:
            with self._errors(full):
                self._share.get_file_client(full).set_http_headers(ContentSettings(), file_last_write_time=now)
        except ShareNotFoundError:
            return False
        return True

    def keeping(self, folder: str) -> AzureFilesShare:
        return self


class AzureShares:
    """The file shares of a storage account. Raises ShareError: its key, SAS or login can't be used."""

    def __init__(self, account: str, endpoint: str) -> None:
        self._location = AzureLocation(endpoint, account, "")
        self._credential = credentials.at(endpoint, account)
        with self._errors(""):
            self._client = service_client(self._location, self._credential)

    def _errors(self, share: str) -> contextlib.AbstractContextManager[None]:
        return translated(self._location._replace(share=share), self._credential, "")

    def list(self) -> list[ShareEntry]:
        with self._errors(""):
            found = self._client.list_shares()
            return sorted(ShareEntry(share.name, share.quota, share.last_modified.timestamp()) for share in found)

    def create(self, share: str, quota: int | None) -> bool:
        """Make one; False if it was there."""
        again = Again()
        try:
            with self._errors(share):
                self._client.create_share(share, quota=quota, retry_hook=again)
        except ExistsError:
            # An answer may have been lost: then it is our own that is there already.
            return again.happened
        return True

    def delete(self, share: str) -> None:
        """Remove one with all that is on it; ShareMissingError if there is none."""
        again = Again()
        try:
            with self._errors(share):
                self._client.delete_share(share, retry_hook=again)
        except ShareMissingError:
            if not again.happened:
                raise

    def open(self, share: str) -> AzureFilesShare:
        """One of them; ShareMissingError when it is first used, if there is none."""
        return AzureFilesShare(self._location._replace(share=share))
