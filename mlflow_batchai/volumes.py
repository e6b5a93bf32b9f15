"""Which volumes a job mounts on a cluster whose file shares are directories, and where on them its folder and its logs lie."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from mlflow_batchai.clusters import Cluster
from mlflow_batchai.errors import DocumentError, NotSupportedError
from mlflow_batchai.places import locate, mount_points
from mlflow_batchai.spec.job import JobProperties

CONTROL_MOUNT = "share"
DEFAULT_PREFIX = f"$AZ_BATCHAI_MOUNT_ROOT/{CONTROL_MOUNT}"


def choose_volumes(
    properties: JobProperties, cluster: Cluster, source: str
) -> tuple[list[dict[str, Any]], dict[str, int], list[str]]:
    """(volumes of the plan, mount point -> index, warnings). The control share is volume 0."""
    control = {"scope": "cluster", "path": CONTROL_MOUNT, "source": cluster.share_on_nodes, "share": cluster.share.url}
    volumes: list[dict[str, Any]] = [control]
    warnings: list[str] = []
    mounts = properties.mount_volumes
    for key, entries in (
        ("azureBlobFileSystems", mounts.azure_blob_file_systems),
        ("fileServers", mounts.file_servers),
        ("unmanagedFileSystems", mounts.unmanaged_file_systems),
    ):
        if entries:
            raise NotSupportedError(f"{source}: mountVolumes.{key} is not supported yet; remove it")
    for entry in mounts.azure_file_shares:
        parts = urlsplit(entry.azure_file_url)
        account = entry.account_name or (parts.hostname or "").split(".")[0]
        name = parts.path.strip("/")
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", name) or ".." in name.split("/") or not re.fullmatch(r"[\w.-]+", account):
            raise DocumentError(f"{source}: mountVolumes.azureFileShares: '{entry.azure_file_url}' names no account and share")
        share, path, on_nodes = cluster.file_shares
        folder = share.made(f"{path}/{account}/{name}")
        volumes.append(
            {
                "scope": "job",
                "path": entry.relative_mount_path.strip("/"),
                "source": f"{on_nodes}/{account}/{name}",
                "share": folder.as_uri(),
            }
        )
        warnings.append(f"on cluster '{cluster.name}' the file share {account}/{name} is the directory {folder}")
    return volumes, mount_points(volumes), warnings


def place_logs(properties: JobProperties, prefixes: Mapping[str, int], source: str) -> tuple[str, dict[str, Any] | None]:
    """(path on the control share under which the job folder goes, where else logs are copied at the end)."""
    text = properties.std_out_err_path_prefix or DEFAULT_PREFIX
    volume, path = locate(text, prefixes, f"{source}: properties.stdOutErrPathPrefix")
    for entry in properties.output_directories:
        locate(entry.path_prefix, prefixes, f"{source}: outputDirectories {entry.id}: pathPrefix")
    return (path, None) if volume == 0 else ("", {"volume": volume, "path": path})
