"""What an Azure file share becomes on a cluster's nodes: mounted by rclone or cifs, bound, or a folder that stands for it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

from mlflow_batchai.agent.plan import Volume
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.documents.common import AzureFileShare, StorageCredentials
from mlflow_batchai.errors import DocumentError, ShareError
from mlflow_batchai.plan.placeholders import ACCOUNT_VARIABLE, KEY_VARIABLE, filled, has_key, remember
from mlflow_batchai.storage import accounts, credentials
from mlflow_batchai.storage.location import AzureLocation, parse
from mlflow_batchai.storage.opening import for_nodes


class FileShares:
    """Describes file shares for one cluster.

    Args:
        seconds: how long what nodes are given has to open them.

    Attributes:
        warnings: sentences to print.
    """

    def __init__(self, cluster: Cluster, seconds: float) -> None:
        self._cluster = cluster
        self._seconds = seconds
        self.warnings: list[str] = []

    def volume(self, entry: AzureFileShare, at: str) -> tuple[Volume, dict[str, str]]:
        """What a document's share becomes on nodes, its place left out, and what opens it there.

        Raises:
            DocumentError: it can't be used as it is described.
        """
        # Where a directory can stand for it, an account needs no name.
        meant = default_account(self._cluster) or (accounts.UNNAMED if self._cluster.mount in (None, "folder") else "")
        account = filled(entry.account_name, meant, at, "accountName") if entry.account_name else None
        try:
            location = parse(filled(entry.azure_file_url, meant, at, "azureFileUrl"), account)
        except ShareError as error:
            raise DocumentError(f"{at}: azureFileUrl: {error}") from error
        if self._cluster.mount == "folder" or not self._is_azure(location.account, entry.credentials, at):
            return self._stand_in(location)
        location = location.served_by(self._cluster.document.file_endpoint or credentials.file_endpoint(location.account))
        return self.mounted(location, at, entry.file_mode, entry.directory_mode)

    def _is_azure(self, account: str, given: StorageCredentials | None, at: str) -> bool:
        """Whether a file share's account is Azure's; what opens it by the document is remembered."""
        if self._cluster.mount:
            remember(account, given, at)
            return True
        if has_key(given):
            remember(account, given, at)
        control = self._cluster.location
        if control and control.account == account:
            return True
        try:
            return accounts.is_azure(account)
        except ShareError as error:
            raise DocumentError(f"{at}: {error}") from error

    def mounted(self, location: AzureLocation, at: str, file_mode: str, directory_mode: str) -> tuple[Volume, dict[str, str]]:
        """A share that Azure serves, as the cluster mounts it.

        Raises:
            DocumentError: the cluster can't open it.
        """
        how = self._cluster.mount or "rclone"
        volume = Volume(
            "",
            "",
            "azureFiles",
            location.url,
            f"file share {location.account}/{location.share}",
            at,
            how,
            endpoint=location.endpoint,
            account=location.account,
            container=location.share,
            folder=location.folder,
            file_mode=file_mode,
            directory_mode=directory_mode,
        )
        if how == "bind":
            name = f"{location.account}/{location.share}"
            folder = self._cluster.document.mounted_at.get(name)
            if folder is None:
                raise DocumentError(
                    f"{at}: cluster '{self._cluster.name}' has mount: bind and doesn't say where its nodes have {name};"
                    f" add it to mountedAt ({name}: /the/folder)"
                )
            return replace(volume, source=folder), {}
        try:
            if how == "cifs":
                return volume, {"key": self._key(location, at)}
            opens = for_nodes(location, self._seconds)
        except ShareError as error:
            raise DocumentError(f"{at} ({volume.name}): {error}") from error
        if credentials.find(location.account).sas:
            self._tell_end(opens["sas"], location.account)
        return volume, opens

    def _tell_end(self, sas: str, account: str) -> None:
        """Warn of a user's SAS that a job may outlive; one that we make lasts as long as Azure has it."""
        ends = credentials.expiry(sas)
        if ends and ends < datetime.now(timezone.utc) + timedelta(seconds=self._seconds):
            self._warn(
                f"the SAS of storage account '{account}' ends at {ends:%Y-%m-%d %H:%M} UTC: a job that still runs then fails"
            )

    def _warn(self, sentence: str) -> None:
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    def _key(self, location: AzureLocation, at: str) -> str:
        account = location.account
        key = credentials.at(location.endpoint, account).key
        if not key:
            raise DocumentError(
                f"{at}: SMB opens a share of {account} only with the account's key; give it (credentials.accountKey, or"
                f" {ACCOUNT_VARIABLE} and {KEY_VARIABLE}), or set mount: rclone in the cluster document"
            )
        return key

    def _stand_in(self, location: AzureLocation) -> tuple[Volume, dict[str, str]]:
        """A folder in place of an Azure share."""
        cluster = self._cluster
        assert cluster.file_shares
        share, path, on_nodes = cluster.file_shares
        account, name = location.account, "/".join(part for part in (location.share, location.folder) if part)
        folder = share.local(f"{path}/{account}/{name}")
        if cluster.mount:
            self._warn(f"on cluster '{cluster.name}' the file share {account}/{name} is the directory {folder}")
        else:
            self._warn(accounts.stand_in(account))
        volume = Volume("", "", "link", folder.as_uri(), f"file share {account}/{name}", source=f"{on_nodes}/{account}/{name}")
        return volume, {}


def default_account(cluster: Cluster) -> str:
    """The storage account of documents that name none: the environment's, else the control share's."""
    control = cluster.location
    return accounts.default() or (control.account if control else "")
