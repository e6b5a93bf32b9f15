"""A cluster as Batch AI showed it (its REST API 2018-05-01): its document and the states of its nodes."""

from __future__ import annotations

from typing import Any

from mlflow_batchai.cluster import setup
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.cluster.records import document_path
from mlflow_batchai.cluster.workspaces import arm_id
from mlflow_batchai.documents.cluster import AutoScale, ClusterRecord
from mlflow_batchai.documents.model import as_shown
from mlflow_batchai.engines.census import Census, NodeReport, NodeState

TYPE = "Microsoft.BatchAI/workspaces/clusters"
COUNTED = (NodeState.IDLE, NodeState.RUNNING, NodeState.PREPARING, NodeState.UNUSABLE, NodeState.LEAVING)
STEADY, RESIZING = "steady", "resizing"
NODE_ERROR, DOCUMENT_ERROR = "NodeUnusable", "ClusterUnusable"


def show(cluster: Cluster, census: Census, why: str = "") -> dict[str, Any]:
    """All of a cluster; its secrets are null. ``why``: why no job can use its mounts, if so."""
    document, record = cluster.document, cluster.record or ClusterRecord()
    counts = node_counts(cluster, census)
    account = as_shown(document.user_account_settings)
    errors = [_error(DOCUMENT_ERROR, why, str(document_path(cluster.name)))] if why else []
    errors += [_error(NODE_ERROR, node.why, node.place.name) for node in census.nodes if node.why]
    return {
        **_identity(cluster.name, record),
        **({"location": document.location} if document.location else {}),
        "provisioningState": "succeeded",
        "provisioningStateTransitionTime": record.creation_time,
        "allocationState": allocation_state(cluster, census),
        "allocationStateTransitionTime": record.allocation_time,
        "currentNodeCount": sum(counts.values()),
        "nodeStateCounts": counts,
        "errors": errors,
        # A scheduler knows how many nodes there are: the most that a job may have is no target.
        "scaleSettings": as_shown(document.scale_settings if cluster.has_scheduler else cluster.scale),
        "vmSize": document.vm_size,
        "vmPriority": document.vm_priority,
        "virtualMachineConfiguration": as_shown(document.virtual_machine_configuration),
        "nodeSetup": _node_setup(cluster),
        "userAccountSettings": account and {key: value for key, value in account.items() if key != "adminUserPassword"},
        "subnet": as_shown(document.subnet),
        "engine": document.engine.value,
        "gpusPerNode": document.gpus_per_node,
    }


def _node_setup(cluster: Cluster) -> dict[str, Any]:
    """Node setup of the document, with the place of the setup task's logs as Batch AI showed it."""
    shown: dict[str, Any] = as_shown(cluster.document.node_setup)
    if task := cluster.document.node_setup.setup_task:
        shown["setupTask"]["stdOutErrPathSuffix"] = setup.suffix(cluster.name, cluster.record, task)
    return shown


def show_broken(name: str, record: ClusterRecord, why: str) -> dict[str, Any]:
    """A cluster that can't be used as its document stands, for a list that has the others as well."""
    return {
        **_identity(name, record),
        "provisioningState": "failed",
        "provisioningStateTransitionTime": record.creation_time,
        "allocationState": None,
        "allocationStateTransitionTime": record.allocation_time,
        "currentNodeCount": 0,
        "nodeStateCounts": dict.fromkeys((f"{state.value}NodeCount" for state in COUNTED), 0),
        "errors": [_error(DOCUMENT_ERROR, why, str(document_path(name)))],
    }


def _identity(name: str, record: ClusterRecord) -> dict[str, Any]:
    return {
        "id": arm_id(record.resource_group, record.workspace, "clusters", name),
        "name": name,
        "type": TYPE,
        "location": record.location,
        "resourceGroup": record.resource_group,
        "workspace": record.workspace,
        "creationTime": record.creation_time,
    }


def _error(code: str, message: str, where: str) -> dict[str, Any]:
    return {"code": code, "message": message, "details": [{"name": "where", "value": where}]}


def allocation_state(cluster: Cluster, census: Census) -> str:
    """``resizing`` while nodes that are to leave still have jobs, or not as many take jobs as are to."""
    states = [node.state for node in census.nodes]
    if NodeState.LEAVING in states:
        return RESIZING
    told = cluster.record is not None and cluster.record.scale_settings is not None
    return RESIZING if told and len(states) - states.count(NodeState.CLOSED) != cluster.open_nodes else STEADY


def node_counts(cluster: Cluster, census: Census) -> dict[str, int]:
    """Number of nodes in each state.

    Of a cluster that scales by itself, nodes that wait for no job count only as far as its minimum: this machine doesn't cost
    less for it, but a job finds as many nodes as there.
    """
    states = [node.state for node in census.nodes]
    counts = {state: states.count(state) for state in COUNTED}
    if cluster.scale.auto_scale:
        allocated = _allocated(cluster.scale.auto_scale, census)
        used = sum(counts.values()) - counts[NodeState.IDLE]
        counts[NodeState.IDLE] = min(counts[NodeState.IDLE], max(0, allocated - used))
    return {f"{state.value}NodeCount": counts[state] for state in COUNTED}


def _allocated(scale: AutoScale, census: Census) -> int:
    """Nodes that a cluster with this queue would have: those that its jobs have or wait for, within its limits."""
    wanted = {node for reservation in census.reservations for node in reservation.nodes}
    return min(max(len(wanted), scale.minimum_node_count), scale.maximum_node_count)


def show_node(report: NodeReport, jobs: dict[int, str]) -> dict[str, Any]:
    """A node, as Batch AI's remote login information has it, and what it does.

    Args:
        jobs: number of a reservation -> name of its job.
    """
    return {
        "nodeId": report.place.name,
        "ipAddress": report.place.address,
        "port": report.place.port,
        "state": report.state.value,
        "job": jobs.get(report.reservation) if report.reservation is not None else None,
        "error": report.why or None,
    }
