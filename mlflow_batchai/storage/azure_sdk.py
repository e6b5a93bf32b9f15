"""One Azure file share by Microsoft's SDK: the only module that knows it. Requests as methods, errors as ShareErrors.

Raises ImportError where the SDK isn't installed: import it where it is used (``azure_files``).
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any, BinaryIO, cast

from azure.core.exceptions import HttpResponseError, ResourceModifiedError, ServiceResponseError

from mlflow_batchai.errors import ShareNotFoundError
from mlflow_batchai.storage import azure_errors
from mlflow_batchai.storage.azure_answers import AnsweredError, ExistsError, translated
from mlflow_batchai.storage.azure_client import FIRST_PAUSE_SECONDS, Again, share_client
from mlflow_batchai.storage.base import Entry
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.storage.location import AzureLocation
from mlflow_batchai.storage.transfer import NotTakenError, Piece

# How often a download is begun anew whose body was cut, or whose file changed meanwhile.
ATTEMPTS = 6


_proven: set[str] = set()


class Files:
    """One share. Paths are relative to its root; every method raises ShareError (or ShareNotFoundError) and nothing else.

    Args:
        location: its folder plays no part.
        credential: what opens it.

    Attributes:
        takes_content: whether ``create`` takes data, as far as is known.
    """

    def __init__(self, location: AzureLocation, credential: Credential) -> None:
        self.location = location._replace(folder="")
        self.takes_content = True
        self._credential = credential
        with self._errors(""):
            self._share = share_client(self.location, credential)

    def get(self, path: str, start: int, length: int) -> Piece:
        """Bytes of a file; none where it ends before ``start``."""
        for attempt in range(ATTEMPTS):
            try:
                with self._errors(path):
                    return self._get(path, start, length)
            except _InterruptedError:
                time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        raise azure_errors.of_network(self.location, path, ServiceResponseError("cut"))

    def _get(self, path: str, start: int, length: int) -> Piece:
        client = self._share.get_file_client(path)
        try:
            found = client.download_file(offset=start, length=length)
            taken = _Taken()
            found.readinto(cast(BinaryIO, taken))
        except HttpResponseError as error:
            if error.status_code == 416:
                # Nothing lies there: the file is shorter, or empty.
                known = client.get_file_properties()
                return Piece(b"", known.etag, known.size)
            if error.status_code in (200, 206) and not isinstance(error, ResourceModifiedError):
                raise _InterruptedError from None
            raise
        return Piece(b"".join(taken.parts), found.properties.etag, int(str(found.properties.content_range).rpartition("/")[2]))

    def size(self, path: str) -> int:
        """Bytes of a file."""
        with self._errors(path):
            return int(self._share.get_file_client(path).get_file_properties().size)

    def create(self, path: str, size: int, data: bytes | None = None) -> None:
        """Make a file of NULs, or with all of its content, in place of one that was there.

        Raises:
            NotTakenError: this service takes no content with that request (x-ms-version 2026-10-06 and later do).
        """
        try:
            with self._errors(path):
                if not data or data.count(0) == len(data):
                    self._share.get_file_client(path).create_file(size)
                    return
                self._share.get_file_client(path).create_file(size, data=data)
        except AnsweredError as error:
            if data and (error.answer.status in (411, 413, 501) or error.answer.code in azure_errors.NOT_KNOWN):
                self.takes_content = False
                raise NotTakenError from None
            raise
        if self.location.endpoint not in _proven:
            # A service that passes over the content makes a file of NULs: the first one is looked at.
            if not any(self.get(path, 0, len(data)).data):
                self.takes_content = False
                raise NotTakenError
            _proven.add(self.location.endpoint)

    def put(self, path: str, start: int, data: bytes) -> None:
        """Write a range of a file that is long enough."""
        with self._errors(path):
            self._share.get_file_client(path).upload_range(data, start, len(data))

    def resize(self, path: str, size: int) -> None:
        """Give a file another length."""
        with self._errors(path):
            self._share.get_file_client(path).resize_file(size)

    def rename(self, path: str, target: str, size: int) -> None:
        """Move a file of that size, in place of one that was there."""
        again = Again()
        try:
            with self._errors(target):
                self._share.get_file_client(path).rename_file(target, overwrite=True, retry_hook=again)
        except ShareNotFoundError:
            # An answer that was lost: the first request did it, and the second found no source any more.
            if not again.happened or self.size(target) != size:
                raise

    def delete_file(self, path: str) -> bool:
        """Remove a file; False if there is none, or a directory of that name."""
        try:
            with self._errors(path):
                self._share.get_file_client(path).delete_file()
        except (ShareNotFoundError, ExistsError):
            return False
        return True

    def delete_directory(self, path: str) -> bool:
        """Remove an empty directory; False if it isn't empty."""
        try:
            with self._errors(path):
                self._share.get_directory_client(path).delete_directory()
        except AnsweredError as error:
            if error.answer.code != "DirectoryNotEmpty":
                raise
            return False
        return True

    def make_directory(self, path: str, mark: str) -> bool:
        """Make a directory; False if something of that name was there. ``mark``: ASCII text that no other caller gives."""
        again = Again()
        client = self._share.get_directory_client(path)
        try:
            with self._errors(path):
                client.create_directory(metadata={"batchai": mark}, retry_hook=again)
        except ExistsError:
            if not again.happened:
                return False
            # An answer may have been lost: then it is our own that is there already.
            with self._errors(path):
                found: dict[str, str] = client.get_directory_properties().metadata or {}
            return mark in found.values()
        return True

    def list(self, path: str) -> list[Entry]:
        """What lies in a directory, in the service's own order."""
        with self._errors(path):
            return [
                Entry(found.name, int(getattr(found, "size", None) or 0), bool(found.is_directory), _modified(found))
                for found in self._share.get_directory_client(path).list_directories_and_files(include=["timestamps"])
            ]

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        # Texts of these errors may hold the whole address with a SAS: none is shown, and none stays as a cause.
        with translated(self.location, self._credential, path):
            yield


def _modified(found: Any) -> float | None:
    """When an entry of a listing was last written; its Last-Modified changes with its attributes, too."""
    text: str = found.last_write_time or ""
    try:
        # Azure has seven digits after the point, which not every Python reads.
        return datetime.fromisoformat(f"{text[:19]}+00:00").timestamp() + float(f"0{text[19:].rstrip('Z')}")
    except ValueError:
        return None


class _Taken(io.RawIOBase):
    """Keeps what a download writes, without a copy (``readall`` makes two)."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.parts.append(data)
        return len(data)


class _InterruptedError(Exception):
    """The body of an answer was cut."""
