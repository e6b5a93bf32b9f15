"""Find, show and free what ended jobs have left on control shares, on nodes and on this machine.

Nothing is freed that a job may still need: of what can't be known to be over, the reason is said, and it stays.
"""

from __future__ import annotations

from collections.abc import Collection

from mlflow_batchai.admin.gc import jobs, machines, staged
from mlflow_batchai.admin.gc.items import KINDS, Age, Item, Say
from mlflow_batchai.cluster import clusters
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.errors import BatchAIError
from mlflow_batchai.job import places
from mlflow_batchai.storage import Share

__all__ = ["Age", "Item", "find"]


def find(age: Age, say: Say, only: str | None = None, deleted: Collection[str] = ()) -> list[Item]:
    """Everything that can go, in the order in which it is to be freed.

    Args:
        say: told, in sentences, of what can't be looked into.
        only: the cluster whose share and nodes are looked at; None: those of all clusters, and this machine.
        deleted: ids of jobs' runs that were deleted in MLflow.

    Raises:
        ClusterError: there is no cluster of that name.
    """
    known: list[Cluster] = []
    for name in [only] if only else clusters.names():
        try:
            known.append(clusters.load(name)[0])
        except BatchAIError as error:
            if only:
                raise
            say(f"cluster {name} is left alone: {error}")
    items: list[Item] = []
    # Two documents may name one share.
    for share in {cluster.share.url: cluster.share for cluster in known}.values():
        try:
            items += _of_share(share, age, deleted, say)
        except BatchAIError as error:
            say(f"{share.url} is left alone: {error}")
    local = [cluster.name for cluster in known if cluster.on_this_machine] if only else None
    if local is None or local:
        items += machines.of_local_nodes(local, age)
    for cluster in known:
        items += machines.of_other_machines(cluster, age, say)
    if not only:
        items += machines.of_this_machine(age)
    # Two clusters may have one machine.
    once = {item.path: item for item in items}.values()
    return sorted(once, key=lambda item: (KINDS.index(item.kind), item.modified or 0.0))


def _of_share(share: Share, age: Age, deleted: Collection[str], say: Say) -> list[Item]:
    found = places.find(share)
    going = jobs.find(share, found, age, deleted, say)
    try:
        return [*going.values(), *staged.find(share, found, going, age)]
    except BatchAIError as error:
        say(f"{share.url}: staged files stay: {error}")
        return list(going.values())
