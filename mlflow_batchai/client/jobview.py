"""A job as ``batchai job show`` prints it: Batch AI's fields and ours.

Reference: its REST API 2018-05-01, resource ``workspaces/experiments/jobs``. The document's parts stand as they were submitted;
secrets are null, as Batch AI returned them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mlflow_batchai import config
from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.layout import node_id
from mlflow_batchai.agent.plan import Plan
from mlflow_batchai.client import runner
from mlflow_batchai.cluster import scaling
from mlflow_batchai.cluster.workspaces import arm_id, iso
from mlflow_batchai.documents.fields import format_duration
from mlflow_batchai.documents.job import FRAMEWORKS
from mlflow_batchai.errors import BatchAIError
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import LeaseState, LeaseView
from mlflow_batchai.job.places import DEFAULT_PREFIX
from mlflow_batchai.job.states import JobState, Snapshot, fold
from mlflow_batchai.storage import Share
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.tracking import reading, runs

if TYPE_CHECKING:
    from mlflow.entities import Run

TYPE = "Microsoft.BatchAI/workspaces/experiments/jobs"
# What a stored document has in place of a secret, and the keys that hold one.
_MASK, _SECRET_KEYS = "*" * 10, frozenset({"value", "accountKey", "password"})
_LISTS = ("inputDirectories", "outputDirectories", "environmentVariables", "secrets")
_BLOCKS = ("mountVolumes", "containerSettings", "jobPreparation")


def view(submitted: Submitted) -> dict[str, Any]:
    """All of a job, read from its folder and its run; ``submitted.job`` is at its present attempt afterwards."""
    runner.state(submitted)
    job = submitted.job
    run = reading.client(submitted.tracking).get_run(submitted.run_id)
    snapshot = job.snapshot()
    state = fold(snapshot)
    plan, tags = job.plan, runs.tags_of(run)
    followed, queued = submitted.followed(), state.execution_state == protocol.QUEUED
    before, why = _queue(job) if queued else (None, "")
    document = _shown(job.document().get("properties") or {})
    return {
        **_identity(tags, plan.workspace, plan.experiment),
        "toolType": plan.framework,
        "nodeCount": plan.node_count,
        "schedulingPriority": document.get("schedulingPriority", "normal"),
        **{key: document.get(key) for key in _BLOCKS},
        **_framework(plan, document),
        **{key: document.get(key) or [] for key in _LISTS},
        "stdOutErrPathPrefix": document.get("stdOutErrPathPrefix", DEFAULT_PREFIX),
        "constraints": {"maxWallClockTime": format_duration(timedelta(seconds=plan.max_wall_clock_seconds))},
        **_states(state.execution_state, run.info.start_time, state.start_time, state.end_time),
        "executionInfo": _execution(state),
        "jobOutputDirectoryPathSegment": plan.segment,
        # What follows is ours.
        "jobId": plan.job,
        **_run(run),
        "attempt": job.attempt,
        "retriesLeft": plan.retries_left,
        "attempts": [_attempt(job.at(number)) for number in range(1, job.attempt + 1)],
        "errorCode": state.error_code or None,
        # What an attempt waits for before it is started stands in the run.
        "reason": (tags.get(runs.TAG_REASON) if queued else None) or why or state.reason or None,
        "queuedBehind": before,
        "complete": tags.get(runs.TAG_COMPLETE) != "false" if followed.state is LeaseState.FINISHED else None,
        "notes": tags.get(runs.TAG_NOTES, "").splitlines(),
        "follower": follower(followed),
        "command": plan.command,
        "processCount": plan.ranks,
        "nodes": [_node(node, record, snapshot) for node, record in sorted(snapshot.announces.items())],
        "share": job.share.url,
        "folder": job.folder,
        "files": _files(job),
    }


def summary(run: Run, experiment: str | None = None) -> dict[str, Any]:
    """Summarize a job from its run alone, for lists, with no look at the share.

    Args:
        experiment: the name of the run's experiment; default: as its job's folder has it.
    """
    tags, info = runs.tags_of(run), run.info
    segment = "/".join(tags.get(runs.TAG_FOLDER, "").split("/")[-7:])
    state = tags.get(runs.TAG_STATE, protocol.QUEUED)
    started, ended = runs.started(tags), info.end_time if state in protocol.ENDED_STATES else None
    code = tags.get(runs.TAG_ERROR_CODE, "")
    errors = (protocol.error_record(code),) if code in protocol.MESSAGES else ()
    exit_code = _number(tags.get(runs.TAG_EXIT_CODE, "0" if state == protocol.SUCCEEDED else None))
    known = JobState(state, exit_code, errors, end_time=ended, start_time=started)
    in_folder = segment.split("/")[3] if segment.count("/") == 6 else None
    return {
        **_identity(tags, tags.get(runs.TAG_WORKSPACE, config.WORKSPACE), experiment or in_folder),
        "toolType": tags.get(runs.TAG_TOOL),
        "nodeCount": _number(tags.get(runs.TAG_NODES)),
        **_states(state, info.start_time, started, ended),
        "executionInfo": _execution(known),
        "jobOutputDirectoryPathSegment": segment or None,
        "jobId": segment.rpartition("/")[2] or None,
        **_run(run),
        "attempt": _number(tags.get(runs.TAG_ATTEMPT)) or 1,
        "errorCode": code or None,
        "reason": tags.get(runs.TAG_REASON),
        "share": tags.get(runs.TAG_SHARE),
        "folder": tags.get(runs.TAG_FOLDER),
    }


# What a look at who relays a job is called. Who follows one elsewhere may be dead: one look can't tell.
_FOLLOWER_STATES = {
    LeaseState.HELD: "relaying",
    LeaseState.UNKNOWN: "unknown",
    LeaseState.FREE: "none",
    LeaseState.FINISHED: "finished",
}


def follower(seen: LeaseView) -> dict[str, Any]:
    """Describe the follower of a job: its process and host, and the error that keeps it from relaying."""
    holder = seen.holder if seen.state in (LeaseState.HELD, LeaseState.UNKNOWN) else {}
    return {
        "state": _FOLLOWER_STATES[seen.state],
        "process": holder.get("pid"),
        "host": holder.get("host"),
        "trouble": seen.trouble or None,
    }


def is_terminated(shown: Mapping[str, Any]) -> bool:
    """Whether a person ended the job that a view or a summary shows."""
    return shown["runStatus"] == "KILLED" or shown["errorCode"] in (protocol.JOB_TERMINATED, protocol.JOB_TERMINATE)


def address(share: Share, path: str) -> str:
    """Where a path of a share is for a person: a path of this machine, or an address."""
    if isinstance(share, DirectoryShare):
        return str(share.local(path)) if path else str(share.root)
    return f"{share.url}/{quote(path)}" if path else share.url


def _identity(tags: Mapping[str, str], workspace: str, experiment: str | None) -> dict[str, Any]:
    name, cluster = tags[runs.TAG_JOB], tags.get(runs.TAG_CLUSTER, "")
    group = tags.get(runs.TAG_RESOURCE_GROUP, config.RESOURCE_GROUP)
    cluster_id = tags.get(runs.TAG_CLUSTER_ID) or arm_id(group, workspace, "clusters", cluster)
    parts = cluster_id.split("/")
    return {
        "id": arm_id(group, workspace, "experiments", str(experiment), "jobs", name),
        "name": name,
        "type": TYPE,
        "resourceGroup": group,
        "workspace": workspace,
        "experimentName": experiment,
        "cluster": {"id": cluster_id, "name": cluster, "resourceGroup": parts[4], "workspace": parts[8]},
    }


def _states(state: str, created: int | None, started: int | None, ended: int | None) -> dict[str, Any]:
    changed = {protocol.QUEUED: created, protocol.RUNNING: started}.get(state, ended)
    return {
        "executionState": state,
        "executionStateTransitionTime": iso(changed),
        "provisioningState": "succeeded",
        "provisioningStateTransitionTime": iso(created),
        "creationTime": iso(created),
    }


def _execution(state: JobState) -> dict[str, Any] | None:
    """``executionInfo``, which is null until a job has started, or ended without that."""
    if state.start_time is None and not state.ended:
        return None
    return {
        "startTime": iso(state.start_time),
        "endTime": iso(state.end_time),
        "exitCode": state.exit_code,
        "errors": [dict(error) for error in state.errors] or None,
    }


def _run(run: Run) -> dict[str, Any]:
    return {"runId": run.info.run_id, "runStatus": run.info.status}


def _framework(plan: Plan, document: Mapping[str, Any]) -> dict[str, Any]:
    """The document's framework block, with the default that the service would have filled in."""
    for key in FRAMEWORKS:
        if key in document:
            counted = {"processCount": plan.process_count} if plan.is_distributed else {}
            return {key: {**document[key], **counted}}
    return {"customToolkitSettings": {"commandLine": plan.command}}


