"""Create a cluster: check its document, write it, and tell its nodes whether they take jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlflow_batchai.cluster import clusters, records, scaling
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.config import untold
from mlflow_batchai.documents.cluster import ClusterRecord, ScaleSettings, parse_cluster
from mlflow_batchai.errors import BatchAIError, ClusterError, UsageError


def create(
    name: str,
    data: Mapping[str, Any],
    source: str,
    record: ClusterRecord,
    say: Callable[[str], None],
    check: Callable[[Cluster], object],
) -> Cluster:
    """Make a cluster.

    Args:
        data: its document, as plain data; secrets in it are kept as they stand, in a file for this user only.
        record: where it belongs, and since when it is there.
        check: raises BatchAIError if no job could use the cluster.

    Raises:
        UsageError: there is one of that name.
        BatchAIError: the document is wrong, or can't be used yet; nothing was made.
    """
    if records.document_path(name).exists():
        raise UsageError(
            f"there is a cluster '{name}' already; delete it first (batchai cluster delete -n {name}), or name another"
        )
    document, warnings = parse_cluster(data, source)
    for warning in warnings:
        say(str(warning))  # whatever was said of another cluster's
    cluster, _ = clusters.make(name, document, Path(source), record)
    check(cluster)
    settings = _settings(cluster)
    records.add_document(name, dict(data))
    try:
        records.save(name, record)
        try:
            made = scaling.apply(cluster, settings) if settings else clusters.load(name)[0]
        except ClusterError as error:
            # Of machines: the cluster is there, and they are unusable until they can be asked.
            say(str(error))
            made = clusters.load(name)[0]
        untold(clusters.load(name)[1])  # these notices count as said
    except BatchAIError:
        records.delete(name)
        raise
    return made


def _settings(cluster: Cluster) -> ScaleSettings | None:
    """Scale settings from the document; without them all nodes, None where a scheduler has them."""
    written = cluster.document.scale_settings
    if written and written.auto_scale:
        return scaling.automatic(cluster, written.auto_scale.minimum_node_count, written.auto_scale.maximum_node_count)
    if written and written.manual:
        return scaling.manual(cluster, written.manual.target_node_count, written.manual.node_deallocation_option)
    return None if cluster.has_scheduler else scaling.manual(cluster, cluster.engine.node_limit)
