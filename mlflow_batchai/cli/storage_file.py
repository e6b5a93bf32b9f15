"""``batchai storage file``: files of a file share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from mlflow_batchai.cli.options import ask, command, confirmed
from mlflow_batchai.cli.storage import FILE_COLUMNS, entry_shape, in_share, on_account, progress
from mlflow_batchai.errors import StorageNotFoundError, UsageError

if TYPE_CHECKING:
    from mlflow_batchai.storage import Entry, Share
    from mlflow_batchai.storage.accounts import Account


@command(
    FILE_COLUMNS,
    example="batchai storage file upload -s batchaishare --source train.py -p hvd --account-name mystorage",
    scoped=False,
)
@in_share
@click.option("--source", metavar="FILE", required=True, help="A file of this machine.")
@click.option("-p", "--path", metavar="PATH", default="", help="Where to: a directory that is there or ends with /, or a file.")
@on_account
def upload(account: Account, share: str, source: str, path: str) -> Any:
    """Copy a file to a file share, in place of one of that name; its directory is made."""
    from mlflow_batchai.storage.accounts import find

    try:
        file, size = _opened(Path(source))
    except OSError as error:
        raise UsageError(f"--source: '{source}' can't be read: {error.strerror}") from error
    with file, account.using(share) as opened:
        target = _target(opened, path, Path(source).name)
        with progress(f"{share}/{target}", size) as tell:
            opened.send(target, _Told(file, tell), size)
        return entry_shape(find(opened, target))


class _Told:
    """A file that tells how much is read of it."""

    def __init__(self, file: BinaryIO, tell: Callable[[int], None]) -> None:
        self._file = file
        self._tell = tell

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._tell(len(data))
        return data


def _opened(source: Path) -> tuple[BinaryIO, int]:
    if source.is_dir():
        raise UsageError(f"--source: '{source}' is a folder; files are uploaded one at a time")
    if source.exists() and not source.is_file():
        raise UsageError(f"--source: '{source}' is no file")
    file = source.open("rb")
    return file, os.fstat(file.fileno()).st_size


def _target(share: Share, path: str, name: str) -> str:
    """Where a file goes."""
    from mlflow_batchai.storage.accounts import checked_path, find

    folder = checked_path(path)
    if folder and not path.endswith("/"):
        try:
            if not find(share, folder).is_directory:
                return folder
        except StorageNotFoundError:
            return folder
    return checked_path(f"{folder}/{name}")


@command(
    FILE_COLUMNS,
    example="batchai storage file download -s batchaishare -p models/model.h5 --dest . --account-name mystorage",
    scoped=False,
)
@in_share
@click.option("-p", "--path", metavar="PATH", required=True, help="The file on the share.")
@click.option("--dest", metavar="PATH", help="A file or folder of this machine.  [the file's name, here]")
@on_account
def download(account: Account, share: str, path: str, dest: str | None) -> Any:
    """Copy a file from a file share, in place of one that is there: whole, or not at all."""
    with account.using(share) as opened:
        wanted, entry = _file(opened, path)
        target = _destination(dest, entry.name)
        with progress(str(target), entry.size) as tell:
            opened.download(wanted, target, tell)
    return entry_shape(entry)


def _destination(dest: str | None, name: str) -> Path:
    target = Path(dest) if dest else Path(name)
    if target.is_dir() or (dest and dest.endswith("/")):
        target = target / name
    # What a link leads to is replaced, and not the link.
    target = Path(os.path.realpath(target))
    if target.exists() and not target.is_file():
        raise UsageError(f"--dest: '{target}' is there already, and is no file")
    return target


@command(
    FILE_COLUMNS, example="batchai storage file list -s batchaishare -p hvd --account-name mystorage -o table", scoped=False
)
@in_share
@click.option("-p", "--path", metavar="PATH", default="", help="A directory.  [all of the share]")
@on_account
def list_files(account: Account, share: str, path: str) -> Any:
    """What lies in a directory, by name."""
    from mlflow_batchai.storage.accounts import checked_path, find

    with account.using(share) as opened:
        folder = checked_path(path)
        if folder and not find(opened, folder).is_directory:
            raise UsageError(f"'{folder}' is a file, not a directory")
        return [entry_shape(entry) for entry in opened.list(folder)]


@command(example="batchai storage file delete -s batchaishare -p hvd/train.py --account-name mystorage -y", scoped=False)
@in_share
@click.option("-p", "--path", metavar="PATH", required=True, help="The file on the share.")
@on_account
@confirmed
def delete(account: Account, share: str, path: str, yes: bool) -> Any:
    """Delete a file."""
    with account.using(share) as opened:
        wanted, _ = _file(opened, path)
        ask(f"Delete {wanted} from the file share {account.name}/{share}?", yes)
        opened.delete(wanted)
    return {"deleted": True}


def _file(share: Share, path: str) -> tuple[str, Entry]:
    """A file that is there: (its path, what is known of it)."""
    from mlflow_batchai.storage.accounts import checked_path, find

    wanted = checked_path(path)
    if not wanted:
        raise UsageError("--path names no file")
    entry = find(share, wanted)
    if entry.is_directory:
        raise UsageError(f"'{wanted}' is a directory, not a file; `batchai storage file list -p` shows what lies in it")
    return wanted, entry
