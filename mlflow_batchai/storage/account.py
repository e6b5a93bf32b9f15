"""The file shares of one storage account: Azure's, and directories that stand for them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from mlflow_batchai.errors import ShareMissingError
from mlflow_batchai.storage.base import Share
from mlflow_batchai.storage.directory import DirectoryShare


class ShareEntry(NamedTuple):
    """One file share of an account.

    Attributes:
        name: of the share.
        quota: how much it may hold, in GiB; None: as much as the disk has.
        modified: when it was last changed itself, in seconds since the epoch.
    """

    name: str
    quota: int | None
    modified: float


class AccountShares(Protocol):
    """What can be done with an account's shares. Failures are ShareError."""

    def list(self) -> list[ShareEntry]:
        """All of them, by name."""

    def create(self, share: str, quota: int | None) -> bool:
        """Make one; False if it was there."""

    def delete(self, share: str) -> None:
        """Remove one with all that is on it; ShareMissingError if there is none."""

    def open(self, share: str) -> Share:
        """One of them; ShareMissingError, now or when it is first used, if there is none."""


class DirectoryShares:
    """Directories that stand for an account's shares.

    Args:
        within: where they lie; what is made is as open to others as its root.
        path: the account's folder there.
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
