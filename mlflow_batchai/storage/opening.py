"""From an address to the share, and to what opens it on nodes."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from mlflow_batchai.errors import NotSupportedError
from mlflow_batchai.storage import credentials
from mlflow_batchai.storage.azure_files import AzureFilesShare
from mlflow_batchai.storage.base import Share
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.storage.location import FORM, AzureLocation, is_azure, parse


def open_share(url: str) -> Share:
    """The share at an address: ``file:///path`` for a directory, or ``https://ACCOUNT.file.core.windows.net/SHARE[/FOLDER]``
    for an Azure file share, which is not asked for anything yet and never made.

    Raises:
        NotSupportedError: no kind of share has this form of address.
        ShareError: there is no such directory on this machine, or what opens the Azure share can't be used.
    """
    if is_azure(url):
        return AzureFilesShare(parse(url))
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return DirectoryShare.existing(unquote(parts.path, errors="surrogateescape"))
    raise NotSupportedError(
        f"share address {parts.scheme}://{parts.hostname or ''}: "
        f"only a directory (file:///path) or an Azure file share ({FORM}) works"
    )


def for_nodes(location: AzureLocation, seconds: float) -> dict[str, str]:
    """What agents open the share with, as ``{"sas": text}``.

    From a key, a new SAS of this share for as long as the job may take; from a login a user delegation SAS, which lasts a week
    at most; a SAS of the user's is passed on.

    Args:
        seconds: for how long.

    Raises:
        ShareError: the account is not known to be there, the user's SAS has expired or lacks a permission, or no SAS can be
            made.
    """
    found = credentials.at(location.endpoint, location.account)
    if found.sas:
        credentials.check_sas(found.sas, location)
        return {"sas": found.sas}
    from mlflow_batchai.storage.azure_sas import share_sas

    return {"sas": share_sas(location, found.key, seconds)}
