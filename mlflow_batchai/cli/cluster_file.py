"""``batchai cluster file``: what the setup task of a cluster wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from mlflow_batchai.cli.cluster_lookup import find_cluster
from mlflow_batchai.cli.job_file import url_of
from mlflow_batchai.cli.options import Scope, command, named, notice
from mlflow_batchai.cli.output import Column
from mlflow_batchai.errors import ShareError

if TYPE_CHECKING:
    from mlflow_batchai.cluster.clusters import Cluster
    from mlflow_batchai.storage.base import Entry
    from mlflow_batchai.tracking.directories import Directory


def _size(file: Mapping[str, Any]) -> object:
    return "" if file["isDirectory"] else file["contentLength"]


COLUMNS: list[Column] = [("Name", "name"), ("Is directory", "isDirectory"), ("Size", _size)]
EXPIRY_MINUTES = 60


@command(COLUMNS, example="batchai cluster file list -c nc6cluster")
@named("cluster", option=("-c", "--cluster"))
@click.option("-p", "--path", metavar="PATH", default=".", show_default=True, help="A folder below the setup task's own.")
def list_files(scope: Scope, name: str, path: str) -> Any:
    """The logs of a cluster's setup task, two of each node that has run it."""
    place = _logs(find_cluster(scope, name))
    if place is None:
        notice(f"cluster '{name}' has no setup task, which could have written files")
        return []
    files = place.entries("")
    if not files:
        notice(f"the setup task of cluster '{name}' has not written anything yet; a node runs it before its first job")
        return []
    if path != ".":
        files = place.entries(path)
    return [_shown(place, file, entry) for file, entry in files.items()]


def _shown(place: Directory, path: str, entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "isDirectory": entry.is_directory,
        "contentLength": None if entry.is_directory else entry.size,
        "downloadUrl": url_of(place, path, entry, EXPIRY_MINUTES),
    }


def _logs(cluster: Cluster) -> Directory | None:
    """Where the logs of a cluster's setup task lie; None if it has none.

    Raises:
        ShareError: they lie where this machine can't read them.
    """
    from mlflow_batchai.plan.setup import choose_setup
    from mlflow_batchai.plan.volumes import cluster_volumes
    from mlflow_batchai.storage import open_share
    from mlflow_batchai.tracking.directories import Directory

    if cluster.document.node_setup.setup_task is None:
        return None
    volumes = cluster_volumes(cluster)
    planned, _ = choose_setup(cluster, volumes)
    assert planned
    index, path = planned.logs.volume, planned.logs.path
    if index is None:
        return Directory("the setup task's logs", cluster.share, path)
    volume = volumes[index]
    if volume.share is None:
        raise ShareError(
            f"the logs of the setup task of cluster '{cluster.name}' lie on {volume.name}, which this machine can't read;"
            " look at them on a node"
        )
    return Directory("the setup task's logs", open_share(volume.share), path, volume.by_rclone)
