"""Plan the volumes of a job, find their credentials, and check that they can be used."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from mlflow_batchai.agent.plan import Volume
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.documents.common import (
    AzureBlobFileSystem,
    AzureFileShare,
    FileServer,
    MountVolumes,
    StorageCredentials,
    UnmanagedFileSystem,
)
from mlflow_batchai.documents.job import JobProperties
from mlflow_batchai.errors import BatchAIError, DocumentError, NotSupportedError, ShareError
from mlflow_batchai.job.places import CONTROL_MOUNT
from mlflow_batchai.storage import accounts, credentials, open_share
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.storage.location import AzureLocation, parse
from mlflow_batchai.storage.opening import for_nodes
from mlflow_batchai.terminal import Notice

ACCOUNT_VARIABLE, KEY_VARIABLE = "AZURE_BATCHAI_STORAGE_ACCOUNT", "AZURE_BATCHAI_STORAGE_KEY"
ACCOUNT, KEY = f"<{ACCOUNT_VARIABLE}>", f"<{KEY_VARIABLE}>"
# For who only looks where they are: nothing is made that opens them.
LOOKS = 0.0


class Chosen(NamedTuple):
    """The volumes of a plan; the control share is the first.

    Attributes:
        credentials: index of a volume, as text -> what opens it on nodes (``key`` or ``sas``), and the ``endpoint`` that it is
            for; never written anywhere.
    """

    volumes: list[Volume]
    credentials: dict[str, dict[str, str]]
    warnings: list[str]

    def __repr__(self) -> str:
        return f"Chosen({self.volumes!r})"


def choose_volumes(properties: JobProperties, cluster: Cluster, source: str, seconds: float) -> Chosen:
    """Choose the volumes that the job and its cluster mount.

    Args:
        seconds: how long what nodes are given has to open their volumes.

    Raises:
        DocumentError: a volume can't be used as it is described: no account, no credentials, one inside another.
        ShareError: its credentials are no good.
    """
    chooser = _Chooser(cluster, seconds)
    chooser.add_cluster()
    chooser.add_all(properties.mount_volumes, "job", f"{source}: mountVolumes")
    _refuse_nested(chooser.volumes)
    return Chosen(chooser.volumes, chooser.credentials, chooser.warnings)


def cluster_volumes(cluster: Cluster) -> list[Volume]:
    """Volumes that every job of a cluster mounts; raises as ``choose_volumes`` does."""
    chooser = _Chooser(cluster, LOOKS)
    chooser.add_cluster()
    return chooser.volumes


class _Chooser:
    """Collects the volumes of a job on one cluster, one kind after the other.

    Args:
        seconds: how long what nodes are given has to open them; ``LOOKS``: no SAS is made, which may need
            the network.
    """

    def __init__(self, cluster: Cluster, seconds: float) -> None:
        self._cluster = cluster
        self._seconds = seconds
        self.volumes: list[Volume] = []
        self.credentials: dict[str, dict[str, str]] = {}
        self.warnings: list[str] = []

    def add_cluster(self) -> None:
        """The control share, and what the cluster's document names."""
        self._add_control()
        name, volumes = self._cluster.name, self._cluster.document.node_setup.mount_volumes
        self.add_all(volumes, "cluster", f"cluster '{name}': nodeSetup.mountVolumes")

    def _add_control(self) -> None:
        cluster = self._cluster
        where = f"cluster '{cluster.name}': share"
        opens: dict[str, str] = {}
        if cluster.location is None:
            volume = Volume("", "", "link", name="control share", source=cluster.share_on_nodes)
        else:
            volume, opens = self._mounted(cluster.location, where, "0777", "0777")
        self._add(replace(volume, scope="cluster", path=CONTROL_MOUNT, share=cluster.share.url, where=where), opens)

    def add_all(self, mounts: MountVolumes, scope: str, where: str) -> None:
        kinds: list[tuple[str, Sequence[Any], Callable[[Any, str], tuple[Volume, dict[str, str]]]]] = [
            ("azureFileShares", mounts.azure_file_shares, self._file_share),
            ("azureBlobFileSystems", mounts.azure_blob_file_systems, self._blob_container),
            ("fileServers", mounts.file_servers, self._file_server),
            ("unmanagedFileSystems", mounts.unmanaged_file_systems, self._unmanaged),
        ]
        for key, entries, describe in kinds:
            for index, entry in enumerate(entries):
                at = f"{where}.{key}[{index}]"
                volume, opens = describe(entry, at)
                path = entry.relative_mount_path.strip("/")
                self._add(replace(volume, scope=scope, path=path, where=at), opens)

    def _add(self, volume: Volume, opens: dict[str, str]) -> None:
        if opens:
            # A node uses it for that address only, whatever the plan on the share says by then.
            self.credentials[str(len(self.volumes))] = {**opens, "endpoint": volume.endpoint}
        self.volumes.append(volume)

    def _blob_container(self, entry: AzureBlobFileSystem, at: str) -> tuple[Volume, dict[str, str]]:
        default = self._default_account()
        if not entry.account_name and not default:
            raise DocumentError(f"{at}: accountName is missing; give it, or set {ACCOUNT_VARIABLE}")
        account = _filled(entry.account_name or ACCOUNT, default, at, "accountName")
        if not re.fullmatch(r"[a-z0-9-]{1,63}", account):
            raise DocumentError(f"{at}: accountName is '{account}', which no storage account can be called")
        if not re.fullmatch(r"[a-z0-9$][a-z0-9-]{2,62}", entry.container_name):
            raise DocumentError(f"{at}: containerName is '{entry.container_name}', which no blob container can be called")
        what = f"blob container {account}/{entry.container_name}"
        if not self._is_azure(account, entry.credentials, at):
            folder = f"{accounts.BLOBS}/{entry.container_name}"
            return self._stand_in(what, account, folder, at, entry.container_name)
        document = self._cluster.document
        endpoint = (document.blob_endpoint or "https://ACCOUNT.blob.core.windows.net").replace("ACCOUNT", account).rstrip("/")
        try:
            found = credentials.at(endpoint, account, "blob")
        except ShareError as error:
            raise DocumentError(f"{at}: {error}") from error
        opens = {"key": found.key} if found.key else {"sas": found.sas} if found.sas else None
        if opens is None:
            raise DocumentError(
                f"{at}: there is no key for the account {account}; give credentials.accountKey, or set {ACCOUNT_VARIABLE} and"
                f" {KEY_VARIABLE}"
            )
        volume = Volume(
            "",
            "",
            "azureBlob",
            name=what,
            how="rclone",
            endpoint=endpoint,
            account=account,
            container=entry.container_name,
            options=entry.mount_options or "",
        )
        return volume, opens

    def _file_server(self, entry: FileServer, at: str) -> tuple[Volume, dict[str, str]]:
        name = entry.file_server.id.rstrip("/").rpartition("/")[2]
        folder = self._cluster.document.file_servers.get(name)
        if folder is None:
            raise DocumentError(
                f"{at}: the document of cluster '{self._cluster.name}' doesn't say where the file server {name} is; add it to"
                f" fileServers ({name}: host:/folder)"
            )
        if ".." in (below := (entry.source_directory or "").strip("/").split("/")):
            raise DocumentError(f"{at}: sourceDirectory is '{entry.source_directory}', but must stay below the server's folder")
        source = "/".join([folder.rstrip("/"), *filter(None, below)])
        volume = Volume(
            "",
            "",
            "nfs",
            name=f"file server {name}",
            source=f"{source}/" if source.endswith(":") else source,
            options=entry.mount_options or "",
        )
        return volume, {}

    def _unmanaged(self, entry: UnmanagedFileSystem, at: str) -> tuple[Volume, dict[str, str]]:
        name = f"unmanaged file system {entry.relative_mount_path.strip('/')}"
        return Volume("", "", "command", name=name, command=entry.mount_command), {}

    def _file_share(self, entry: AzureFileShare, at: str) -> tuple[Volume, dict[str, str]]:
        """Turn a document's share into a volume of the plan, without its place, and its credentials.

        Raises:
            DocumentError: it can't be used as it is described.
        """
        meant = self._default_account()
        account = _filled(entry.account_name, meant, at, "accountName") if entry.account_name else None
        try:
            location = parse(_filled(entry.azure_file_url, meant, at, "azureFileUrl"), account)
        except ShareError as error:
            raise DocumentError(f"{at}: azureFileUrl: {error}") from error
        if self._cluster.mount == "folder" or not self._is_azure(location.account, entry.credentials, at):
            name = "/".join(part for part in (location.share, location.folder) if part)
            return self._stand_in(f"file share {location.account}/{name}", location.account, name, at)
        location = location.served_by(self._cluster.document.file_endpoint or credentials.file_endpoint(location.account))
        return self._mounted(location, at, entry.file_mode, entry.directory_mode)

    def _default_account(self) -> str:
        """The account of documents that name none; where a directory can stand for it, it needs no name."""
        control = self._cluster.location
        known = accounts.default() or (control.account if control else "")
        return known or (accounts.UNNAMED if self._cluster.mount in (None, "folder") else "")

    def _is_azure(self, account: str, given: StorageCredentials | None, at: str) -> bool:
        """Whether an account is Azure's, not a folder; what the document has to open it is kept."""
        if self._cluster.mount not in (None, "folder"):
            _remember(account, given, at)
            return True
        if _has_key(given):
            _remember(account, given, at)
        control = self._cluster.location
        if control and control.account == account:
            return True
        try:
            return accounts.is_azure(account)
        except ShareError as error:
            raise DocumentError(f"{at}: {error}") from error

    def _mounted(self, location: AzureLocation, at: str, file_mode: str, directory_mode: str) -> tuple[Volume, dict[str, str]]:
        """A share that Azure serves, as the cluster mounts it. Raises DocumentError: the cluster can't open it."""
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
            found = credentials.at(location.endpoint, location.account, share=location.share)
            if self._seconds == LOOKS and not found.sas:
                return volume, {}
            opens = for_nodes(location, self._seconds)
        except ShareError as error:
            raise DocumentError(f"{at} ({volume.name}): {error}") from error
        if found.sas:
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
        key = credentials.at(location.endpoint, account, share=location.share).key
        if not key:
            raise DocumentError(
                f"{at}: SMB opens a share of {account} only with the account's key; give it (credentials.accountKey, or"
                f" {ACCOUNT_VARIABLE} and {KEY_VARIABLE}), or set mount: rclone in the cluster document"
            )
        return key

    def _stand_in(self, what: str, account: str, name: str, at: str, container: str = "") -> tuple[Volume, dict[str, str]]:
        """A folder in place of an Azure share, or of a blob container. ``name``: the folder's, below the account's."""
        cluster = self._cluster
        assert cluster.file_shares
        share, path, on_nodes = cluster.file_shares
        folder = share.local(f"{path}/{account}/{name}")
        if cluster.mount:
            self._warn(Notice(f"on cluster '{cluster.name}' the {what} is the directory {folder}"))
        else:
            self._warn(Notice(f"{at.rpartition(': ')[0]}: {accounts.stand_in(account, container)}"))
        return Volume("", "", "link", folder.as_uri(), what, source=f"{on_nodes}/{account}/{name}"), {}


