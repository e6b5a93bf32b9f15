"""``batchai cluster file``: what the setup task of a cluster wrote."""

from __future__ import annotations

from typing import Any

import click

from mlflow_batchai.cli.cluster_lookup import find_cluster
from mlflow_batchai.cli.options import Scope, command, named, notice
from mlflow_batchai.cli.output import Column

COLUMNS: list[Column] = [("Name", "name"), ("Is directory", "isDirectory"), ("Size", "size")]


@command(COLUMNS, example="batchai cluster file list -c nc6cluster")
@named("cluster", option=("-c", "--cluster"))
@click.option("-p", "--path", metavar="PATH", expose_value=False, help="A folder below the setup task's own.")
def list_files(scope: Scope, name: str) -> Any:
    """The logs of a cluster's setup task; none, since clusters with one can't be used yet."""
    find_cluster(scope, name)
    notice(f"cluster '{name}' has no setup task, which could have written files")
    return []
