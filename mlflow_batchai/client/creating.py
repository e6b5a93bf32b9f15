"""From what was prepared to a job: its files on the share, its run, its folder, its agents and its follower; or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mlflow_batchai import config
from mlflow_batchai.agent import protocol
from mlflow_batchai.cluster.clusters import Cluster, share_secret
from mlflow_batchai.cluster.workspaces import arm_id
from mlflow_batchai.errors import ProjectError, UsageError
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.follower.starting import attempt_fails_with_it, run_fails_with_it, start
from mlflow_batchai.job import folders, signing
from mlflow_batchai.job.jobs import Job, Origin
from mlflow_batchai.job.places import segment as place_of
from mlflow_batchai.job.signing import Signature
from mlflow_batchai.plan.prepared import Prepared
from mlflow_batchai.storage.objects import upload
from mlflow_batchai.storage.sweeps import settle
from mlflow_batchai.tracking import index, runs
from mlflow_batchai.tracking.runs import Tracking


@dataclass(frozen=True)
class RunRequest:
    """What a job's MLflow run is to be.

    Attributes:
        tags: MLflow's own tags of the run.
        run_id: an existing run to use, or None.
        resource_group: part of the job's id; None: the default one.
        unique: whether its workspace and experiment may have no other job of that name.
    """

    tracking: Tracking
    experiment_id: str
    experiment_name: str
    workspace: str
    tags: Mapping[str, str]
    run_name: str | None = None
    run_id: str | None = None
    resource_group: str | None = None
    unique: bool = False


def submit(
    prepared: Prepared, cluster: Cluster, request: RunRequest, progress: Callable[[int, int], None] | None = None
) -> Submitted:
    """Send the code, make the run, write the job folder, start the agents, start the follower.

    A submit that fails half-way is undone: what was started is ended, and a run that was made is FAILED with the reason.

    Args:
        progress: told (bytes sent, bytes to send) while files go up.

    Raises:
        BatchAIError: it could not be submitted.
    """
    share = cluster.share
    sets = (prepared.code, prepared.inputs, prepared.tools)
    if len(protocol.encode([prepared.plan.record()])) > protocol.LONGEST_DOCUMENT - protocol.LONGEST_RECORD:
        raise ProjectError(
            f"the project and its parameters have {sum(map(len, sets))} files, more than a plan takes: leave some out"
            " (.batchaiignore or .gitignore), or put them on the share in one archive"
        )
    for files in sets:
        upload(share, files, progress)
    folders.note(share, prepared.plan.folder_prefix)
    segment = place_of(request.workspace, request.experiment_name, prepared.name, prepared.job_id)
    folder = "/".join(part for part in (prepared.plan.folder_prefix, segment) if part)
    mlflow = runs.client(request.tracking)
    with contextlib.ExitStack() as undo:
        run = runs.create(
            mlflow,
            request.experiment_id,
            {**request.tags, **_tags(prepared, cluster, request), runs.TAG_FOLDER: folder},
            prepared.parameters,
            request.run_name,
            request.run_id,
        )
        run_id = run.info.run_id
        undo.enter_context(run_fails_with_it(request.tracking, run_id))
        if request.unique and not index.is_first(mlflow, run):
            mlflow.delete_run(run_id)  # so that it doesn't take the name
            raise UsageError(f"somebody else has just started a job '{prepared.name}' in '{request.experiment_name}'")
        plan = replace(
            prepared.plan,
            secret_variables=tuple(sorted(prepared.secrets)),
            name=prepared.name,
            cluster=cluster.name,
            workspace=request.workspace,
            experiment=request.experiment_name,
            experiment_id=request.experiment_id,
            run_id=run_id,
            run_name=run.info.run_name or "",
            run_parameters=dict(prepared.parameters),
            segment=segment,
            folder=folder,
        )
        paths = protocol.JobPaths(folder)
        undo.enter_context(attempt_fails_with_it(share, folder))
        share.write(paths.spec, protocol.encode([prepared.document]))
        if prepared.changes:
            share.write(paths.code, protocol.encode([prepared.changes]))
        signed = signing.sign(paths.plan, plan.record())
        share.write(paths.plan, protocol.encode([signed]))
        settle(share, sets)
        told = {
            "variables": prepared.secrets,
            "share": share_secret(cluster.location, prepared.seconds),
            **prepared.credentials,
        }
        origin = Origin(plan, signing.examine(paths.plan, signed)[0], Signature.OWN)
        submitted = Submitted(Job(share, folder, 1, origin), run_id, request.tracking)
        start(submitted, cluster, told)
    return submitted


def _tags(prepared: Prepared, cluster: Cluster, request: RunRequest) -> dict[str, str]:
    """The tags by which jobs are found; what goes without saying isn't said."""
    group = request.resource_group or config.default("resource_group") or config.RESOURCE_GROUP
    # A cluster may belong to another workspace than its job.
    placed = {runs.TAG_RESOURCE_GROUP: group, runs.TAG_CLUSTER_ID: _cluster_id(cluster)}
    usual = (config.RESOURCE_GROUP, arm_id(group, request.workspace, "clusters", cluster.name))
    return {
        runs.TAG_JOB: prepared.name,
        runs.TAG_CLUSTER: cluster.name,
        runs.TAG_WORKSPACE: request.workspace,
        runs.TAG_SHARE: cluster.share.url,
        runs.TAG_STATE: protocol.QUEUED,
        **{tag: value for tag, value in placed.items() if value not in usual},
        runs.TAG_TOOL: prepared.plan.framework,
        runs.TAG_ENGINE: cluster.document.engine.value,
        **runs.sizes(prepared.plan),
    }


def _cluster_id(cluster: Cluster) -> str:
    record = cluster.record
    group, workspace = (record.resource_group, record.workspace) if record else (config.RESOURCE_GROUP, config.WORKSPACE)
    return arm_id(group, workspace, "clusters", cluster.name)
