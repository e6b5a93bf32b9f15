"""Registry of engines by their names in cluster documents: module, traits, install hint (keys: ``KEYS_OF`` of documents)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow_batchai.documents.cluster import ClusterDocument
    from mlflow_batchai.engines.base import Engine


@dataclass(frozen=True)
class Site:
    """Arguments from which an engine is built.

    Attributes:
        nodes: how many nodes the cluster was made larger to, or has by its document.
        share: the control share's path on the nodes, or its address.
        identity: reads the control share's identity; called when it is needed.
        secret: makes what opens the control share for nodes; None where it is a path.
    """

    cluster: str
    document: ClusterDocument
    home: Path
    nodes: int
    share: str
    python: str
    identity: Callable[[], str]
    secret: Callable[[], str | None]


@dataclass(frozen=True)
class EngineKind:
    """One engine.

    Attributes:
        module: has ``build(site: Site) -> Engine``; it is imported when a cluster needs it.
        on_this_machine: whether its nodes are this machine, cut into as many as a person wants: they belong to no other
            cluster, and divide the machine's GPUs.
        has_scheduler: whether its nodes are given by a scheduler that has other users, too.
        uses: fields of Batch AI's document that mean something to it, and nothing to most engines.
    """

    module: str
    on_this_machine: bool = False
    has_scheduler: bool = False
    uses: tuple[str, ...] = ()

    def build(self, site: Site) -> Engine:
        """The engine of a cluster. Raises ClusterError: it can't be made of the document, or a library is missing."""
        made: Engine = importlib.import_module(self.module).build(site)
        return made


ENGINES = {
    "local": EngineKind("mlflow_batchai.engines.local_hosts", on_this_machine=True),
    "ssh": EngineKind("mlflow_batchai.engines.ssh_hosts", uses=("user_account_settings",)),
    "slurm": EngineKind("mlflow_batchai.engines.slurm", has_scheduler=True),
}
DEFAULT = "local"
