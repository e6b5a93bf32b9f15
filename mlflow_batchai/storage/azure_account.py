"""The file shares of an Azure storage account, by Microsoft's SDK.

Raises ImportError where the SDK isn't installed: import it where it is used.
"""

from __future__ import annotations

from mlflow_batchai.errors import ShareMissingError
from mlflow_batchai.storage import credentials
from mlflow_batchai.storage.account import ShareEntry
from mlflow_batchai.storage.azure_answers import ExistsError, translated
from mlflow_batchai.storage.azure_client import Again, service_client
from mlflow_batchai.storage.azure_files import AzureFilesShare
from mlflow_batchai.storage.location import AzureLocation


class AzureShares:
    """See ``AccountShares``.

    Args:
        account: its name.
        endpoint: its file service.

    Raises:
        ShareError: what opens it can't be used.
    """

    def __init__(self, account: str, endpoint: str) -> None:
        self._location = AzureLocation(endpoint, account, "")
        self._credential = credentials.at(endpoint, account)
        with translated(self._location, self._credential, ""):
            self._client = service_client(self._location, self._credential)

    def list(self) -> list[ShareEntry]:
        with translated(self._location, self._credential, ""):
            found = [
                ShareEntry(share.name, share.quota, share.last_modified.timestamp()) for share in self._client.list_shares()
            ]
        return sorted(found)

    def create(self, share: str, quota: int | None) -> bool:
        again = Again()
        try:
            with translated(self._of(share), self._credential, ""):
                self._client.create_share(share, quota=quota, retry_hook=again)
        except ExistsError:
            # An answer may have been lost: then it is our own that is there already.
            return again.happened
        return True

    def delete(self, share: str) -> None:
        again = Again()
        try:
            with translated(self._of(share), self._credential, ""):
                self._client.delete_share(share, retry_hook=again)
        except ShareMissingError:
            if not again.happened:
                raise

    def open(self, share: str) -> AzureFilesShare:
        return AzureFilesShare(self._of(share))

    def _of(self, share: str) -> AzureLocation:
        return self._location._replace(share=share)
