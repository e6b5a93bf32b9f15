"""The cluster that a person means, in the workspace that was named."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlflow_batchai.cli.options import Scope, notice

if TYPE_CHECKING:
    from mlflow_batchai.cluster.clusters import Cluster


PATIENCE_SECONDS = 5.0


@contextlib.contextmanager
def asking(name: str) -> Iterator[None]:
    """While a cluster's nodes are asked what they do: nobody looks at nothing for long."""
    sentence = f"the nodes of cluster '{name}' have not all answered yet; one that is away is waited for, up to a minute"
    timer = threading.Timer(PATIENCE_SECONDS, notice, [sentence])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def find_cluster(scope: Scope, name: str) -> Cluster:
    """A cluster, ready to use; warnings about its document are printed.

    Raises:
        NotFoundError: there is no such cluster, or no such workspace; or it was created in another one.
        BatchAIError: its document is wrong, or can't be used yet.
    """
    from mlflow_batchai.cluster import clusters

    check_workspace(scope, name)
    cluster, warnings = clusters.load(name)
    for warning in warnings:
        notice(warning)
    return cluster


def check_workspace(scope: Scope, name: str) -> None:
    """A cluster that was created in a workspace stands in no other; hand-written documents stand in all.

    Raises:
        NotFoundError: there is no such workspace, or the cluster is in another.
    """
    from mlflow_batchai.cluster import records, workspaces
    from mlflow_batchai.errors import ClusterNotFoundError

    if not scope.workspace_given:
        return
    workspaces.find(scope.workspace)
    record = records.find(name)
    if record and record.creation_time and record.workspace != scope.workspace:
        there = ", ".join(records.in_workspace(scope.workspace)) or "none"
        raise ClusterNotFoundError(
            f"there is no cluster '{name}' in workspace '{scope.workspace}' (it is in '{record.workspace}'); the clusters"
            f" there are: {there}"
        )
