"""``batchai experiment``: MLflow experiments by Batch AI's verbs."""

from __future__ import annotations

from typing import Any

import click

from mlflow_batchai.cli.options import Noun, Scope, ask, confirmed, named, new_name, tracking
from mlflow_batchai.cli.output import Column
from mlflow_batchai.cluster import workspaces
from mlflow_batchai.errors import UsageError
from mlflow_batchai.tracking import experiments

COLUMNS: list[Column] = [
    ("Name", "name"),
    ("Resource Group", "resourceGroup"),
    ("Workspace", "workspace"),
    ("State", "provisioningState"),
]

experiment = Noun("experiment")


def _client() -> Any:
    from mlflow_batchai.tracking import runs

    return runs.client(tracking())


@experiment.verb("create", COLUMNS, example="batchai experiment create -n digits -w vision")
@named("experiment")
def create(scope: Scope, name: str) -> Any:
    """Make an experiment in a workspace. One that is there already is shown."""
    new_name(name, "experiment")
    workspaces.find(scope.workspace)
    return experiments.view(experiments.create(_client(), name, scope.workspace, scope.resource_group))


@experiment.verb("show", COLUMNS, example="batchai experiment show digits")
@named("experiment")
def show(scope: Scope, name: str) -> Any:
    """An experiment: where it stands, and MLflow's id of it."""
    return experiments.view(experiments.find(_client(), name, _workspace(scope)))


@experiment.verb("list", COLUMNS, example="batchai experiment list -w vision -o table")
def list_experiments(scope: Scope) -> Any:
    """The experiments of a workspace; of all workspaces if none is named."""
    wanted = _workspace(scope)
    found = [experiments.view(experiment) for experiment in experiments.every(_client())]
    return [row for row in found if wanted in (None, row["workspace"])]


@experiment.verb("delete", example="batchai experiment delete digits -y")
@named("experiment")
@confirmed
@click.option("--no-wait", is_flag=True, help="Has no effect: nothing has to be waited for.")
def delete(scope: Scope, name: str, yes: bool, no_wait: bool) -> None:
    """Delete an experiment with its runs. MLflow keeps it until `mlflow gc`, and can restore it.

    Files of its jobs stay on their shares until `batchai gc`.
    """
    from mlflow.exceptions import MlflowException

    from mlflow_batchai.tracking import index, runs

    mlflow = _client()
    found = experiments.find(mlflow, name, _workspace(scope))
    if running := index.running(mlflow, [found.experiment_id]):
        listed = ", ".join(run.data.tags[runs.TAG_JOB] for run in running)
        raise UsageError(f"experiment '{name}' has jobs that have not ended: {listed}; wait for them or terminate them")
    ask(f"Delete experiment {name} with its runs?", yes)
    try:
        mlflow.delete_experiment(found.experiment_id)
    except MlflowException as error:
        raise UsageError(f"experiment '{name}' can't be deleted: {error.message}") from error


def _workspace(scope: Scope) -> str | None:
    """The workspace that the person named, which must be there."""
    return str(workspaces.find(scope.workspace)["name"]) if scope.workspace_given else None
