"""``batchai cluster``: show, list, delete and resize clusters."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from mlflow_batchai.cli.cluster_lookup import asking, check_workspace, find_cluster
from mlflow_batchai.cli.options import Scope, ask, command, confirmed, named, notice, tracking
from mlflow_batchai.cli.output import Column

if TYPE_CHECKING:
    from mlflow_batchai.cluster.clusters import Cluster
    from mlflow_batchai.documents.cluster import ClusterRecord, ScaleSettings


def _state(row: Mapping[str, Any]) -> object:
    return row["allocationState"] if row["provisioningState"] == "succeeded" else row["provisioningState"]


COLUMNS: list[Column] = [
    ("Name", "name"),
    ("Resource Group", "resourceGroup"),
    ("Workspace", "workspace"),
    ("VM Size", "vmSize"),
    ("State", _state),
    ("Idle", "nodeStateCounts.idleNodeCount"),
    ("Running", "nodeStateCounts.runningNodeCount"),
    ("Preparing", "nodeStateCounts.preparingNodeCount"),
    ("Leaving", "nodeStateCounts.leavingNodeCount"),
    ("Unusable", "nodeStateCounts.unusableNodeCount"),
]
OPTIONS = ("requeue", "terminate", "waitforjobcompletion")


@command(COLUMNS, example="batchai cluster show -n nc6cluster -o table")
@named("cluster")
def show(scope: Scope, name: str) -> Any:
    """A cluster: what its document says, and what each of its nodes does just now."""
    return _shown(find_cluster(scope, name))


def _shown(cluster: Cluster) -> dict[str, Any]:
    from mlflow_batchai.cluster import states

    try:
        with asking(cluster.name):
            census = cluster.scalable.census()
        return states.show(cluster, census)
    finally:
        cluster.engine.close()


@command(COLUMNS, example="batchai cluster list -o table")
def list_clusters(scope: Scope) -> Any:
    """All clusters, or those of a workspace; hand-written documents belong to the default one.

    A cluster that can't be used as its document stands is listed as failed, and `errors` says why.
    """
    from mlflow_batchai.cluster import clusters, workspaces
    from mlflow_batchai.engines.parallel import at_once

    names = clusters.names()
    if scope.workspace_given:
        workspaces.find(scope.workspace)
        names = [name for name in names if _record(name).workspace == scope.workspace]
    return at_once([functools.partial(_listed, name) for name in names])


def _listed(name: str) -> dict[str, Any]:
    from mlflow_batchai.cluster import clusters, states
    from mlflow_batchai.errors import BatchAIError

    try:
        return _shown(clusters.load(name)[0])
    except BatchAIError as error:
        return states.show_broken(name, _record(name), str(error))


def _record(name: str) -> ClusterRecord:
    """A cluster's record; that of a hand-written document if it can't be read."""
    from mlflow_batchai.cluster import records
    from mlflow_batchai.documents.cluster import ClusterRecord
    from mlflow_batchai.errors import BatchAIError

    try:
        return records.find(name) or ClusterRecord()
    except BatchAIError:
        return ClusterRecord()


@command(example="batchai cluster delete -n nc6cluster -y")
@named("cluster")
@confirmed
@click.option(
    "--no-wait", is_flag=True, expose_value=False, help="Accepted; deleting waits until the cluster's jobs have ended."
)
def delete(scope: Scope, name: str, yes: bool) -> None:
    """Delete a cluster. Its jobs are terminated; its share stays."""
    from mlflow_batchai.client import resizing

    check_workspace(scope, name)
    jobs = _jobs(scope, name)
    ends = f" Its jobs are terminated: {', '.join(jobs)}." if jobs else ""
    ask(f"Delete cluster {name}?{ends}", yes)
    resizing.delete(name, tracking, notice)


def _jobs(scope: Scope, name: str) -> list[str]:
    """The jobs that a cluster has, as far as that can be told."""
    from mlflow_batchai.cluster import clusters, scaling
    from mlflow_batchai.errors import BatchAIError, ClusterNotFoundError

    try:
        cluster, _ = clusters.load(name)
    except ClusterNotFoundError:
        raise
    except BatchAIError:
        return []  # it can't be used as it is, and is deleted for that
    try:
        with asking(name):
            jobs = scaling.queue(cluster)
        return [job.name for job in jobs if scaling.sent_to(cluster, job.ticket)]
    finally:
        cluster.engine.close()


@command(COLUMNS, example="batchai cluster resize -n nc6cluster --target 0")
@named("cluster")
@click.option("-t", "--target", required=True, type=click.IntRange(0), metavar="N", help="Nodes that take jobs.")
@click.option(
    "--node-deallocation-option",
    "option",
    type=click.Choice(OPTIONS, case_sensitive=False),
    help="What becomes of jobs on nodes that leave.  [as the cluster's document says, else requeue]",
)
@click.option("--no-wait", is_flag=True, expose_value=False, help="Accepted; nodes that are told to leave do so by themselves.")
def resize(scope: Scope, name: str, target: int, option: str | None) -> Any:
    """Have another number of a cluster's nodes take jobs; one that scaled by itself does so no more.

    Jobs on nodes that leave are put back in the queue (requeue), ended (terminate), or waited for (waitforjobcompletion: the
    nodes are `leaving` until then). A local cluster can be made larger than its document says. The machines of a cluster over
    SSH keep running; those that leave only take no jobs.
    """
    from mlflow_batchai.cluster import scaling

    cluster = find_cluster(scope, name)
    settings = scaling.manual(cluster, target, option)
    assert settings.manual
    return _resized(cluster, settings, settings.manual.node_deallocation_option)


@command(COLUMNS, example="batchai cluster auto-scale -n nc6cluster --min 0 --max 4")
@named("cluster")
@click.option("--min", "minimum", required=True, type=click.IntRange(0), metavar="N", help="Nodes that are always there.")
@click.option("--max", "maximum", required=True, type=click.IntRange(0), metavar="N", help="Nodes at most.")
def auto_scale(scope: Scope, name: str, minimum: int, maximum: int) -> Any:
    """Have a cluster's number of nodes follow its queue, between two limits.

    Nodes of a local cluster cost nothing while they are idle: the maximum is what jobs find, and what is shown as idle follows
    the queue. So it is with machines over SSH, which keep running.
    """
    from mlflow_batchai.cluster import scaling

    cluster = find_cluster(scope, name)
    return _resized(cluster, scaling.automatic(cluster, minimum, maximum), "waitforjobcompletion")


def _resized(cluster: Cluster, settings: ScaleSettings, option: str) -> dict[str, Any]:
    from mlflow_batchai.client import resizing

    try:
        return _shown(resizing.resize(cluster, settings, option, tracking, notice))
    finally:
        cluster.engine.close()