def _refuse_nested(volumes: Sequence[Volume]) -> None:
    for first, second in itertools.permutations(volumes, 2):
        if first.scope != second.scope:
            continue
        if first.path == second.path:
            raise DocumentError(
                f"{second.where} ({second.name}) is mounted at '{second.path}', and so is {first.where}"
                f" ({first.name}); give one another relativeMountPath"
            )
        if second.path.startswith(first.path + "/"):
            raise DocumentError(
                f"{second.where} ({second.name}) is mounted at '{second.path}', inside of {first.where}"
                f" ({first.name}) at '{first.path}'; mount it beside it"
            )


def check_volumes(volumes: Sequence[Volume], cluster: Cluster) -> None:
    """Ask for every volume that this machine can reach, one request each, and make the folders that stand for Azure's.

    Raises:
        ShareError: one can't be used: no such share, wrong key, no network.
    """
    for volume in volumes:
        if volume.kind == "azureFiles":
            try:
                open_share(volume.share or "").list("")
            except BatchAIError as error:
                raise ShareError(f"{volume.where} ({volume.name}): {error}") from error
        elif volume.kind == "link" and volume is not volumes[0]:
            assert cluster.file_shares
            share = cluster.file_shares[0]
            share.made(str(PurePosixPath(unquote(urlsplit(volume.share or "").path)).relative_to(share.root)))


