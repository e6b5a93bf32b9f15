"""Find clusters by name: the documents in ``$BATCHAI_HOME``, with the engine and control share of each."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from mlflow_batchai.cluster import records, setup
from mlflow_batchai.config import home
from mlflow_batchai.documents.cluster import ClusterDocument, ClusterRecord, ManualScale, ScaleSettings, load_cluster
from mlflow_batchai.documents.model import key_of
from mlflow_batchai.engines import registry
from mlflow_batchai.engines.base import Engine, NodeAccess, Scalable
from mlflow_batchai.errors import ClusterError, ClusterNotFoundError, DocumentError, NotSupportedError, ShareError
from mlflow_batchai.storage import Share, accounts, credentials, open_share
from mlflow_batchai.storage.base import identify
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.storage.location import AzureLocation, is_web_address, parse
from mlflow_batchai.storage.opening import for_nodes
from mlflow_batchai.terminal import Notice

DEFAULT_CLUSTER = "local"
# What nodes are given to look at the share before a job.
CHECK_SECONDS = 3600.0


@dataclass(frozen=True)
class Cluster:
    """A cluster, ready to use.

    Attributes:
        share_on_nodes: its path on the nodes, or its address if it is an Azure file share: they use it by REST.
        mount: how nodes mount Azure file shares: ``folder``, ``rclone``, ``cifs`` or ``bind``; None: by rclone what something
            opens, as folders what nothing does.
        file_shares: where the folders that stand for Azure file shares lie: a share, a path on it, their path on the nodes;
            None where there is no such place.
        python: the training interpreter of its nodes.
        environments: where nodes keep built training environments, None: each under its own root.
        location: the control share's, if it is an Azure file share.
        record: what of it changes; None where nobody has created or resized it.
    """

    name: str
    document: ClusterDocument
    share: Share
    engine: Engine
    share_on_nodes: str
    mount: str | None
    file_shares: tuple[DirectoryShare, str, str] | None
    python: str
    environments: str | None
    location: AzureLocation | None = None
    record: ClusterRecord | None = None

    @property
    def scale(self) -> ScaleSettings:
        """Scale settings: as last resized, else as the document says, else all nodes."""
        if self.record and self.record.scale_settings:
            return self.record.scale_settings
        written = self.document.scale_settings
        if written and written.auto_scale:
            return written
        option = written.manual.node_deallocation_option if written and written.manual else "requeue"
        target = self.engine.node_limit
        return ScaleSettings(manual=ManualScale(target_node_count=target, node_deallocation_option=option))

    @property
    def on_this_machine(self) -> bool:
        """Whether its nodes are this machine: see ``engines.registry.EngineKind``."""
        return registry.ENGINES[self.document.engine.value].on_this_machine

    @property
    def has_scheduler(self) -> bool:
        """Whether somebody else decides which jobs get its nodes: see ``engines.registry.EngineKind``."""
        return registry.ENGINES[self.document.engine.value].has_scheduler

    @property
    def scalable(self) -> Scalable:
        """Its engine, to count its nodes and to say which take jobs; NotSupportedError if it can't."""
        if not isinstance(self.engine, Scalable):
            raise NotSupportedError(
                f"cluster '{self.name}': engine {self.document.engine.value} doesn't know what its nodes do"
            )
        return self.engine

    @property
    def node_access(self) -> NodeAccess:
        """Its engine, to ask its nodes one by one; NotSupportedError if it can't."""
        if not isinstance(self.engine, NodeAccess):
            raise NotSupportedError(f"cluster '{self.name}': engine {self.document.engine.value} has no nodes to look into")
        return self.engine

    @property
    def open_nodes(self) -> int:
        """Nodes that take jobs."""
        return self.scale.nodes


def names() -> list[str]:
    """Clusters that have a document, and ``local``, which needs none."""
    found = {path.stem for path in (home() / "clusters").glob("*.yaml")} if (home() / "clusters").is_dir() else set()
    return sorted(found | {DEFAULT_CLUSTER})


def load(name: str | None) -> tuple[Cluster, list[str]]:
    """A cluster by name (None: the local one), and warnings about its document.

    Raises:
        ClusterNotFoundError: no document of that name.
        DocumentError: the document is wrong.
        NotSupportedError: it has a key that isn't supported yet.
    """
    name = name or DEFAULT_CLUSTER
    path = records.document_path(name)
    warnings: list[str] = []
    if "/" not in name and path.is_file():
        document, warnings = load_cluster(path)
    elif name == DEFAULT_CLUSTER:
        document = ClusterDocument.local()
    else:
        raise ClusterNotFoundError(f"there is no cluster '{name}' ({path}); the clusters are: {', '.join(names())}")
    record = records.find(name)
    cluster, notices = make(name, document, path, record)
    return cluster, warnings + notices


