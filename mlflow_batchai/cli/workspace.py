"""``batchai workspace``: the workspaces that clusters, experiments and jobs belong to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from mlflow_batchai.cli.options import Noun, Scope, ask, confirmed, named, new_name, notice, tracking
from mlflow_batchai.cli.output import Column
from mlflow_batchai.cluster import workspaces

F = TypeVar("F", bound=Callable[..., Any])
COLUMNS: list[Column] = [
    ("Name", "name"),
    ("Resource Group", "resourceGroup"),
    ("Location", "location"),
    ("State", "provisioningState"),
]

workspace = Noun("workspace")


def _named(function: F) -> F:
    """The workspace's name, also by -w, as ``az batchai`` took it; never the default one, which nobody has typed."""

    @functools.wraps(function)
    def run(scope: Scope, name: str | None, **values: Any) -> Any:
        typed = click.get_current_context().get_parameter_source("workspace_") is ParameterSource.COMMANDLINE
        if not name and not typed:
            raise click.UsageError("the name of the workspace is missing: -n NAME")
        return function(scope, name or scope.workspace, **values)

    return named("workspace", optional=True)(run)  # type: ignore[return-value]


@workspace.verb("create", COLUMNS, example="batchai workspace create -n vision -l eastus")
@_named
@click.option("-l", "--location", metavar="NAME", help="Shown with the workspace; nothing depends on it.")
def create(scope: Scope, name: str, location: str | None) -> Any:
    """Make a workspace. One that is there already is shown."""
    return workspaces.create(new_name(name, "workspace"), scope.resource_group, location)


@workspace.verb("show", COLUMNS, example="batchai workspace show vision")
@_named
def show(scope: Scope, name: str) -> Any:
    """A workspace."""
    return workspaces.find(name)


@workspace.verb("list", COLUMNS, example="batchai workspace list -o table")
def list_workspaces(scope: Scope) -> Any:
    """All workspaces; `default` is always there."""
    return [workspaces.find(name) for name in workspaces.names()]


@workspace.verb("delete", example="batchai workspace delete vision -y")
@_named
@confirmed
@click.option("--no-wait", is_flag=True, help="Has no effect: clusters are gone when their jobs have ended.")
def delete(scope: Scope, name: str, yes: bool, no_wait: bool) -> None:
    """Delete a workspace and its clusters, ending their jobs. Experiments and their runs stay in MLflow."""
    from mlflow_batchai.client import resizing
    from mlflow_batchai.cluster import records

    workspaces.check_delete(name)
    clusters = records.in_workspace(name)
    ask(f"Delete workspace {name}" + (f" and its clusters ({', '.join(clusters)})?" if clusters else "?"), yes)
    for cluster in clusters:
        resizing.delete(cluster, tracking, notice)
    workspaces.delete(name)
