"""Check whether this machine has the GPUs that a cluster document promises."""

from __future__ import annotations

import os

from mlflow_batchai.agent import gpus
from mlflow_batchai.agent.environment import for_agents
from mlflow_batchai.cluster.clusters import Cluster


def missing(cluster: Cluster, nodes: int) -> str:
    """Why so many nodes of this machine can't have ``gpusPerNode`` GPUs each at once, or nothing.

    A driver that gives no answer is left for the nodes to tell.
    """
    wanted = cluster.document.gpus_per_node
    environment = for_agents(os.environ)
    if not cluster.on_this_machine or not wanted or gpus.nvidia_smi(environment) is None:
        return ""
    found = gpus.list_gpus(environment)
    if not found.ids or len(found.ids) >= wanted * nodes:
        return ""
    return (
        f"{nodes} node(s) with gpusPerNode: {wanted} take {wanted * nodes} GPUs, and this machine has {len(found.ids)}"
        f" ({found.trouble or found.note})"
    )
