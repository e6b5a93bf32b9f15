"""What ``batchai storage`` commands have in common: which account, shapes of results, progress."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mlflow_batchai.cli.options import notice
from mlflow_batchai.cli.output import Column
from mlflow_batchai.errors import ShareError, UsageError

if TYPE_CHECKING:
    from mlflow_batchai.storage import Entry
    from mlflow_batchai.storage.accounts import Account

F = TypeVar("F", bound=Callable[..., Any])

FILE_COLUMNS: list[Column] = [
    ("Name", "name"),
    ("Content Length", "properties.contentLength"),
    ("Type", "type"),
    ("Last Modified", "properties.lastModified"),
]

in_share = click.option("-s", "--share-name", "share", metavar="NAME", required=True, help="The file share.")


def on_account(function: F) -> F:
    """Options that say which storage account a command works on; the function gets it as ``account``."""

    @functools.wraps(function)
    def run(**values: Any) -> Any:
        options = (values.pop(name) for name in ("account_name", "account_key", "sas_token", "connection_string", "auth_mode"))
        return function(account=_account(*options), **values)

    better = "{} of the account; safer in {}: others see command lines."
    wrapped: Callable[..., Any] = run
    for option in (
        click.option(
            "--auth-mode",
            type=click.Choice(["key", "login"]),
            default="key",
            help="key, or who `az login` has logged in.  [key]",
        ),
        click.option(
            "--connection-string", metavar="TEXT", help=better.format("Connection string", "AZURE_STORAGE_CONNECTION_STRING")
        ),
        click.option("--sas-token", metavar="SAS", help=better.format("Shared access signature", "AZURE_STORAGE_SAS_TOKEN")),
        click.option("--account-key", metavar="KEY", help=better.format("Key", "AZURE_STORAGE_KEY")),
        click.option(
            "--account-name",
            metavar="NAME",
            help="Storage account.  [AZURE_BATCHAI_STORAGE_ACCOUNT, or AZURE_STORAGE_ACCOUNT]",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


def _account(name: str | None, key: str | None, sas: str | None, connection: str | None, auth_mode: str) -> Account:
    from mlflow_batchai.storage import accounts, credentials
    from mlflow_batchai.storage.credentials import Credential

    login = auth_mode == "login"
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
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    with click.progressbar(length=size, label=label, file=sys.stderr) as bar:
        yield bar.update
