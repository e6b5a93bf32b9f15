"""``batchai gc``: free what ended jobs have left."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.filesize import decimal

from mlflow_batchai.cli.options import ask, command, confirmed, notice, tracking
from mlflow_batchai.cli.output import Column, render
from mlflow_batchai.config import database_file
from mlflow_batchai.errors import BatchAIError

if TYPE_CHECKING:
    from mlflow_batchai.admin.gc import Item

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def _age(row: Any) -> str:
    if row["modified"] is None:
        return ""
    seconds = time.time() - datetime.fromisoformat(row["modified"]).timestamp()
    unit = "d" if seconds >= 86400 else "h"
    return f"{max(seconds, 0) / _UNITS[unit]:.0f}{unit}"


COLUMNS: list[Column] = [
    ("Kind", "kind"),
    ("What", "path"),
    ("Age", _age),
    ("Size", lambda row: decimal(row["bytes"])),
    ("Why", "reason"),
]


def _seconds(context: click.Context, param: click.Parameter, value: str) -> float:
    found = re.fullmatch(r"(?P<count>\d{1,6})(?P<unit>[mhdw])", value.strip())
    if not found:
        raise click.BadParameter(f"'{value}' is no length of time; write 12h, 30d or 2w", context, param)
    return int(found["count"]) * _UNITS[found["unit"]]


@command(COLUMNS, example="batchai gc --older-than 2w --dry-run", scoped=False, output="table")
@click.option(
    "--older-than",
    callback=_seconds,
    default="30d",
    show_default=True,
    metavar="TIME",
    help="What ended, or was used last, longer ago: 12h, 30d, 2w.",
)
@click.option("-c", "--cluster", metavar="CLUSTER", help="Only this cluster's share and nodes.  [all]")
@click.option("--dry-run", is_flag=True, help="Show what would be freed, and free nothing.")
@confirmed
def gc(older_than: float, cluster: str | None, dry_run: bool, yes: bool) -> list[dict[str, Any]] | None:
    """Free what ended jobs have left, after showing it.

    On control shares: folders of jobs that have ended, with their logs and outputs there (MLflow has copies of what was sent to
    it), of jobs whose run was deleted whatever their age, and staged files that no job names any more. On nodes and on this
    machine: built environments, kept job preparations, tools, agents of other versions, logs and Horovod wheels.

    What a job may still need stays. It can be interrupted, and run again.
    """
    from mlflow_batchai.admin.gc import Age, find

    items = find(Age(older_than), notice, cluster, _deleted_runs())
    rows = [item.row() for item in items]
    total = f"{len(items)} thing{'' if len(items) == 1 else 's'}, {decimal(sum(item.size for item in items))}"
    if not items:
        notice("there is nothing to free")
        return []
    if dry_run:
        notice(f"{total}, would be freed")
        return rows
    if not yes:
        click.echo(render(rows, "table", COLUMNS), err=True)
        ask(f"Free {total}?", yes)
    freed = _free(items)
    # Who was asked has seen the list.
    return freed if yes else None


def _free(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Free all that will go. Raises BatchAIError: something could not be freed; all else was."""
    freed, errors = [], []
    for item in items:
        try:
            if item.remove():
                freed.append(item)
            else:
                notice(f"{item.path} is in use by now, and stays")
        except BatchAIError as error:
            errors.append(f"{item.path} stays: {error}")
    told = f"freed {decimal(sum(item.size for item in freed))}"
    if errors:
        raise BatchAIError("; ".join([*errors[:3], *([f"{len(errors) - 3} more"] if len(errors) > 3 else []), told]))
    notice(told)
    return [item.row() for item in freed]


def _deleted_runs() -> set[str]:
    """Ids of jobs' runs that were deleted, if there is a tracking store here; it is not made for that."""
    store = tracking()
    path = database_file(store.uri) or store.uri
    if "://" not in path and not Path(path).exists():
        return set()
    from mlflow_batchai.tracking import index, runs

    try:
        return index.deleted(runs.client(store))
    except Exception as error:  # whatever a store may raise, jobs can be judged by their age
        notice(f"MLflow's store {store.uri} can't be asked which runs were deleted: {' '.join(str(error).split())[:200]}")
        return set()