def _filled(text: str, account: str, at: str, key: str) -> str:
    """A document's text with the placeholder for the account filled.

    Args:
        account: what it stands for; empty: nobody said.

    Raises:
        DocumentError: it has the placeholder, and nobody said.
    """
    if ACCOUNT in text and not account:
        raise DocumentError(f"{at}: {key} has the placeholder {ACCOUNT}; set {ACCOUNT_VARIABLE} to the storage account's name")
    return text.replace(ACCOUNT, account)


def _has_key(given: StorageCredentials | None) -> bool:
    """Whether a document gives a key, or a placeholder for one that the environment has.

    Documents are shown to others with some other word in its place.
    """
    text = given.account_key.get_secret_value() if given and given.account_key else ""
    return bool(os.environ.get(KEY_VARIABLE)) if text == KEY else credentials.is_key(text)


def _remember(account: str, given: StorageCredentials | None, at: str) -> None:
    """Use a document's key for its account from now on; a placeholder means the environment's.

    Raises:
        DocumentError: it is no key, or nobody said which.
        NotSupportedError: it lies in a Key Vault.
    """
    if given is None:
        return
    if given.account_key is None:
        raise NotSupportedError(f"{at}: accountKeySecretReference (Azure Key Vault) is not supported yet; give accountKey")
    key = given.account_key.get_secret_value()
    if key == KEY:
        key = os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise DocumentError(f"{at}: accountKey has the placeholder {KEY}; set {KEY_VARIABLE} to the account's key")
    try:
        credentials.remember(account, Credential(key, None))
    except ShareError as error:
        raise DocumentError(f"{at}: {error}") from error
