"""Resolve a storage account: Azure Files if there are credentials for it, else a directory of this machine."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow_batchai.config import home
from mlflow_batchai.errors import ShareError, ShareMissingError, StorageNotFoundError, UsageError
from mlflow_batchai.storage import credentials
from mlflow_batchai.storage.base import TEMPORARY, Entry, Share, ShareEntry
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.storage.opening import needs_sdk

if TYPE_CHECKING:
    from mlflow_batchai.storage.azure_files import AzureShares

# The account of documents that have only a placeholder for its name, where nobody says what that stands for.
UNNAMED = "local"
FOLDER = "shares"
# Below an account's folder, where blob containers are folders.
BLOBS = "blobs"
_ACCOUNT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_SHARE = re.compile(r"[a-z0-9](?:[a-z0-9]|-(?=[a-z0-9])){2,62}")
_NAMED_AT_MOST = 20


def default() -> str:
    """The storage account that the environment names; empty if it names none."""
    connected = credentials.connection(os.environ.get(credentials.CONNECTION_VARIABLE, ""))
    named = os.environ.get("AZURE_BATCHAI_STORAGE_ACCOUNT") or os.environ.get("AZURE_STORAGE_ACCOUNT")
    return named or (connected.account if connected else "")


def is_azure(account: str) -> bool:
    """Whether something that we know of opens an account: then it is Azure Files.

    Raises:
        ShareError: it is no key or no SAS.
        DocumentError: config.yaml is wrong.
    """
    return credentials.find(account) != Credential()


def folder(account: str) -> Path:
    """Folder that stands for an account without credentials: each folder in it is a file share."""
    return home() / FOLDER / account.lower()


def stand_in(account: str, container: str = "") -> str:
    """The sentence that says so, or says it of a blob container."""
    where = folder(account)
    if container:
        where = where / BLOBS / container
        nobody = f"the storage account '{account}'" if account != UNNAMED else "a storage account that nobody names"
        found = (
            f"there is no key or SAS for {nobody}, so its blob container {container} is the directory {where}; if it is Azure's"
        )
    elif account == UNNAMED:
        found = f"file shares of no named storage account are directories of {where}; if they are Azure's"
    else:
        found = f"there is no key or SAS for the storage account '{account}', so it is the directory {where}; if it is Azure's"
    return f"{found}, set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY, or name it under shares: in config.yaml"


class DirectoryShares:
    """Directories that stand for an account's shares; its methods are those of ``azure_files.AzureShares``.

    Args:
        within: where they lie; what is made is as open to others as its root.
    """

    def __init__(self, within: DirectoryShare, path: str) -> None:
        self._within = within
        self._path = path

    def list(self) -> list[ShareEntry]:
        found = self._within.list(self._path)
        return [ShareEntry(entry.name, None, entry.modified or 0.0) for entry in found if entry.is_directory]

    def create(self, share: str, quota: int | None) -> bool:
        return self._within.claim(f"{self._path}/{share}")

    def delete(self, share: str) -> None:
        self.open(share)
        self._within.delete(f"{self._path}/{share}")

    def open(self, share: str) -> DirectoryShare:
        folder = self._within.local(f"{self._path}/{share}")
        if not folder.is_dir():
            raise ShareMissingError(f"there is no file share '{share}' ({folder}); create it, or correct the name")
        return self._within.inside(f"{self._path}/{share}")


class Account:
    """A storage account whose shares and files commands work on.

    Attributes:
        name: in small letters.
        folder: the directory that stands for it; None: it is Azure's.
    """

    def __init__(self, name: str, shares: DirectoryShares | AzureShares, stands_in: Path | None) -> None:
        self.name = name
        self.folder = stands_in
        self._shares = shares

    def list(self) -> list[ShareEntry]:
        return self._shares.list()

    def create(self, share: str, quota: int | None = None) -> bool:
        """Make a file share; False if it was there. Raises UsageError: no share can be called that."""
        if not _SHARE.fullmatch(share):
            raise UsageError(
                f"no file share can be called '{share}': it takes 3 to 63 small letters, digits and single hyphens between them"
            )
        return self._shares.create(share, quota)

    def delete(self, share: str) -> None:
        """Remove a file share with all that is on it. Raises StorageNotFoundError: there is none of that name."""
        with self._found(share):
            self._shares.delete(share)

    @contextlib.contextmanager
    def using(self, share: str) -> Iterator[Share]:
        """One of its shares, for what is done inside. Raises StorageNotFoundError: there is none of that name."""
        with self._found(share):
            yield self._shares.open(share)

    @contextlib.contextmanager
    def _found(self, share: str) -> Iterator[None]:
        try:
            # What couldn't be a name must not become a path.
            if not re.fullmatch(r"\w[\w.-]*", share):
                raise ShareMissingError
            yield
        except ShareMissingError:
            sentence = f"there is no file share '{share}' in the storage account '{self.name}'"
            raise StorageNotFoundError(f"{sentence}; {self._known()}") from None

    def _known(self) -> str:
        try:
            names = [entry.name for entry in self.list()]
        except ShareError:
            # A SAS of one share can't list them all.
            return "correct the name"
        return f"its shares are: {_some(names)}" if names else "it has none (batchai storage share create)"


def open_account(name: str, endpoint: str | None = None, login: bool = False) -> Account:
    """The account of that name.

    Args:
        endpoint: its file service, as the user names it; None: what its connection string or config.yaml says, else the public
            cloud's.
        login: it is Azure's even if nothing that we know of opens it: then a login does.

    Raises:
        UsageError: no account can be called that.
        ShareError: its key, SAS or login can't be used, or Microsoft's SDK isn't installed.
    """
    name = name.lower()
    if not _ACCOUNT.fullmatch(name):
        raise UsageError(f"no storage account can be called '{name}': it takes small letters and digits")
    if not (login or is_azure(name)):
        return Account(name, DirectoryShares(DirectoryShare(home()), f"{FOLDER}/{name}"), folder(name))
    with needs_sdk():
        from mlflow_batchai.storage.azure_files import AzureShares
    if endpoint:
        credentials.name_endpoint(endpoint)
    where = endpoint or credentials.file_endpoint(name) or f"https://{name}.file.core.windows.net"
    return Account(name, AzureShares(name, where), None)


def checked_path(path: str) -> str:
    """A path on a share without slashes at its ends; empty for the share's root.

    Raises:
        UsageError: it would lead elsewhere, or names what unfinished files are called.
    """
    parts = [part for part in path.split("/") if part]
    if ".." in parts or "." in parts:
        raise UsageError(f"'{path}' is no path on a file share: it has no '.' and no '..'")
    if any(part.startswith(TEMPORARY) for part in parts):
        raise UsageError(
            f"'{path}' can't be a path on a file share: {TEMPORARY} begins the names of files that are being written"
        )
    return "/".join(parts)


def find(share: Share, path: str) -> Entry:
    """The file or folder at a path, which is not the share's root.

    Raises:
        StorageNotFoundError: there is nothing of that name; the message has the names that are there.
    """
    above, _, name = path.rpartition("/")
    entries = share.list(above)
    for entry in entries:
        if entry.name == name:
            return entry
    if above and not entries and not find(share, above).is_directory:
        raise StorageNotFoundError(f"there is no '{path}' on the file share {share.url}: '{above}' is a file")
    where = f"'{above}'" if above else "its root"
    held = f"has: {_some(entry.name for entry in entries)}" if entries else "is empty"
    raise StorageNotFoundError(f"there is no '{path}' on the file share {share.url}; {where} {held}")


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f", and {len(found) - _NAMED_AT_MOST} more" if len(found) > _NAMED_AT_MOST else ""
    return ", ".join(found[:_NAMED_AT_MOST]) + more
