"""``batchai cluster file`` and ``batchai job file``: files that setup tasks and jobs write, also while they run."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from mlflow_batchai.cli.lookup import find_cluster, find_job, of_attempt
from mlflow_batchai.cli.options import Noun, Scope, named, notice
from mlflow_batchai.cli.output import Column, echo
from mlflow_batchai.errors import ShareError
from mlflow_batchai.terminal import fit_pieces, silence, writable

if TYPE_CHECKING:
    from mlflow_batchai.cluster.clusters import Cluster
    from mlflow_batchai.follower.detached import Submitted
    from mlflow_batchai.storage.base import Entry
    from mlflow_batchai.tracking.directories import Directory

cluster_file = Noun("file", "What the setup task of a cluster wrote.")
job_file = Noun("file", "A job's files.", experiment=True)


def _size(file: Mapping[str, Any]) -> object:
    return "" if file["contentLength"] is None else file["contentLength"]


CLUSTER_COLUMNS: list[Column] = [("Name", "name"), ("Is directory", "isDirectory"), ("Size", _size)]
JOB_COLUMNS: list[Column] = [("Name", "name"), ("Type", "fileType"), ("Size", _size), ("Modified", "lastModified")]
EXPIRY_MINUTES = 60

_of_job = named("job", ("-j", "--job", "-n", "--name"), dest="job")
_directory = click.option(
    "-d",
    "--output-directory-id",
    "identity",
    metavar="ID",
    default="stdouterr",
    show_default=True,
    help="stdouterr for the logs, or an id of the document's outputDirectories.",
)
_path = click.option("-p", "--path", metavar="PATH", default=".", show_default=True, help="A folder in that directory.")


@cluster_file.verb("list", CLUSTER_COLUMNS, example="batchai cluster file list -c nc6cluster")
@named("cluster", option=("-c", "--cluster"))
@click.option("-p", "--path", metavar="PATH", default=".", show_default=True, help="A folder below the setup task's own.")
def list_cluster(scope: Scope, name: str, path: str) -> Any:
    """The logs of a cluster's setup task, two of each node that has run it."""
    place = _setup_logs(find_cluster(scope, name))
    if place is None:
        notice(f"cluster '{name}' has no setup task, which could have written files")
        return []
    files = place.entries("")
    if not files:
        notice(f"the setup task of cluster '{name}' has not written anything yet; a node runs it before its first job")
        return []
    if path != ".":
        files = place.entries(path)
    return [
        {
            "name": entry.name,
            "isDirectory": entry.is_directory,
            "contentLength": None if entry.is_directory else entry.size,
            "downloadUrl": _url(place, file, entry, EXPIRY_MINUTES),
        }
        for file, entry in files.items()
    ]


def _setup_logs(cluster: Cluster) -> Directory | None:
    """Place of the logs of a cluster's setup task; None if it has none.

    Raises:
        ShareError: they lie where this machine can't read them.
    """
    from mlflow_batchai.plan.planning import choose_setup
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


@job_file.verb("list", JOB_COLUMNS, example="batchai job file list -j digits-3f2a1c -d MODEL -o table")
@_of_job
@_directory
@_path
@of_attempt
@click.option(
    "--expiry",
    type=click.IntRange(1),
    default=EXPIRY_MINUTES,
    show_default=True,
    help="For how many minutes download URLs are good.",
)
def list_job(scope: Scope, job: str, identity: str, path: str, attempt: int | None, expiry: int) -> Any:
    """Logs, or what lies in an output directory."""
    from mlflow_batchai.cluster.workspaces import iso
    from mlflow_batchai.tracking import directories

    place = directories.directory(find_job(scope, job, attempt).job, identity)
    return [
        {
            "name": entry.name,
            "fileType": "directory" if entry.is_directory else "file",
            "contentLength": None if entry.is_directory else entry.size,
            "lastModified": iso(None if entry.modified is None else int(entry.modified * 1000)),
            "downloadUrl": _url(place, file, entry, expiry),
        }
        for file, entry in place.entries(path).items()
    ]


def _url(place: Directory, path: str, entry: Entry, minutes: int) -> str | None:
    """Address to download a file for so long; None for a folder, or with a notice if there can be none."""
    from mlflow_batchai.storage.opening import download_url

    if entry.is_directory:
        return None
    try:
        return download_url(place.share, place.inside(path), minutes)
    except ShareError as error:
        notice(f"no download URLs: {error}")
        return None


@job_file.verb("stream", example="batchai job file stream -j digits-3f2a1c -f stdout.txt")
@_of_job
@click.option("-f", "--file-name", "file", metavar="NAME", required=True, help="The file; it may come later.")
@_directory
@_path
@of_attempt
def stream(scope: Scope, job: str, file: str, identity: str, path: str, attempt: int | None) -> None:
    """Print a file as it grows, until the job has ended. Ctrl-C leaves the job running."""
    found = find_job(scope, job, attempt)
    show_text(growing(found, identity, f"{path}/{file}"), found.job.name)


def growing(found: Submitted, identity: str, path: str, required: bool = True) -> Iterator[str]:
    """A file of a job's directory as it grows (``streaming.stream_file``); what there is to say goes to standard error."""
    from mlflow_batchai.client import streaming

    return streaming.stream_file(
        found,
        identity,
        path,
        notice,
        lambda address: notice(f"{address} (Ctrl-C leaves the job running)"),
        lambda sentence: echo(f"\nbatchai: {sentence}", err=True),
        required,
    )


def show_text(pieces: Iterable[str], job: str) -> None:
    """Print text as it comes; Ctrl-C, and a reader that leaves (``| head``), end that and nothing else."""
    try:
        for piece in fit_pieces(pieces, sys.stdout):
            sys.stdout.write(writable(piece, sys.stdout))
            sys.stdout.flush()
    except KeyboardInterrupt:
        click.echo(f"\nbatchai: job {job} goes on", err=True)
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        silence(sys.stdout)