def make(name: str, document: ClusterDocument, path: Path, record: ClusterRecord | None) -> tuple[Cluster, list[str]]:
    """A cluster of a document, and warnings."""
    warnings: list[str] = []
    kind = registry.ENGINES[document.engine.value]
    if unsupported := sorted(document.node_setup.model_fields_set - {"mount_volumes", "setup_task"}):
        key = key_of(type(document.node_setup), unsupported[0])
        raise NotSupportedError(f"{path}: nodeSetup.{key} is not supported yet; remove it")
    setup.check(document.node_setup, str(path))
    for endpoint in filter(None, (document.file_endpoint, document.blob_endpoint)):
        credentials.name_endpoint(endpoint)
    unused = [
        key_of(ClusterDocument, field) for field in _UNUSED if field in document.model_fields_set and field not in kind.uses
    ]
    if unused:
        warnings.append(Notice(f"{path}: {', '.join(unused)} plays no part with engine: {document.engine.value}"))
    here = kind.on_this_machine
    python = _python(name, document) if here else document.python or "python3"
    location = _azure(document, path)
    share, on_nodes, stand_ins = _control_share(document, path, here, location)
    nodes = max((record and record.nodes) or 0, document.nodes)
    site = registry.Site(
        name, document, home(), nodes, on_nodes, python, lambda: identify(share), lambda: share_secret(location)
    )
    made = Cluster(
        name,
        document,
        share,
        kind.build(site),
        on_nodes,
        document.mount or (None if here else "rclone"),
        stand_ins,
        python,
        str(home() / "envs") if here else None,
        location,
        record,
    )
    return made, warnings


_UNUSED = ("vm_size", "virtual_machine_configuration", "user_account_settings", "subnet")


def _azure(document: ClusterDocument, path: Path) -> AzureLocation | None:
    """Location of a control share that is an Azure file share; its credentials are remembered.

    Raises:
        ClusterError: no share can have that address.
    """
    text = document.share or ""
    if not is_web_address(text):
        return None
    try:
        location = parse(text)
        location = location.served_by(document.file_endpoint or credentials.file_endpoint(location.account))
    except ShareError as error:
        raise ClusterError(f"{path}: share: {error}") from error
    if given := document.credentials:
        key, sas = (secret.get_secret_value() if secret else None for secret in (given.account_key, given.sas_token))
        credentials.remember(location.account, credentials.Credential(key, sas), location.share)
    return location


def _python(name: str, document: ClusterDocument) -> str:
    """The training interpreter of this machine."""
    python = str(Path(document.python).expanduser()) if document.python else sys.executable
    if not os.access(python, os.X_OK):
        raise ClusterError(f"cluster '{name}': python: {python} is not a program")
    return python


def _control_share(
    document: ClusterDocument, path: Path, here: bool, location: AzureLocation | None
) -> tuple[Share, str, tuple[DirectoryShare, str, str] | None]:
    """The control share, its path or address on the nodes, and where the folders lie that stand for Azure file shares.

    Args:
        here: whether the nodes are this machine, which makes the folder.
    """
    here_stand_ins = (DirectoryShare(home()), accounts.FOLDER, str(home() / accounts.FOLDER)) if here else None
    if location:
        if document.mount == "folder":
            raise DocumentError(
                f"{path}: mount is folder, and an Azure share has no folder that could stand for another; use rclone, cifs or"
                " bind"
            )
        return open_share(location.url), location.url, here_stand_ins
    if here:
        folder = home() / Path(document.share or "share").expanduser()
        return DirectoryShare(folder), str(folder), here_stand_ins
    share = _shared_folder(document, path)
    on_nodes = document.share_on_nodes or str(share.root)
    return share, on_nodes, (share, accounts.FOLDER, f"{on_nodes}/{accounts.FOLDER}")


def share_secret(location: AzureLocation | None, seconds: float = CHECK_SECONDS) -> str | None:
    """SAS of an Azure control share for nodes, good for so many seconds; None: nodes have it as a folder.

    Raises:
        ShareError: there are no credentials that could.
    """
    return for_nodes(location, seconds)["sas"] if location else None


def _shared_folder(document: ClusterDocument, path: Path) -> DirectoryShare:
    assert document.share
    folder = Path(document.share).expanduser()
    if not folder.is_absolute():
        raise DocumentError(f"{path}: share is '{document.share}', but must be an absolute path, or an Azure share's address")
    try:
        return DirectoryShare.existing(folder)
    except ShareError as error:
        raise ClusterError(f"{path}: share: {error}") from error
