"""From an address to the share."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from mlflow_batchai.errors import NotSupportedError
from mlflow_batchai.shares.base import Share
from mlflow_batchai.shares.directory import DirectoryShare


def open_share(url: str) -> Share:
    """The share at an address (``file:///path`` for a directory).

    Raises:
        NotSupportedError: no kind of share has this form of address.
        ShareError: there is no such directory on this machine.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return DirectoryShare.existing(unquote(parts.path, errors="surrogateescape"))
    raise NotSupportedError(
        f"share address {parts.scheme}://{parts.hostname or ''}: only a directory (file:///path) works so far"
    )
