"""``batchai workspace``: what clusters, experiments and jobs stand under."""

from __future__ import annotations

from typing import Any

import click

from mlflow_batchai.cli.options import Scope, command, named, new_name
from mlflow_batchai.cli.output import Column

COLUMNS: list[Column] = [
    ("Name", "name"),
    ("Resource Group", "resourceGroup"),
    ("Location", "location"),
    ("State", "provisioningState"),
]


@command(COLUMNS, example="batchai workspace create -n vision -l eastus")
@named("workspace")
@click.option("-l", "--location", metavar="NAME", help="Shown with the workspace; nothing depends on it.")
def create(scope: Scope, name: str, location: str | None) -> Any:
    """Make a workspace. One that is there already is shown."""
    from mlflow_batchai import workspaces

    return workspaces.create(new_name(name, "workspace"), scope.resource_group, location)


@command(COLUMNS, example="batchai workspace show vision")
@named("workspace")
def show(scope: Scope, name: str) -> Any:
    """A workspace."""
    from mlflow_batchai import workspaces

    return workspaces.find(name)


@command(COLUMNS, example="batchai workspace list -o table")
def list_workspaces(scope: Scope) -> Any:
    """All workspaces; `default` is always there."""
    from mlflow_batchai import workspaces

    return [workspaces.find(name) for name in workspaces.names()]
