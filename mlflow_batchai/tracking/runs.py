"""A job's MLflow run, its tags that index the job, and addresses that hold in any folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from mlflow_batchai import terminal
from mlflow_batchai.agent.plan import Plan
from mlflow_batchai.agent.protocol import QUEUED, digest
from mlflow_batchai.config import database_file
from mlflow_batchai.errors import BatchAIError, UsageError
from mlflow_batchai.job import signing

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

TAG_JOB = "batchai.job"
TAG_CLUSTER = "batchai.cluster"
TAG_WORKSPACE = "batchai.workspace"
TAG_SHARE = "batchai.share"
TAG_FOLDER = "batchai.folder"
# What the submitter signs of a run: where its job lies. Anybody with the tracking server's address may write tags. Behind the
# signature stand, as JSON, the tags that only clients need (``_INNER``): MLflow's page of a run shows every tag.
TAG_MAC = "batchai.mac"
TAG_STATE = "batchai.executionState"
TAG_RESOURCE_GROUP = "batchai.resourceGroup"
TAG_CLUSTER_ID = "batchai.clusterId"
TAG_TOOL = "batchai.tool"
TAG_ENGINE = "batchai.engine"
TAG_NODES = "batchai.nodes"
TAG_RANKS = "batchai.ranks"
TAG_ATTEMPT = "batchai.attempt"
TAG_STARTED = "batchai.startTime"
TAG_EXIT_CODE = "batchai.exitCode"
TAG_ERROR_CODE = "batchai.errorCode"
TAG_REASON = "batchai.reason"
TAG_NOTES = "batchai.notes"
# "false": some of what ranks have reported and printed is not in the run, by their own count; its notes say what.
TAG_COMPLETE = "batchai.complete"
# The run of the job that this one runs again.
TAG_RERUN_OF = "batchai.rerunOf"
# A person's wish to end the job, set in MLflow's own UI, say.
TAG_CANCEL = "batchai.cancel"
TAGS_OF_AN_END = (TAG_STARTED, TAG_EXIT_CODE, TAG_ERROR_CODE, TAG_REASON, TAG_NOTES, TAG_COMPLETE)
_INNER = {
    name.removeprefix("batchai."): name
    for name in (
        TAG_SHARE,
        TAG_FOLDER,
        TAG_RESOURCE_GROUP,
        TAG_CLUSTER_ID,
        TAG_TOOL,
        TAG_ENGINE,
        TAG_NODES,
        TAG_RANKS,
        TAG_STARTED,
    )
}
BATCH = 100
LONGEST_TAG = 5000


def tags_of(run: Run) -> dict[str, str]:
    """A run's tags, with those that stand behind its signature."""
    try:
        found = json.loads(run.data.tags.get(TAG_MAC, "").partition(" ")[2])
    except (ValueError, RecursionError):  # anybody may write it
        found = None
    inner = found if isinstance(found, dict) else {}
    return {**run.data.tags, **{tag: inner[key] for key, tag in _INNER.items() if isinstance(inner.get(key), str)}}


def _as_stored(mac: str, tags: Mapping[str, str]) -> dict[str, str]:
    """Tags as a run has them: those that only clients need as one, behind the signature."""
    inner = {key: tags[tag] for key, tag in _INNER.items() if tag in tags}
    return {**{tag: tags[tag] for tag in tags if tag not in _INNER.values()}, TAG_MAC: f"{mac} {json.dumps(inner)}"}


def set_tags(mlflow: MlflowClient, run_id: str, tags: Mapping[str, str], without: Collection[str] = ()) -> None:
    """Set tags of a job's run, and remove others; those that it hasn't are fine."""
    from mlflow.entities import RunTag

    is_inner = any(tag in _INNER.values() for tag in (*tags, *without))
    run = mlflow.get_run(run_id) if is_inner or without else None
    if run and is_inner:
        mac, old = run.data.tags.get(TAG_MAC, "").partition(" ")[0], tags_of(run)
        inner = {tag: old[tag] for tag in _INNER.values() if tag in old and tag not in without}
        tags = _as_stored(mac, {**inner, **tags})
    if tags:
        mlflow.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
    for name in without:
        if run and name in run.data.tags:
            mlflow.delete_tag(run_id, name)


def tag_text(text: str) -> str:
    """Text that every store takes as a tag of ours."""
    return plain(text)[:LONGEST_TAG]


def plain(text: str) -> str:
    """Text that every store takes: ranks write what they like, PostgreSQL knows no NUL, and nobody half a letter."""
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def time_text(milliseconds: int) -> str:
    """A time as a tag has it: ISO 8601, UTC, so that ``LIKE '2026-11-29%'`` finds a day."""
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc).isoformat(timespec="milliseconds")


def started(tags: Mapping[str, str]) -> int | None:
    """When the last node was taken, in milliseconds since 1970, as a job's run has it; None before that.

    People may write tags: what is no time counts as none.
    """
    try:
        return round(datetime.fromisoformat(tags.get(TAG_STARTED, "")).timestamp() * 1000)
    except (ValueError, OverflowError):
        return None


