"""Experiments: MLflow's, with tags for the workspace that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mlflow_batchai.cluster.workspaces import arm_id, iso
from mlflow_batchai.config import RESOURCE_GROUP, WORKSPACE
from mlflow_batchai.errors import ExperimentNotFoundError, UsageError, some_of

if TYPE_CHECKING:
    from mlflow.entities import Experiment
    from mlflow.tracking import MlflowClient

TAG_WORKSPACE, TAG_GROUP = "batchai.workspace", "batchai.resourceGroup"
PAGE = 1000


def every(mlflow: MlflowClient, **which: Any) -> list[Experiment]:
    """All experiments of a store, the newest first.

    Args:
        which: as MLflow's ``search_experiments`` takes it; default: those that are not deleted.
    """
    return list(pages(lambda token: mlflow.search_experiments(max_results=PAGE, page_token=token, **which)))


def pages(search: Callable[[str | None], Any]) -> Iterator[Any]:
    """All results of a search of MLflow. ``search``: gives the page of a token; None: the first one."""
    token = None
    while True:
        page = search(token)
        yield from page
        if not (token := page.token):
            return


def workspace_of(experiment: Experiment) -> str:
    """The workspace that an experiment stands under; one that `batchai` didn't make is in the default one."""
    return str(experiment.tags.get(TAG_WORKSPACE, WORKSPACE))


def find(mlflow: MlflowClient, name: str, workspace: str | None = None) -> Experiment:
    """An experiment by its name.

    Args:
        workspace: the one that it must stand under; None: any.

    Raises:
        ExperimentNotFoundError: there is none.
    """
    found = mlflow.get_experiment_by_name(name)
    if found and found.lifecycle_stage == "active" and workspace in (None, workspace_of(found)):
        return found
    known = [experiment.name for experiment in every(mlflow) if workspace in (None, workspace_of(experiment))]
    where = f" in workspace '{workspace}'" if workspace else ""
    hint = f"the experiments are: {some_of(known)}" if known else "there are none"
    raise ExperimentNotFoundError(f"there is no experiment '{name}'{where}; {hint}")


def create(mlflow: MlflowClient, name: str, workspace: str, resource_group: str) -> Experiment:
    """Make an experiment; one that is there already in that workspace is given as it is, as Batch AI's was.

    Raises:
        UsageError: the name is taken by another workspace's, or by a deleted one.
    """
    found = mlflow.get_experiment_by_name(name)
    if found is None:
        made = mlflow.create_experiment(name, tags={TAG_WORKSPACE: workspace, TAG_GROUP: resource_group})
        return mlflow.get_experiment(made)
    if found.lifecycle_stage != "active":
        raise UsageError(
            f"the experiment '{name}' was deleted and MLflow still keeps its name: restore it"
            f" (mlflow experiments restore --experiment-id {found.experiment_id}) or choose another"
        )
    if workspace_of(found) != workspace:
        raise UsageError(
            f"there is an experiment '{name}' in workspace '{workspace_of(found)}' already, and a tracking store has each name"
            " once; choose another"
        )
    return found


def view(experiment: Experiment) -> dict[str, Any]:
    """An experiment as Batch AI showed it, and MLflow's id of it."""
    group = experiment.tags.get(TAG_GROUP, RESOURCE_GROUP)
    made = experiment.creation_time
    created = iso(made) if made else None
    return {
        "id": arm_id(group, workspace_of(experiment), "experiments", experiment.name),
        "name": experiment.name,
        "type": "Microsoft.BatchAI/workspaces/experiments",
        "resourceGroup": group,
        "workspace": workspace_of(experiment),
        "creationTime": created,
        "provisioningState": "succeeded",
        "provisioningStateTransitionTime": created,
        "experimentId": experiment.experiment_id,
    }