def _queue(job: Job) -> tuple[list[str] | None, str]:
    """(the jobs that a queued one waits for, what it waits for in words); (None, why not) if its nodes can't be asked."""
    try:
        found = scaling.waits(job)
        return list(found.behind), found.why
    except BatchAIError as error:
        return None, f"queued; {error}"


def _attempt(job: Job) -> dict[str, Any]:
    """One attempt, in a few words; one that the job went on after is ``failed`` or ``requeued``."""
    snapshot = job.snapshot()
    state = fold(snapshot)
    over = state.next_attempt is not None
    gone_on = protocol.FAILED if state.retries_left is not None else "requeued"
    return {
        "attempt": job.attempt,
        "state": gone_on if over else state.execution_state,
        "reason": state.reason or None,
        "startTime": iso(state.start_time),
        "endTime": iso(state.end_time),
        "nodes": [record["host"] for _, record in sorted(snapshot.announces.items())],
        "retriesLeft": job.plan.retries_left,
    }


def _node(node: int, announce: Mapping[str, Any], snapshot: Snapshot) -> dict[str, Any]:
    return {
        "id": node_id(node),
        "host": announce["host"],
        "address": announce["address"],
        "gpus": announce.get("gpus", []),
        "exit": snapshot.exits.get(node),
    }


def _files(job: Job) -> dict[str, str]:
    """Paths of the logs: their folder, and the output of all ranks."""
    folder = job.paths.stdouterr
    names = {"stdouterr": folder, "stdout": f"{folder}/stdout.txt", "stderr": f"{folder}/stderr.txt"}
    return {key: address(job.share, path) for key, path in names.items()}


def _shown(value: Any) -> Any:
    """A part of the document as it was submitted, its secrets null."""
    if isinstance(value, Mapping):
        return {key: None if key in _SECRET_KEYS and part == _MASK else _shown(part) for key, part in value.items()}
    return [_shown(part) for part in value] if isinstance(value, list) else value


def _number(text: str | None) -> int | None:
    return int(text) if text else None
