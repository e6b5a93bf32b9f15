"""``batchai storage``: the file shares of a storage account, their directories and files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from mlflow_batchai.cli.options import Noun, ask, confirmed, gathered, named, notice
from mlflow_batchai.cli.output import Column
from mlflow_batchai.errors import ShareError, StorageNotFoundError, UsageError
from mlflow_batchai.terminal import is_quiet

if TYPE_CHECKING:
    from mlflow_batchai.storage import Entry, Share
    from mlflow_batchai.storage.accounts import Account

SHARE_COLUMNS: list[Column] = [("Name", "name"), ("Quota", "properties.quota"), ("Last Modified", "properties.lastModified")]
FILE_COLUMNS: list[Column] = [
    ("Name", "name"),
    ("Content Length", "properties.contentLength"),
    ("Type", "type"),
    ("Last Modified", "properties.lastModified"),
]

storage = Noun("storage")
_shares = Noun("share", "File shares of an account.", scoped=False)
_directories = Noun("directory", "Directories of a file share.", scoped=False)
_files = Noun("file", "Files of a file share.", scoped=False)
for _noun in (_shares, _directories, _files):
    storage.add_command(_noun)


def _account(
    account_name: str | None, account_key: str | None, sas_token: str | None, connection_string: str | None, auth_mode: str
) -> Account:
    """The storage account that a command works on."""
    from mlflow_batchai.storage import accounts, credentials
    from mlflow_batchai.storage.credentials import Credential

    name, key, sas, connection, login = account_name, account_key, sas_token, connection_string, auth_mode == "login"
    options = {"--account-key": key, "--sas-token": sas, "--connection-string": connection, "--auth-mode login": login}
    given = [option for option, value in options.items() if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} can't be given together; drop one")
    found, endpoint = Credential(key, sas), None
    if name and not given and not os.environ.get("AZURE_STORAGE_ACCOUNT"):
        # As `az`: a key in the environment for which no account is named is that of the account that is named here.
        found = Credential(os.environ.get("AZURE_STORAGE_KEY") or None, os.environ.get("AZURE_STORAGE_SAS_TOKEN") or None)
    if connection:
        connected = credentials.connection(connection)
        if connected is None or connected.credential == Credential():
            raise UsageError("--connection-string has no account's name, or nothing that opens it; copy all of it")
        if name and name.lower() != connected.account:
            raise UsageError(f"--connection-string is of the storage account '{connected.account}', not of '{name}'")
        name, found, endpoint = connected
    if not (name := name or accounts.default()):
        raise UsageError("no storage account is named: give --account-name, or set AZURE_STORAGE_ACCOUNT")
    if found != Credential():
        try:
            credentials.remember(name, found)
        except ShareError as error:
            raise UsageError(f"{given[0] if given else 'AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN'}: {error}") from error
    account = accounts.open_account(name, endpoint, login)
    if account.folder:
        notice(accounts.stand_in(account.name))
    return account


_SAFER = "{} of the account; safer in {}: others see command lines."
in_share = click.option("-s", "--share-name", "share", metavar="NAME", required=True, help="The file share.")
on_account = gathered(
    "account",
    _account,
    click.option(
        "--account-name", metavar="NAME", help="Storage account.  [AZURE_BATCHAI_STORAGE_ACCOUNT, or AZURE_STORAGE_ACCOUNT]"
    ),
    click.option("--account-key", metavar="KEY", help=_SAFER.format("Key", "AZURE_STORAGE_KEY")),
    click.option("--sas-token", metavar="SAS", help=_SAFER.format("Shared access signature", "AZURE_STORAGE_SAS_TOKEN")),
    click.option(
        "--connection-string", metavar="TEXT", help=_SAFER.format("Connection string", "AZURE_STORAGE_CONNECTION_STRING")
    ),
    click.option(
        "--auth-mode", type=click.Choice(["key", "login"]), default="key", help="key, or who `az login` has logged in.  [key]"
    ),
)


@_shares.verb("create", example="batchai storage share create -n batchaishare --account-name mystorage")
@named("file share")
@click.option("--quota", type=click.IntRange(1, 102400), metavar="GIB", help="How much it may hold.  [5120]")
@on_account
def create_share(account: Account, name: str, quota: int | None) -> Any:
    """Make a file share. One that is there already is left as it is: `"created": false`."""
    if quota and account.folder:
        notice("--quota plays no part for a directory: it holds what the disk does")
    return {"created": account.create(name, quota)}


@_shares.verb("list", SHARE_COLUMNS, example="batchai storage share list --account-name mystorage -o table")
@on_account
def list_shares(account: Account) -> Any:
    """All file shares of an account, by name; the quota is in GiB."""
    return [
        {"name": entry.name, "properties": {"lastModified": shown_time(entry.modified), "quota": entry.quota}}
        for entry in account.list()
    ]


@_shares.verb("delete", example="batchai storage share delete -n batchaishare --account-name mystorage -y")
@named("file share")
@on_account
@confirmed
def delete_share(account: Account, name: str, yes: bool) -> Any:
    """Delete a file share and all that is on it."""
    ask(f"Delete the file share {name} of the storage account {account.name}, and all that is on it?", yes)
    account.delete(name)
    return {"deleted": True}


@_directories.verb("create", example="batchai storage directory create -s batchaishare -n hvd --account-name mystorage")
@in_share
@named("directory")
@on_account
def create_directory(account: Account, share: str, name: str) -> Any:
    """Make a directory, and those above it. One that is there already is left as it is: `"created": false`."""
    from mlflow_batchai.storage.accounts import checked_path, find

    if not (path := checked_path(name)):
        raise UsageError("the name of the directory is empty")
    with account.using(share) as opened:
        made = opened.claim(path)
        if not made and not find(opened, path).is_directory:
            raise ShareError(f"there is a file '{path}' on the file share {account.name}/{share}; choose another name")
    return {"created": made}


@_files.verb(
    "upload",
    FILE_COLUMNS,
    example="batchai storage file upload -s batchaishare --source train.py -p hvd --account-name mystorage",
)
@in_share
@click.option("--source", metavar="FILE", required=True, help="A file of this machine.")
@click.option("-p", "--path", metavar="PATH", default="", help="Where to: a directory that is there or ends with /, or a file.")
@on_account
def upload(account: Account, share: str, source: str, path: str) -> Any:
    """Copy a file to a file share, in place of one of that name; its directory is made."""
    from mlflow_batchai.storage.accounts import find

    with _reading(source):
        content = _content(Path(source))
    with content as file, account.using(share) as opened:
        target, size = _target(opened, path, Path(source).name), os.fstat(file.fileno()).st_size
        with progress(f"{share}/{target}", size) as tell:
            opened.send(target, _Told(source, file, tell), size)
        return entry_shape(find(opened, target))


@contextlib.contextmanager
def _reading(source: str) -> Iterator[None]:
    """Raise an OSError of reading a file of this machine as UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--source: '{source}' can't be read: {error.strerror}") from error


