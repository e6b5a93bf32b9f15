"""``batchai job create``: a Batch AI job document that names its own program becomes a job and an MLflow run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlflow_batchai.cli.job import COLUMNS
from mlflow_batchai.cli.mount_options import MountOptions, mount_options
from mlflow_batchai.cli.options import Scope, command, named, new_name, notice, tracking
from mlflow_batchai.cli.output import Column, Tabular
from mlflow_batchai.config import default
from mlflow_batchai.errors import UsageError

if TYPE_CHECKING:
    from mlflow.entities import Experiment
    from mlflow.tracking import MlflowClient

    from mlflow_batchai.cluster.clusters import Cluster
    from mlflow_batchai.documents.job import JobDocument
    from mlflow_batchai.plan.planning import Terms

DEFAULT_EXPERIMENT = "Default"
MOST_RETRIES = 100  # as ``documents.batchai`` has it, whose import a command's help need not wait for
RANK_COLUMNS: list[Column] = [("Rank", "rank"), ("Node", "node"), ("Command", lambda rank: rank["argv"][-1])]


@command(COLUMNS, example="batchai job create -n myjob -c nc6 -f job.json", experiment=True)
@named("job")
@click.option("-c", "--cluster", "cluster_name", metavar="NAME", help="Cluster, by name or id.  [the document's]")
@click.option(
    "-f", "--config-file", "file", required=True, metavar="FILE", type=click.Path(path_type=Path), help="Job document."
)
@mount_options
@click.option("--retries", type=click.IntRange(0, MOST_RETRIES), default=0, help="How often it starts again if it fails.")
@click.option("--min-nodes", type=click.IntRange(1), help="Nodes that are enough for that.  [all of the job's]")
@click.option("--umask", type=click.Choice(["077", "022"]), default="077", help="The ranks'.", show_default=True)
@click.option("--dry-run", is_flag=True, help="Only show what each node would run, with secrets masked.")
def create(
    scope: Scope,
    name: str,
    cluster_name: str | None,
    file: Path,
    mounts: MountOptions,
    retries: int,
    min_nodes: int | None,
    umask: str,
    dry_run: bool,
) -> Any:
    """Start a job; returns at once, while it is queued.

    The document names the program (pythonScriptFilePath, commandLine); its arguments are the parameters of the MLflow run.
    """
    new_name(name, "job")
    file = file.absolute()
    mounts.use_account()
    from mlflow_batchai.plan.planning import Terms

    document = _read(file, mounts)
    terms = Terms(retries, min_nodes, umask=umask)
    if dry_run:
        return _described(scope, name, document, _cluster(cluster_name, document), file, terms)
    return _submitted(scope, name, document, cluster_name, file, terms)


def _read(file: Path, mounts: MountOptions) -> JobDocument:
    """The document with what the options mount besides."""
    from mlflow_batchai.documents.job import parse_job
    from mlflow_batchai.documents.reading import read

    data = read(file)
    properties = data.get("properties")
    if isinstance(properties, Mapping) and isinstance(properties.get("mountVolumes", {}), Mapping | None):
        data = {**data, "properties": {**properties, "mountVolumes": mounts.added_to(properties.get("mountVolumes"))}}
    document, warnings = parse_job(data, str(file))
    for warning in warnings:
        notice(warning)
    return document


def _cluster(named: str | None, document: JobDocument) -> Cluster:
    """The cluster that was named here, by the document, or as everybody's default."""
    from mlflow_batchai.cluster import clusters

    written = document.properties.cluster
    name = named or (written.name if written else None) or default("cluster")
    # An id of Azure's form ends in the name.
    cluster, warnings = clusters.load(name.rstrip("/").rpartition("/")[2] if name else None)
    for warning in warnings:
        notice(warning)
    return cluster


def _described(scope: Scope, name: str, document: JobDocument, cluster: Cluster, file: Path, terms: Terms) -> Tabular:
    """The job that would be started; neither the tracking store nor a node is asked."""
    from mlflow_batchai.plan import dryrun, standalone

    prepared = standalone.prepare(document, name, cluster, str(file), terms)
    for warning in prepared.warnings:
        notice(warning)
    standalone.check_script(prepared, document.properties, str(file))
    found = dryrun.describe(prepared, cluster, scope.workspace, scope.experiment or DEFAULT_EXPERIMENT)
    busy = {rank["node"] for rank in found["ranks"]}
    idle = [{"rank": None, "node": node["node"], "argv": [""]} for node in found["nodes"] if node["node"] not in busy]
    return Tabular(found, [*found["ranks"], *idle], RANK_COLUMNS)


def _submitted(
    scope: Scope, name: str, document: JobDocument, cluster_name: str | None, file: Path, terms: Terms
) -> dict[str, Any]:
    """Start the job, and show it."""
    from mlflow_batchai.client import creating, jobview, runner
    from mlflow_batchai.plan import standalone
    from mlflow_batchai.plan.volumes import check_volumes
    from mlflow_batchai.tracking import experiments, index, runs

    store = tracking()
    mlflow = runs.client(store)
    experiment = _experiment(scope, mlflow)
    workspace = scope.workspace if scope.workspace_given else experiments.workspace_of(experiment)
    if index.jobs(mlflow, 1, experiments=[experiment.experiment_id], name=name, workspace=workspace):
        raise UsageError(
            f"there is a job '{name}' in experiment '{experiment.name}' already; choose another name, or delete it first"
            f" (batchai job delete {name})"
        )
    cluster = _cluster(cluster_name, document)
    prepared = standalone.prepare(document, name, cluster, str(file), terms)
    for warning in prepared.warnings:
        notice(warning)
    check_volumes(prepared.plan.volumes, cluster)
    standalone.check_script(prepared, document.properties, str(file))
    checked = cluster.engine.check(prepared.plan.node_count, prepared.needs)
    for warning in checked.warnings:
        notice(warning)
    request = creating.RunRequest(
        store,
        experiment.experiment_id,
        experiment.name,
        workspace,
        runs.document_tags(file, runner.user()),
        name,
        resource_group=scope.resource_group,
        unique=True,
    )
    return jobview.view(creating.submit(prepared.with_tools(checked.missing), cluster, request))


def _experiment(scope: Scope, mlflow: MlflowClient) -> Experiment:
    """MLflow's experiment of that name, which must not be another workspace's."""
    from mlflow_batchai.cluster import workspaces
    from mlflow_batchai.tracking import experiments

    if scope.workspace_given:
        workspaces.find(scope.workspace)
    found = experiments.find(mlflow, scope.experiment or DEFAULT_EXPERIMENT)
    if scope.workspace_given and found.tags.get(experiments.TAG_WORKSPACE, scope.workspace) != scope.workspace:
        return experiments.find(mlflow, found.name, scope.workspace)
    return found
