"""``batchai storage share``: the file shares of a storage account."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mlflow_batchai.cli.options import ask, command, confirmed, named, notice
from mlflow_batchai.cli.output import Column
from mlflow_batchai.cli.storage import on_account, shown_time

if TYPE_CHECKING:
    from mlflow_batchai.storage.accounts import Account

COLUMNS: list[Column] = [("Name", "name"), ("Quota", "properties.quota"), ("Last Modified", "properties.lastModified")]


@command(example="batchai storage share create -n batchaishare --account-name mystorage", scoped=False)
@named("file share")
@click.option("--quota", type=click.IntRange(1, 102400), metavar="GIB", help="How much it may hold.  [5120]")
@on_account
def create(account: Account, name: str, quota: int | None) -> Any:
    """Make a file share. One that is there already is left as it is: `"created": false`."""
    if quota and account.folder:
        notice("--quota plays no part for a directory: it holds what the disk does")
    return {"created": account.create(name, quota)}


@command(COLUMNS, example="batchai storage share list --account-name mystorage -o table", scoped=False)
@on_account
def list_shares(account: Account) -> Any:
    """All file shares of an account, by name; the quota is in GiB."""
    return [
        {"name": entry.name, "properties": {"lastModified": shown_time(entry.modified), "quota": entry.quota}}
        for entry in account.list()
    ]


@command(example="batchai storage share delete -n batchaishare --account-name mystorage -y", scoped=False)
@named("file share")
@on_account
@confirmed
def delete(account: Account, name: str, yes: bool) -> Any:
    """Delete a file share and all that is on it."""
    ask(f"Delete the file share {name} of the storage account {account.name}, and all that is on it?", yes)
    account.delete(name)
    return {"deleted": True}
