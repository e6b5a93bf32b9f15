"""The MLflow side of a job: its run, the tags that are the index of jobs, and addresses that hold on any folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit, urlunsplit

from mlflow_batchai import shell
from mlflow_batchai.errors import ClusterError, JobNotFoundError, UsageError

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

TAG_JOB = "batchai.job"
TAG_CLUSTER = "batchai.cluster"
TAG_WORKSPACE = "batchai.workspace"
TAG_SHARE = "batchai.share"
TAG_FOLDER = "batchai.folder"
TAG_STATE = "batchai.executionState"
PAGE = 1000


@dataclass(frozen=True)
class Tracking:
    """Where runs are kept.

    Attributes:
        uri: absolute, without user info: fit for argv and for showing.
        environment: what a process needs besides, to reach it (user and password of the address).
    """

    uri: str
    environment: Mapping[str, str]


def absolute(uri: str, cwd: Path) -> Tracking:
    """A tracking address that means the same from any folder, its user and password taken out of it."""
    environment: dict[str, str] = {}
    if uri.startswith("sqlite:///"):
        return Tracking(f"sqlite:///{cwd / uri.removeprefix('sqlite:///')}", {})
    if uri.startswith("file:") and not uri.startswith("file:/"):
        return Tracking((cwd / uri.removeprefix("file:")).as_uri(), {})
    if ":" not in uri and uri not in ("databricks", "uc"):
        return Tracking(str(cwd / uri), {})
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https") and "@" in parts.netloc:
        if parts.username:
            environment["MLFLOW_TRACKING_USERNAME"] = parts.username
        if parts.password:
            environment["MLFLOW_TRACKING_PASSWORD"] = parts.password
        uri = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return Tracking(uri, environment)


def shown(uri: str) -> str:
    """An address without what follows a user name, for messages."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else uri


def client(tracking: Tracking) -> MlflowClient:
    """A client of that store."""
    for name, value in tracking.environment.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=tracking.uri)


def create(
    mlflow: MlflowClient,
    experiment_id: str,
    tags: Mapping[str, str],
    parameters: Mapping[str, str],
    run_name: str | None,
    run_id: str | None,
) -> Run:
    """Make the run (or take the one that was named), SCHEDULED, with the true values of the parameters.

    Raises:
        UsageError: the named run doesn't exist or isn't active, or has another value for a parameter.
    """
    from mlflow.entities import Param, RunTag
    from mlflow.exceptions import MlflowException

    if run_id:
        try:
            run = mlflow.get_run(run_id)
        except MlflowException as error:
            raise UsageError(f"--run-id {run_id}: {error.message}") from error
        if run.info.lifecycle_stage != "active":
            raise UsageError(f"--run-id {run_id}: the run is deleted")
        clash = [name for name, value in parameters.items() if run.data.params.get(name, value) != value]
        if clash:
            raise UsageError(
                f"--run-id {run_id}: the run has another value for parameter '{clash[0]}', and values can't be changed"
            )
    else:
        run = mlflow.create_run(experiment_id, tags=dict(tags), run_name=run_name)
    try:
        mlflow.log_batch(
            run.info.run_id,
            params=[Param(name, value) for name, value in parameters.items()],
            tags=[RunTag(name, value) for name, value in tags.items()] if run_id else [],
        )
        mlflow.update_run(run.info.run_id, status="SCHEDULED", name=run_name if run_id and run_name else None)
    except MlflowException:
        if not run_id:
            mlflow.set_terminated(run.info.run_id, "FAILED")
        raise
    return run


def fail(mlflow: MlflowClient, run_id: str, reason: str) -> None:
    """End the run of a job that could not be submitted."""
    mlflow.set_tag(run_id, "batchai.reason", reason)
    mlflow.set_tag(run_id, TAG_STATE, "failed")
    mlflow.set_terminated(run_id, "FAILED")


def find(mlflow: MlflowClient, name: str) -> Run:
    """The run of a job, by its name, its id, or the run's id; the newest if several jobs have had the name.

    Raises:
        JobNotFoundError: there is none; the message names some that exist.
    """
    from mlflow.exceptions import MlflowException

    if len(name) == 32:
        try:
            run = mlflow.get_run(name)
            if TAG_JOB in run.data.tags:
                return run
        except MlflowException:
            pass
    if "'" not in name and '"' not in name:
        found = _search(mlflow, f"tags.`{TAG_JOB}` = '{name}'", 1)
        if found:
            return found[0]
    known = [run.data.tags[TAG_JOB] for run in jobs(mlflow, limit=10)]
    hint = (
        f"; the newest are: {', '.join(known)}" if known else "; this tracking store has no jobs (is MLFLOW_TRACKING_URI set?)"
    )
    raise JobNotFoundError(f"there is no job '{name}'{hint}")


def jobs(mlflow: MlflowClient, limit: int = PAGE) -> list[Run]:
    """Runs of jobs, newest first."""
    return _search(mlflow, f"tags.`{TAG_JOB}` LIKE '%'", limit)


def _search(mlflow: MlflowClient, condition: str, limit: int) -> list[Run]:
    experiments = [experiment.experiment_id for experiment in mlflow.search_experiments(max_results=PAGE)]
    if not experiments:
        return []
    return list(mlflow.search_runs(experiments, condition, max_results=limit, order_by=["attributes.start_time DESC"]))


def source_tags(uri: str, entry_point: str, directory: Path, user: str) -> dict[str, str]:
    """MLflow's own tags of a project run (``mlflow.utils.mlflow_tags``), as its local backend sets them."""
    tags = {
        "mlflow.user": user,
        "mlflow.source.name": uri,
        "mlflow.source.type": "PROJECT",
        "mlflow.project.entryPoint": entry_point,
        "mlflow.project.backend": "batchai",
    }
    commit = _git_commit(directory)
    if commit:
        tags["mlflow.source.git.commit"] = commit
    return tags


def _git_commit(directory: Path) -> str | None:
    try:
        result = shell.run(["git", "-C", str(directory), "rev-parse", "HEAD"], timeout=10)
    except ClusterError:  # no git here
        return None
    return result.out.strip() if result.code == 0 else None


def page(uri: str, experiment_id: str, run_id: str) -> str | None:
    """The run's page in MLflow's UI, where the store is a server."""
    if not uri.startswith(("http://", "https://")):
        return None
    return f"{shown(uri).rstrip('/')}/#/experiments/{quote(experiment_id)}/runs/{quote(run_id)}"
