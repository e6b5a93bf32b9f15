"""The job that a person means: by name or run id, in the workspace and the experiment that were named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mlflow_batchai.cli.options import Scope, tracking
from mlflow_batchai.errors import JobNotFoundError, NotFoundError

if TYPE_CHECKING:
    from mlflow.entities import Run

    from mlflow_batchai.follower.detached import Submitted
    from mlflow_batchai.tracking.runs import Tracking

of_attempt = click.option(
    "--attempt", type=click.IntRange(1), metavar="N", help="Logs of an earlier attempt, from there on.  [the present one]"
)


def find_run(scope: Scope, name: str) -> tuple[Run, Tracking]:
    """The run of a job, and its store.

    Raises:
        NotFoundError: there is no such job, workspace or experiment.
    """
    from mlflow_batchai.cluster import workspaces
    from mlflow_batchai.tracking import experiments, index, runs

    store = tracking()
    mlflow = runs.client(store)
    experiment = experiments.find(mlflow, scope.experiment).experiment_id if scope.experiment_given else None
    workspace = scope.workspace if scope.workspace_given else None
    try:
        return index.find(mlflow, name, workspace, experiment), store
    except JobNotFoundError:
        # Jobs may stand under a workspace that has no record here: only now it matters.
        if workspace is not None:
            workspaces.find(workspace)
        raise


def find_job(scope: Scope, name: str, attempt: int | None = None) -> Submitted:
    """A job, its folder opened.

    Args:
        attempt: the one that it is to be at; None: the present one.

    Raises:
        NotFoundError: there is no such job, workspace, experiment or attempt.
        NoFolderError: its folder is not on its share.
        ShareError: its share is not on this machine.
    """
    from mlflow_batchai.client import lookup

    found = lookup.of_run(*find_run(scope, name))
    if attempt is not None:
        if attempt > found.job.attempt:
            raise NotFoundError(f"job {found.job.name} has no attempt {attempt}; it has {found.job.attempt}")
        found.job = found.job.at(attempt)
        found.job.terms()  # it may have had fewer ranks
    return found
