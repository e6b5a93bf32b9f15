"""What of a cluster changes: the record beside its document, which only ``batchai`` writes."""

from __future__ import annotations

from mlflow_batchai.documents.base import NonEmpty, SpecModel
from mlflow_batchai.documents.cluster import Nodes, ScaleSettings


class ClusterRecord(SpecModel):
    """Where a cluster belongs, since when, and how many nodes it is to have; a hand-written document has none.

    ``nodes`` is what a local cluster has been made larger to than its document says; ``allocation_time`` is when the number
    of its nodes was last changed (both times ISO 8601, UTC).
    """

    workspace: NonEmpty = "default"
    resource_group: NonEmpty = "batchai"
    location: NonEmpty = "local"
    creation_time: str | None = None
    scale_settings: ScaleSettings | None = None
    nodes: Nodes | None = None
    allocation_time: str | None = None
