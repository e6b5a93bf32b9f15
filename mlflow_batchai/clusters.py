"""Clusters by name: their documents in ``$BATCHAI_HOME``, and the engine and control share that each means."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from mlflow_batchai.engines.base import Engine
from mlflow_batchai.errors import ClusterError, NotSupportedError, UsageError
from mlflow_batchai.shares import Share, open_share
from mlflow_batchai.spec.cluster import ClusterDocument
from mlflow_batchai.spec.cluster import Engine as EngineName
from mlflow_batchai.spec.loading import load_cluster

DEFAULT_CLUSTER = "local"


def home() -> Path:
    """The client's folder: ``$BATCHAI_HOME``, by default ``~/.batchai``."""
    try:
        return Path(os.environ.get("BATCHAI_HOME") or Path.home() / ".batchai").absolute()
    except RuntimeError as error:
        raise UsageError("this user has no home folder; set BATCHAI_HOME to a folder of its own") from error


@dataclass(frozen=True)
class Cluster:
    """A cluster, ready to use.

    Attributes:
        name: as in its document's file name.
        document: what it says.
        python: the training interpreter of its nodes.
        environments: where nodes keep built training environments, None: each under its own root.
        cores_per_node: CPU cores that a node counts as its own, 0: all of the machine.
    """

    name: str
    document: ClusterDocument
    share: Share
    engine: Engine
    python: str
    environments: str | None
    cores_per_node: int
    address: str | None
    network_interface: str | None


def names() -> list[str]:
    """Clusters that have a document, and ``local``, which needs none."""
    found = {path.stem for path in (home() / "clusters").glob("*.yaml")} if (home() / "clusters").is_dir() else set()
    return sorted(found | {DEFAULT_CLUSTER})


def load(name: str | None) -> tuple[Cluster, list[str]]:
    """A cluster by name (None: the local one), and warnings about its document.

    Raises:
        ClusterError: no document of that name.
        DocumentError: the document is wrong.
        NotSupportedError: its engine isn't built yet.
    """
    name = name or DEFAULT_CLUSTER
    path = home() / "clusters" / f"{name}.yaml"
    warnings: list[str] = []
    if "/" not in name and path.is_file():
        document, warnings = load_cluster(path)
    elif name == DEFAULT_CLUSTER:
        document = ClusterDocument.local()
    else:
        raise ClusterError(f"there is no cluster '{name}' ({path}); the clusters are: {', '.join(names())}")
    if document.engine is not EngineName.LOCAL:
        raise NotSupportedError(f"{path}: engine {document.engine.value} is not supported yet; use engine: local")
    if document.node_setup.model_fields_set:
        raise NotSupportedError(f"{path}: nodeSetup is not supported on the local cluster; prepare this machine by hand")
    unused = [key for field, key in _UNUSED.items() if field in document.model_fields_set]
    if unused:
        warnings.append(f"{path}: {', '.join(unused)} plays no part on the local cluster")
    return _local(name, document), warnings


_UNUSED = {
    "vm_size": "vmSize",
    "vm_priority": "vmPriority",
    "virtual_machine_configuration": "virtualMachineConfiguration",
    "user_account_settings": "userAccountSettings",
    "subnet": "subnet",
    "oversubscribe": "oversubscribe",
}


def _local(name: str, document: ClusterDocument) -> Cluster:
    from mlflow_batchai.engines.hosts import LocalHosts

    folder = Path(document.share).expanduser() if document.share else home() / "share"
    if not folder.is_absolute():
        folder = home() / folder
    share = open_share(folder.as_uri())
    python = str(Path(document.python).expanduser()) if document.python else sys.executable
    if not os.access(python, os.X_OK):
        raise ClusterError(f"cluster '{name}': python: {python} is not a program")
    return Cluster(
        name,
        document,
        share,
        LocalHosts(home(), name, document.nodes, folder),
        python,
        str(home() / "envs"),
        max(1, len(os.sched_getaffinity(0)) // document.nodes) if hasattr(os, "sched_getaffinity") else 1,
        "127.0.0.1",
        document.network_interface or "lo",
    )
