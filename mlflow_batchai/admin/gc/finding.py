"""All that can be freed, of the clusters that were asked for."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from mlflow_batchai.admin.gc import jobs, machines, staged
from mlflow_batchai.admin.gc.items import KINDS, Item, Say
from mlflow_batchai.cluster import clusters
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.errors import BatchAIError
from mlflow_batchai.job import folders
from mlflow_batchai.storage import Share


@dataclass(frozen=True)
class Search:
    """What is looked for.

    Attributes:
        seconds: how long ago a job must have ended, or a thing have been used for the last time.
        cluster: whose share and nodes; None: those of all clusters, and what lies on this machine besides.
        deleted: ids of jobs' runs that were deleted in MLflow.
        now: seconds since the epoch.
    """

    seconds: float
    cluster: str | None = None
    deleted: Collection[str] = ()
    now: float = field(default_factory=time.time)

    @property
    def before(self) -> float:
        return self.now - self.seconds


def find(search: Search, say: Say) -> list[Item]:
    """Everything that can go, in the order in which it is to be freed.

    Args:
        say: told, in sentences, of what can't be looked into.

    Raises:
        ClusterError: there is no cluster of that name.
    """
    wanted = [search.cluster] if search.cluster else clusters.names()
    known: list[Cluster] = []
    for name in wanted:
        try:
            known.append(clusters.load(name)[0])
        except BatchAIError as error:
            if search.cluster:
                raise
            say(f"cluster {name} is left alone: {error}")
    items: list[Item] = []
    # Two documents may name one share.
    for share in {cluster.share.url: cluster.share for cluster in known}.values():
        try:
            items += _of_share(share, search, say)
        except BatchAIError as error:
            say(f"{share.url} is left alone: {error}")
    local = None if search.cluster is None else {cluster.name for cluster in known if cluster.on_this_machine}
    if local is None or local:
        items += machines.of_local_nodes(local, search.seconds)
    for cluster in known:
        items += machines.of_other_machines(cluster, search.seconds, say)
    if search.cluster is None:
        items += machines.of_this_machine(search.before)
    # Two clusters may have one machine.
    once = {item.path: item for item in items}.values()
    return sorted(once, key=lambda item: (KINDS.index(item.kind), item.modified or 0.0))


def _of_share(share: Share, search: Search, say: Say) -> list[Item]:
    found = folders.find(share)
    going = jobs.find(share, found, search.now, search.seconds, search.deleted, say)
    before = search.now - max(search.seconds, staged.YOUNG_SECONDS)
    try:
        return [*going.values(), *staged.find(share, found, going, before)]
    except BatchAIError as error:
        say(f"{share.url}: staged files stay: {error}")
        return list(going.values())