def _content(source: Path) -> BinaryIO:
    if not source.is_file():
        raise UsageError(f"--source: '{source}' is no file of this machine; files are uploaded one at a time")
    return source.open("rb")


class _Told:
    """A file that tells how much is read of it."""

    def __init__(self, source: str, file: BinaryIO, tell: Callable[[int], None]) -> None:
        self._source = source
        self._file = file
        self._tell = tell

    def read(self, size: int) -> bytes:
        with _reading(self._source):
            data = self._file.read(size)
        self._tell(len(data))
        return data


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


@_files.verb(
    "download",
    FILE_COLUMNS,
    example="batchai storage file download -s batchaishare -p models/model.h5 --dest . --account-name mystorage",
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


@_files.verb("list", FILE_COLUMNS, example="batchai storage file list -s batchaishare -p hvd --account-name mystorage -o table")
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


@_files.verb("delete", example="batchai storage file delete -s batchaishare -p hvd/train.py --account-name mystorage -y")
@in_share
@click.option("-p", "--path", metavar="PATH", required=True, help="The file on the share.")
@on_account
@confirmed
def delete_file(account: Account, share: str, path: str, yes: bool) -> Any:
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


def entry_shape(entry: Entry) -> dict[str, Any]:
    """A file or folder as ``az storage file`` shows it."""
    return {
        "name": entry.name,
        "type": "dir" if entry.is_directory else "file",
        "properties": {
            "contentLength": None if entry.is_directory else entry.size,
            "lastModified": shown_time(entry.modified),
        },
    }


def shown_time(seconds: float | None) -> str | None:
    """Seconds since the epoch as ISO 8601, UTC."""
    return datetime.fromtimestamp(int(seconds), timezone.utc).isoformat() if seconds is not None else None


@contextlib.contextmanager
def progress(label: str, size: int) -> Iterator[Callable[[int], None]]:
    """What takes the number of bytes that came since its last call, and shows a person how far it is."""
    if not sys.stderr.isatty() or is_quiet():
        yield lambda count: None
        return
    with click.progressbar(length=size, label=label, file=sys.stderr) as bar:
        yield bar.update
