"""Open a share from its address, with the credentials for nodes or for a browser."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

from mlflow_batchai.errors import NotSupportedError, ShareError
from mlflow_batchai.storage import credentials
from mlflow_batchai.storage.base import Share
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.storage.location import FORM, AzureLocation, is_web_address, parse


def open_share(url: str) -> Share:
    """The share at an address: ``file:///path`` for a directory, or ``https://ACCOUNT.file.core.windows.net/SHARE[/FOLDER]``
    for an Azure file share, which is not asked for anything yet and never made.

    Raises:
        NotSupportedError: no kind of share has this form of address.
        ShareError: there is no such directory on this machine, or what opens the Azure share can't be used.
    """
    if is_web_address(url):
        with needs_sdk():
            from mlflow_batchai.storage.azure_files import AzureFilesShare
        return AzureFilesShare(parse(url))
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return DirectoryShare.existing(unquote(parts.path, errors="surrogateescape"))
    raise NotSupportedError(
        f"share address {parts.scheme}://{parts.hostname or ''}: "
        f"only a directory (file:///path) or an Azure file share ({FORM}) works"
    )


@contextlib.contextmanager
def needs_sdk() -> Iterator[None]:
    """For an import of what needs Microsoft's SDK. Raises ShareError if that isn't installed."""
    try:
        yield
    except ImportError as error:
        raise ShareError(
            f"Azure file shares need Microsoft's SDK ({error.name} can't be imported): pip install 'mlflow-batchai[azure]'"
        ) from error


def for_nodes(location: AzureLocation, seconds: float) -> dict[str, str]:
    """Credentials with which agents open the share, as ``{"sas": text}``.

    From a key, a new SAS of this share for as long as the job may take; from a login a user delegation SAS, which lasts a week
    at most; a SAS of the user's is passed on.

    Raises:
        ShareError: the account is not known to be there, the user's SAS has expired or lacks a permission, or no SAS can be
            made.
    """
    found = credentials.at(location.endpoint, location.account, share=location.share)
    if found.sas:
        credentials.check_sas(found.sas, location)
        return {"sas": found.sas}
    with needs_sdk():
        from mlflow_batchai.storage.azure_client import share_sas
    return {"sas": share_sas(location, found.key, seconds)}


def download_url(share: Share, path: str, minutes: float) -> str:
    """Where a file can be downloaded for so long: an address with a SAS that reads this file and nothing else.

    Where all that opens the account is a SAS of the user's, it is that one, for as long as it lasts; a directory's file has no
    end. Nobody looks whether the file is there. It costs no request; with a login, one for many files.

    Raises:
        ShareError: it can't be a path on the share, or no SAS can be made.
    """
    if isinstance(share, DirectoryShare):
        return share.local(path).as_uri()
    file = parse(share.url).below(path)
    found = credentials.at(file.endpoint, file.account, share=file.share)
    if found.sas:
        return f"{file.url}?{found.sas}"
    with needs_sdk():
        from mlflow_batchai.storage.azure_client import file_sas
    return f"{file.url}?{file_sas(file, found.key, 60 * minutes)}"
