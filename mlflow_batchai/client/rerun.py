"""Prepare a job anew from the code and the document that are kept with its run: its share and its folder may be gone.

Artifacts are data that others may write. The kept plan has its submitter's signature, and lists the digests of the code and of
the document: what isn't exactly that is not run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_batchai.agent.plan import Plan, PlanError, Rerun, read_plan
from mlflow_batchai.agent.protocol import JobPaths, digest
from mlflow_batchai.client import submitting
from mlflow_batchai.client.submitting import Ready, Source
from mlflow_batchai.cluster import clusters
from mlflow_batchai.config import untold
from mlflow_batchai.documents.batchai import parse_batchai
from mlflow_batchai.documents.common import NOTIFY_URL
from mlflow_batchai.documents.mlproject import EntryPoint, MLProject, load_project
from mlflow_batchai.documents.model import MASK
from mlflow_batchai.errors import JobChangedError, JobError, JobNotTrustedError
from mlflow_batchai.follower.credentials import REGISTRY, SECRET_PREFIX, MissingSecretError
from mlflow_batchai.job import signing
from mlflow_batchai.job.signing import Signature
from mlflow_batchai.tracking import kept_code, runs
from mlflow_batchai.tracking.jobfiles import ARTIFACT
from mlflow_batchai.tracking.runs import Tracking

if TYPE_CHECKING:
    from mlflow.entities import Run

Facts = Mapping[str, str]


def prepare(
    run: Run,
    tracking: Tracking,
    folder: Path,
    parameters: Mapping[str, str],
    cluster: str | None,
    say: submitting.Say,
    trust: Callable[[Facts], None] | None = None,
) -> Ready:
    """Check what is kept of a job, and prepare a new job of it, with other values for some parameters.

    Args:
        folder: an empty one, for the code; it has to be there until the job is submitted.
        trust: shown what would run of a job that another key has signed; raises if a person says no. None: it isn't run.

    Raises:
        JobError: its code was not kept, or secrets of its document are not here.
        JobChangedError: what is kept is not what the job ran.
        JobNotTrustedError: this user has not signed it.
    """
    name = run.data.tags[runs.TAG_JOB]
    files = _download(run, tracking, folder / "kept", name)
    plan, rerun, is_own = _plan(run, files, name)
    if rerun.lacks:
        raise JobError(f"the code of job {name} was not kept with its run: {rerun.lacks}")
    if not is_own and trust is None:
        raise JobNotTrustedError(
            f"job {name} is not signed with your key; to see what would run, and decide: batchai job rerun --trust {name}"
        )
    if {kept_code.NAME, "document.json"} - files.keys():
        raise JobError(
            f"the code of job {name} is not among the artifacts of its run (yet); its notes say why, if it has ended"
        )
    document = _json(files["document.json"])
    if document is None or digest(document) != rerun.document:
        raise _changed(name, "document.json")
    try:
        (folder / "project").mkdir()
        kept_code.unpack(files[kept_code.NAME], plan.code, rerun.size, folder / "project")
    except JobError as error:
        raise _changed(name, f"{kept_code.NAME} ({error})") from error
    project, entry = _entry(folder / "project", rerun)
    if not is_own and trust:
        listed = ", ".join(file.path for file in plan.code)
        shown = {"parameters": json.dumps(plan.run_parameters), "cluster": cluster or plan.cluster, "code": listed}
        trust({"command": entry.command, "document": json.dumps(document), **shown})
    config, warnings = parse_batchai(_with_secrets(document, name), f"{ARTIFACT}/document.json of job {name}")
    found, more = clusters.load(cluster or plan.cluster)
    for warning in untold([*warnings, *more]):
        say(warning)
    uri = run.data.tags.get("mlflow.source.name", project.name)
    source = Source(uri, project, entry, config, f"{ARTIFACT}/document.json of job {name}", [], found)
    # What stands in the command is no parameter of the entry point, unless an earlier rerun has given it another value.
    given = {key: value for key, value in plan.run_parameters.items() if entry.arguments.get(key) != value}
    return submitting.check(submitting.prepare(source, {**given, **parameters}, rerun.env_manager, say), say)


def _download(run: Run, tracking: Tracking, folder: Path, name: str) -> dict[str, Path]:
    """The artifacts that say what the job ran, by name."""
    folder.mkdir()
    client, run_id = runs.client(tracking), run.info.run_id
    there = {Path(entry.path).name for entry in client.list_artifacts(run_id, ARTIFACT)}
    wanted = there & {"plan.json", "document.json", kept_code.NAME}
    if "plan.json" not in wanted:
        raise JobError(f"nothing says what job {name} ran: its run has no artifact {ARTIFACT}/plan.json (yet)")
    return {file: Path(client.download_artifacts(run_id, f"{ARTIFACT}/{file}", str(folder))) for file in sorted(wanted)}


def _plan(run: Run, files: Mapping[str, Path], name: str) -> tuple[Plan, Rerun, bool]:
    """(the plan, how the job can be run again, whether this user has signed it)."""
    kept = _json(files["plan.json"]) or {}
    record, signature = signing.examine(JobPaths(str(kept.get("folder"))).plan, kept)
    try:
        plan = read_plan(record)
    except PlanError as error:
        raise JobError(f"{ARTIFACT}/plan.json of job {name} can't be read: {error}") from error
    if signature is Signature.WRONG or plan.run_id != run.info.run_id:
        raise _changed(name, "plan.json")
    if plan.rerun is None:
        raise JobError(
            f"job {name} was submitted without a project, or by an earlier version, so no code of it is kept; its document as a"
            f" new job: mlflow artifacts download -r {run.info.run_id} -a {ARTIFACT}/document.json -d . && batchai job create"
            " -n NAME -f document.json"
        )
    return plan, plan.rerun, signature is Signature.OWN


def _changed(name: str, what: str) -> JobChangedError:
    return JobChangedError(f"what is kept of job {name} is not what it ran: {ARTIFACT}/{what}; nothing of it was started")


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _entry(folder: Path, rerun: Rerun) -> tuple[MLProject, EntryPoint]:
    """The project, by its name, and its entry point; a command that was typed, or a script, is none that it declares."""
    project = load_project(folder)
    entry = project.entry_points.get(rerun.entry)
    if entry is None or entry.command != rerun.command:
        entry = EntryPoint(rerun.entry, rerun.command, {}, declared=False, arguments=rerun.arguments)
    return replace(project, name=rerun.project), entry


def _with_secrets(document: Mapping[str, Any], name: str) -> Any:
    """The document with its secrets, as ``job retry`` finds them. Keys of storage are found as for any new job.

    Raises:
        MissingSecretError: some are not here.
    """
    missing: list[str] = []

    def opened(value: Any, key: str = "") -> Any:
        if isinstance(value, list):
            return [opened(one, key) for one in value]
        if not isinstance(value, Mapping):
            return value
        if value.get("accountKey") == MASK:
            return None
        variables = {"password": REGISTRY["password"], "url": SECRET_PREFIX + NOTIFY_URL}
        if key == "secrets":
            variables["value"] = f"{SECRET_PREFIX}{value.get('name')}"
        wanted = {inner: variables[inner] for inner, one in value.items() if one == MASK and inner in variables}
        missing.extend(variable for variable in wanted.values() if variable not in os.environ)
        given = {inner: os.environ.get(variable) for inner, variable in wanted.items()}
        return {**{inner: opened(one, inner) for inner, one in value.items()}, **given}

    found = opened(document)
    if missing:
        raise MissingSecretError(name, missing)
    return found