@dataclass(frozen=True)
class Tracking:
    """Where runs are kept.

    Attributes:
        uri: absolute, without user and password: fit for showing, tags and messages.
        environment: what a process needs to reach it, in MLflow's own variables; it may hold a password.
    """

    uri: str
    environment: Mapping[str, str] = field(repr=False)

    @property
    def address(self) -> str:
        """Address of the store as MLflow takes it; a database's holds its password."""
        return self.environment["MLFLOW_TRACKING_URI"]


def absolute(uri: str, cwd: Path) -> Tracking:
    """A tracking address that means the same from any folder.

    A server's user and password go into MLflow's variables for them, since MLflow's messages quote the address.
    """
    environment: dict[str, str] = {}
    if database_file(uri):
        scheme, slashes, path = uri.partition(":///")
        uri = f"{scheme}{slashes}{cwd / path}"
    elif uri.startswith("file:") and not uri.startswith("file:/"):
        uri = (cwd / unquote(uri.removeprefix("file:"))).as_uri()
    elif ":" not in uri and uri not in ("databricks", "databricks-uc", "uc"):
        uri = str(cwd / uri)
    elif uri.startswith(("http://", "https://")):
        parts = urlsplit(uri)
        if parts.username:
            environment["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username)
        if parts.password:
            environment["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password)
        uri = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return Tracking(terminal.shown(uri), {**environment, "MLFLOW_TRACKING_URI": uri})


def client(tracking: Tracking) -> MlflowClient:
    """A client of that store."""
    # MLflow reads a server's user and password nowhere else.
    os.environ.update({name: value for name, value in tracking.environment.items() if name != "MLFLOW_TRACKING_URI"})
    path = _check_database(tracking.uri)
    from mlflow.tracking import MlflowClient

    with contextlib.nullcontext() if path is None else _locked(path.parent):
        return MlflowClient(tracking_uri=tracking.address)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes of this machine waiting. MLflow makes the tables of a new database without a lock: of several
    processes that do so at once all but one fail. Where a folder can't be locked (it may be on NFS) nobody waits.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            opened = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, opened)
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _check_database(uri: str) -> Path | None:
    """MLflow tries for minutes to make a database where none can be made; say so at once.

    Returns:
        The file of a sqlite store.

    Raises:
        UsageError: its folder isn't there or can't be written.
    """
    if not (file := database_file(uri)):
        return None
    path = Path(file)
    try:
        # The database itself is not opened here: closing any file of it drops the locks that this process's other threads hold
        # on it, and another process then writes into the middle of their change (https://sqlite.org/howtocorrupt.html, 2.2).
        if not path.exists():
            tempfile.TemporaryFile(dir=path.resolve().parent).close()
        elif path.is_dir() or not os.access(path, os.W_OK):
            raise OSError(None, "it is a folder" if path.is_dir() else "it is read-only for you")
    except OSError as error:
        raise UsageError(
            f"MLflow's store {path} can't be made or written ({error.strerror}); set MLFLOW_TRACKING_URI to another"
        ) from error
    return path


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

    parameters = {name: plain(value) for name, value in parameters.items()}
    with contextlib.ExitStack() as undo:
        if run_id:
            run = _named(mlflow, run_id, parameters)
        else:
            run = mlflow.create_run(experiment_id, tags=_as_stored("", tags), run_name=run_name)
            undo.enter_context(fails_with_it(mlflow, run.info.run_id))
            # At once: a run without it is nobody's, should its submitter die now.
            mac = _as_stored(signature(run.info.run_id, tags), tags)[TAG_MAC]
            mlflow.set_tag(run.info.run_id, TAG_MAC, mac)
        values = [Param(name, value) for name, value in parameters.items()]
        for start in range(0, len(values), BATCH):
            mlflow.log_batch(run.info.run_id, params=values[start : start + BATCH])
        if run_id:
            # What an earlier job has left in the run is not this one's.
            stored = _as_stored(signature(run_id, tags), tags)
            forget(mlflow, run_id, [name for name in run.data.tags if name.startswith("batchai.") and name not in stored])
            mlflow.log_batch(run.info.run_id, tags=[RunTag(name, value) for name, value in stored.items()])
        mlflow.update_run(run.info.run_id, status="SCHEDULED", name=run_name if run_id and run_name else None)
    return run


def _named(mlflow: MlflowClient, run_id: str, parameters: Mapping[str, str]) -> Run:
    """A run that was there before, if it can have these parameters; UsageError as of ``create``."""
    from mlflow.exceptions import MlflowException

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
    return run


@contextlib.contextmanager
def fails_with_it(mlflow: MlflowClient, run_id: str) -> Iterator[None]:
    """A run whose job fails to start inside is ended with the reason."""
    try:
        yield
    except BaseException as error:
        # What went wrong first is what a person has to see, even if the store has gone as well.
        with contextlib.suppress(Exception):
            fail(mlflow, run_id, why(error), "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise


def why(error: BaseException) -> str:
    """The reason for which a job could not be submitted."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, KeyboardInterrupt):
        return "interrupted while it was being submitted"
    if isinstance(error, MlflowException):
        return f"MLflow: {error.message}"
    return str(error) if isinstance(error, BatchAIError) else f"submitting failed: {type(error).__name__}: {error}"


def fail(mlflow: MlflowClient, run_id: str, reason: str, status: str = "FAILED") -> None:
    """End the run of a job that could not be submitted."""
    mlflow.set_tag(run_id, "batchai.reason", reason[:LONGEST_TAG])
    mlflow.set_tag(run_id, TAG_STATE, "failed")
    mlflow.set_terminated(run_id, status)


def log_metrics(mlflow: MlflowClient, run_id: str, values: Mapping[str, float], at: int) -> None:
    """Give a run one value of each metric, of step 0. ``at``: milliseconds since 1970."""
    from mlflow.entities import Metric

    mlflow.log_batch(run_id, [Metric(name, value, at, 0) for name, value in values.items()])


def begin_attempt(mlflow: MlflowClient, run_id: str, attempt: int) -> None:
    """Bring the run of a job that goes on with another attempt back to SCHEDULED, without what the one before has left.

    Its end time can't be taken away; the next end overwrites it.
    """
    set_tags(mlflow, run_id, {TAG_ATTEMPT: str(attempt), TAG_STATE: QUEUED}, TAGS_OF_AN_END)
    mlflow.update_run(run_id, status="SCHEDULED")


def sizes(plan: Plan) -> dict[str, str]:
    """Tags that say how many nodes and ranks an attempt has, of its plan."""
    counts = {TAG_NODES: plan.node_count, TAG_RANKS: plan.ranks}
    return {tag: str(count) for tag, count in counts.items() if count is not None}


_SIGNED = (TAG_JOB, TAG_CLUSTER, TAG_SHARE, TAG_FOLDER)


def signature(run_id: str, tags: Mapping[str, str]) -> str:
    """The value of ``TAG_MAC``: this user's signature of a run's id and of where its job lies."""
    return signing.mac(*_signed(run_id, tags))


def is_signed(run: Run) -> bool:
    """Whether this user has submitted the job of a run, and its tags still say where."""
    mac = run.data.tags.get(TAG_MAC, "").partition(" ")[0]
    return signing.is_mac(mac, *_signed(run.info.run_id, tags_of(run)))


def _signed(run_id: str, tags: Mapping[str, str]) -> tuple[str, str]:
    return f"run {run_id}", digest({tag: tags.get(tag) for tag in _SIGNED})


def lacks_end(tracking: Tracking, run_id: str, folder: str) -> bool:
    """Whether the job in a folder has a run that is neither ended nor deleted, and no other job's by now."""
    run = client(tracking).get_run(run_id)
    is_open = run.info.status in ("SCHEDULED", "RUNNING") and run.info.lifecycle_stage == "active"
    return is_open and tags_of(run).get(TAG_FOLDER) == folder


def forget(mlflow: MlflowClient, run_id: str, tags: Collection[str]) -> None:
    """Remove tags from a run; those that it hasn't are fine."""
    set_tags(mlflow, run_id, {}, tags)


def source_tags(uri: str, entry_point: str, directory: Path, user: str) -> dict[str, str]:
    """MLflow's own tags of a project run (``mlflow.utils.mlflow_tags``), as its local backend sets them."""
    project = {"mlflow.project.entryPoint": entry_point, "mlflow.project.backend": "batchai"}
    return {**_source_tags(uri, "PROJECT", directory, user), **project}


def document_tags(path: Path, user: str) -> dict[str, str]:
    """MLflow's own tags of a job whose document names its program."""
    return _source_tags(str(path), "JOB", path.parent, user)


def _source_tags(name: str, kind: str, directory: Path, user: str) -> dict[str, str]:
    tags = {"mlflow.user": user, "mlflow.source.name": name, "mlflow.source.type": kind}
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git here, or no repository
        commit = subprocess.check_output(
            ["git", "-C", str(directory), "rev-parse", "HEAD"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=10,
        )
        tags["mlflow.source.git.commit"] = commit.strip()
    return tags


def page(uri: str, experiment_id: str, run_id: str) -> str | None:
    """The run's page in MLflow's UI, where the store is a server.

    Its last part has MLflow show what belongs to training, where a fresh browser is shown what belongs to GenAI.
    """
    if not uri.startswith(("http://", "https://")):
        return None
    path = f"experiments/{quote(experiment_id)}/runs/{quote(run_id)}?workflowType=machine_learning"
    return f"{terminal.shown(uri).rstrip('/')}/#/{path}"
