"""Where an account's key, SAS or login may go: to Azure's own clouds, and to services that this machine's user has named."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from mlflow_batchai.config import home
from mlflow_batchai.errors import DocumentError
from mlflow_batchai.storage.location import account_of

# The clouds that Microsoft runs (azure.core.AzureClouds has the same), and the zones of its newer accounts:
# https://learn.microsoft.com/azure/storage/common/storage-account-overview#storage-account-endpoints
_CLOUD = re.compile(
    r"https://(?P<account>[a-z0-9-]+)\.(?:(?P<service>file|blob)\.core\.(?:windows\.net|usgovcloudapi\.net|chinacloudapi\.cn)"
    r"|z\d{1,2}\.(?P<zoned>file|blob)\.storage\.azure\.net)(?::443)?",
    re.ASCII,
)

_named: set[str] = set()


def name(endpoint: str) -> None:
    """Let credentials of its account go to a service from now on, in this process: the user has named it.

    Args:
        endpoint: ``ACCOUNT`` in it stands for any account.
    """
    _named.add(endpoint)


def is_cloud(endpoint: str, account: str, service: str) -> bool:
    """Whether an endpoint is the one of an account in a cloud of Azure's.

    Args:
        service: ``file`` or ``blob``.
    """
    match = _CLOUD.fullmatch(endpoint)
    return match is not None and match["account"] == account and service in (match["service"], match["zoned"])


def is_named(endpoint: str, account: str, service: str, others: tuple[str | None, ...] = ()) -> bool:
    """Whether the user has named an endpoint for an account: in this process, in a cluster document, or among the others."""
    for template in (*others, *_named, *_of_clusters(service)):
        found = (template or "").replace("ACCOUNT", account).rstrip("/")
        if found == endpoint and account_of(found, service) == account:
            return True
    return False


def _of_clusters(service: str) -> list[str]:
    paths = sorted((home() / "clusters").glob("*.yaml"))
    pairs = [_of_cluster(path, path.stat().st_mtime_ns) for path in paths]
    return [found for pair in pairs if (found := pair[service == "blob"])]


@functools.lru_cache(maxsize=128)
def _of_cluster(path: Path, changed: int) -> tuple[str | None, str | None]:
    from mlflow_batchai.documents.cluster import load_cluster

    try:
        document = load_cluster(path)[0]
    except DocumentError:
        # Whoever uses the cluster is told.
        return None, None
    return document.file_endpoint, document.blob_endpoint
