"""Addresses at which one file of a share can be downloaded, by whoever has them."""

from __future__ import annotations

from mlflow_batchai.errors import NotSupportedError
from mlflow_batchai.storage import credentials
from mlflow_batchai.storage.azure_files import AzureFilesShare
from mlflow_batchai.storage.base import Share
from mlflow_batchai.storage.directory import DirectoryShare


def download_url(share: Share, path: str, minutes: float) -> str:
    """Where a file can be downloaded for so long: an address with a SAS that reads this file and nothing else.

    Where all that opens the account is a SAS of the user's, it is that one, for as long as it lasts; a directory's file has no
    end. Nobody looks whether the file is there. It costs no request; with a login, one for many files.

    Raises:
        ShareError: it can't be a path on the share, or no SAS can be made.
    """
    if isinstance(share, DirectoryShare):
        return share.local(path).as_uri()
    if not isinstance(share, AzureFilesShare):
        raise NotSupportedError(f"share {share.url}: its files have no addresses")
    from mlflow_batchai.storage.azure_sas import file_sas

    file = share.location.below(path)
    found = credentials.at(file.endpoint, file.account)
    return f"{file.url}?{found.sas or file_sas(file, found.key, 60 * minutes)}"
