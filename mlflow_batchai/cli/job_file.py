"""``batchai job file``: what a job writes, while it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from mlflow_batchai.cli.job_lookup import find_job, of_attempt
from mlflow_batchai.cli.options import Scope, command, named, notice
from mlflow_batchai.cli.output import Column
from mlflow_batchai.cli.streaming import show_text, stream_file
from mlflow_batchai.errors import ShareError

if TYPE_CHECKING:
    from mlflow_batchai.storage.base import Entry
    from mlflow_batchai.tracking.directories import Directory


def _size(file: Mapping[str, Any]) -> object:
    return "" if file["fileType"] == "directory" else file["contentLength"]


COLUMNS: list[Column] = [("Name", "name"), ("Type", "fileType"), ("Size", _size), ("Modified", "lastModified")]

_DIRECTORY = click.option(
    "-d",
    "--output-directory-id",
    "identity",
    metavar="ID",
    default="stdouterr",
    show_default=True,
    help="stdouterr for the logs, or an id of the document's outputDirectories.",
)
_PATH = click.option("-p", "--path", metavar="PATH", default=".", show_default=True, help="A folder in that directory.")


@command(COLUMNS, example="batchai job file list -j digits-3f2a1c -d MODEL -o table", experiment=True)
@named("job", ("-j", "--job"), dest="job")
@_DIRECTORY
@_PATH
@of_attempt
@click.option(
    "--expiry", type=click.IntRange(1), default=60, show_default=True, help="For how many minutes download URLs are good."
)
def list_files(scope: Scope, job: str, identity: str, path: str, attempt: int | None, expiry: int) -> Any:
    """Logs, or what lies in an output directory."""
    from mlflow_batchai.tracking import directories

    place = directories.directory(find_job(scope, job, attempt).job, identity)
    return [_shown(place, file, entry, expiry) for file, entry in place.entries(path).items()]


def _shown(place: Directory, path: str, entry: Entry, expiry: int) -> dict[str, Any]:
    """A file as Batch AI's command showed it."""
    from mlflow_batchai.cluster.workspaces import iso

    return {
        "name": entry.name,
        "fileType": "directory" if entry.is_directory else "file",
        "contentLength": None if entry.is_directory else entry.size,
        "lastModified": iso(None if entry.modified is None else int(entry.modified * 1000)),
        "downloadUrl": url_of(place, path, entry, expiry),
    }


def url_of(place: Directory, path: str, entry: Entry, minutes: int) -> str | None:
    """Where a file can be downloaded from for so long; None for a folder, and where that can't be had, which is said."""
    from mlflow_batchai.storage.opening import download_url

    if entry.is_directory:
        return None
    try:
        return download_url(place.share, place.inside(path), minutes)
    except ShareError as error:
        notice(f"no download URLs: {error}")
        return None


@command(example="batchai job file stream -j digits-3f2a1c -f stdout.txt", experiment=True)
@named("job", ("-j", "--job"), dest="job")
@click.option("-f", "--file-name", "file", metavar="NAME", required=True, help="The file; it may come later.")
@_DIRECTORY
@_PATH
@of_attempt
def stream(scope: Scope, job: str, file: str, identity: str, path: str, attempt: int | None) -> None:
    """Print a file as it grows, until the job has ended. Ctrl-C leaves the job running."""
    found = find_job(scope, job, attempt)
    show_text(stream_file(found, identity, f"{path}/{file}"), found.job.name)
