"""Find the cluster or job that a command names, in its workspace and experiment."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from mlflow_batchai.cli.options import Scope, notice, tracking
from mlflow_batchai.cluster import workspaces
from mlflow_batchai.errors import ClusterNotFoundError, JobNotFoundError, NotFoundError
from mlflow_batchai.tracking import experiments

if TYPE_CHECKING:
    from mlflow.entities import Run

    from mlflow_batchai.cluster.clusters import Cluster
    from mlflow_batchai.follower.detached import Submitted
    from mlflow_batchai.tracking.runs import Tracking

PATIENCE_SECONDS = 5.0

of_attempt = click.option(
    "--attempt", type=click.IntRange(1), metavar="N", help="Logs of an earlier attempt, from there on.  [the present one]"
)


def find_cluster(scope: Scope, name: str) -> Cluster:
    """A cluster, ready to use; warnings about its document are printed.

    Raises:
        NotFoundError: there is no such cluster, or no such workspace; or it was created in another one.
        BatchAIError: its document is wrong, or can't be used yet.
    """
    check_workspace(scope, name)
    return load_cluster(name)


def load_cluster(name: str | None, noted: bool = True) -> Cluster:
    """The same, in whatever workspace; None: the default one."""
    from mlflow_batchai.cluster import clusters

    cluster, warnings = clusters.load(name)
    notice(*warnings, noted=noted)
    return cluster


def short_name(name: str) -> str:
    """A cluster's name; an id of Azure's form ends in it."""
    return name.rstrip("/").rpartition("/")[2]


def check_workspace(scope: Scope, name: str) -> None:
    """A cluster that was created in a workspace stands in no other; hand-written documents stand in all.

    Raises:
        NotFoundError: there is no such workspace, or the cluster is in another.
    """
    from mlflow_batchai.cluster import records

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


@contextlib.contextmanager
def asking(cluster: Cluster) -> Iterator[None]:
    """While a cluster's nodes are asked what they do nobody looks at nothing for long; then the connections are closed."""
    sentence = (
        f"the nodes of cluster '{cluster.name}' have not all answered yet; one that is away is waited for, up to a minute"
    )
    timer = threading.Timer(PATIENCE_SECONDS, notice, [sentence])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        cluster.engine.close()


def find_run(scope: Scope, name: str) -> tuple[Run, Tracking]:
    """The run of a job, and its store. Raises NotFoundError: there is no such job, workspace or experiment."""
    from mlflow_batchai.tracking import index, reading

    store = tracking()
    mlflow = reading.client(store)
    experiment = experiments.find(mlflow, scope.experiment).experiment_id if scope.experiment_given else None
    workspace = scope.workspace if scope.workspace_given else None
    try:
        return index.find(mlflow, name, workspace, experiment), store
    except JobNotFoundError:
        # Jobs may stand under a workspace that has no record here: only now it matters.
        if workspace is not None:
            workspaces.find(workspace)
        raise


def find_job(scope: Scope, name: str, attempt: int | None = None) -> Submitted:
    """A job, its folder opened.

    Args:
        attempt: the one that it is to be at; None: the present one.

    Raises:
        NotFoundError: there is no such job, workspace, experiment or attempt.
        NoFolderError: its folder is not on its share.
        ShareError: its share is not on this machine.
    """
    from mlflow_batchai.client import lookup

    found = lookup.of_run(*find_run(scope, name))
    if attempt is not None:
        if attempt > found.job.attempt:
            raise NotFoundError(f"job {found.job.name} has no attempt {attempt}; it has {found.job.attempt}")
        found.job = found.job.at(attempt)
        found.job.overrides()  # it may have had fewer ranks
    return found
