"""The only orchestrator: submit a job, watch it, attach to it, cancel it."""

from __future__ import annotations

import contextlib
import getpass
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mlflow_batchai import config, index, runs
from mlflow_batchai.cluster.clusters import Cluster, share_secret
from mlflow_batchai.cluster.scaling import WAITING, WhyQueued
from mlflow_batchai.console import JobConsole
from mlflow_batchai.detached import Submitted, follower_log, keep_follower
from mlflow_batchai.errors import JobDetachedError, JobFailedError, ShareError, UsageError
from mlflow_batchai.job import folders
from mlflow_batchai.job.events import EventReader
from mlflow_batchai.job.jobs import Job, pause_after
from mlflow_batchai.job.lease import Hold, Lease
from mlflow_batchai.job.places import segment as place_of
from mlflow_batchai.job.states import JobState
from mlflow_batchai.node import protocol
from mlflow_batchai.plan.prepared import Prepared
from mlflow_batchai.runs import Tracking
from mlflow_batchai.shares.objects import upload
from mlflow_batchai.shares.sweeps import settle
from mlflow_batchai.signals import Signals
from mlflow_batchai.starting import attempt_fails_with_it, run_fails_with_it, start
from mlflow_batchai.workspaces import arm_id

WATCH_SECONDS, BOARD_WATCH_SECONDS = 0.1, 2.0
PATIENCE_SECONDS = 10.0
# A share that is away: for how long it is looked for, and how often at most.
SHARE_PATIENCE_SECONDS, TROUBLE_SECONDS = 600.0, 2.0


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
    for files in sets:
        upload(share, files, progress)
    folders.note(share, prepared.plan["folderPrefix"])
    segment = place_of(request.workspace, request.experiment_name, prepared.name, prepared.job_id)
    folder = "/".join(part for part in (prepared.plan["folderPrefix"], segment) if part)
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
        plan = {
            **prepared.plan,
            "secretVariables": sorted(prepared.secrets),
            "name": prepared.name,
            "cluster": cluster.name,
            "workspace": request.workspace,
            "experiment": request.experiment_name,
            "experimentId": request.experiment_id,
            "runId": run_id,
            "runName": run.info.run_name or "",
            "runParameters": dict(prepared.parameters),
            "segment": segment,
            "folder": folder,
        }
        paths = protocol.JobPaths(folder)
        undo.enter_context(attempt_fails_with_it(share, folder))
        share.write(paths.spec, protocol.encode([prepared.document]))
        if prepared.changes:
            share.write(paths.code, protocol.encode([prepared.changes]))
        share.write(paths.plan, protocol.encode([plan]))
        settle(share, sets)
        told = {
            "variables": prepared.secrets,
            "share": share_secret(cluster.location, prepared.seconds),
            **prepared.credentials,
        }
        submitted = Submitted(Job(share, folder, 1, plan), run_id, request.tracking)
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
        runs.TAG_TOOL: prepared.plan["framework"],
        runs.TAG_ENGINE: cluster.document.engine.value,
        **runs.sizes(prepared.plan),
    }


def _cluster_id(cluster: Cluster) -> str:
    record = cluster.record
    group, workspace = (record.resource_group, record.workspace) if record else (config.RESOURCE_GROUP, config.WORKSPACE)
    return arm_id(group, workspace, "clusters", cluster.name)


def cancel(submitted: Submitted, why: str = "") -> None:
    """Ask for the job's end; returns at once. One that has ended stays as it is."""
    if not submitted.job.state().ended:
        submitted.job.request_cancel(user(), why)


def state(submitted: Submitted, ending: bool = True) -> JobState:
    """The job's state now; ``submitted.job`` is at its present attempt afterwards.

    Args:
        ending: see ``Job.state``.
    """
    while True:
        found = submitted.job.state(ending)
        if found.next_attempt is None:
            return found
        submitted.job = submitted.job.at(found.next_attempt)


def user() -> str:
    """Who asks: the login name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def wait(submitted: Submitted, say: Callable[[str], None], check: Callable[[], None] = lambda: None) -> JobState:
    """Wait until the job's run is finished.

    Args:
        say: told when its share is away.
        check: called at every look; what it raises ends the wait.
    """
    patience = Patience(submitted.job, say)
    while True:
        with patience.trying():
            found = state(submitted)
            if found.ended and Lease(submitted.job).finished():
                return found
            check()
            keep_follower(submitted)
        time.sleep(_look_seconds(submitted.job))


class Patience:
    """A share that can't be used for a while (this machine slept, its network is away) is no reason to stop watching.

    Args:
        say: told of it, in one sentence.
    """

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job = job
        self._say = say
        self._since: float | None = None

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """What fails inside is tried again by the caller.

        Raises:
            ShareError: it has failed for ``SHARE_PATIENCE_SECONDS``.
        """
        try:
            yield
        except ShareError as error:
            now = time.monotonic()
            if self._since is None:
                self._since = now
                self._say(f"{error} (job {self._job.name} goes on; still looking for it)")
            if now - self._since >= SHARE_PATIENCE_SECONDS:
                raise ShareError(f"{error}; job {self._job.name} goes on: batchai job attach {self._job.name}") from error
            time.sleep(TROUBLE_SECONDS)
        else:
            self._since = None


def watch(submitted: Submitted, console: JobConsole, signals: Signals, from_start: bool = True) -> JobState:
    """Show a job until its run is finished in MLflow.

    Args:
        signals: what they mean; its handlers are installed here if the caller hasn't.
        from_start: whether output that came before is shown.

    Raises:
        JobDetachedError: told to leave; the job goes on, and the message has the line that attaches to it.
        JobError: the follower can't be kept running.
    """
    job = submitted.job
    reader = EventReader(job)
    if not from_start:
        for _ in reader.read():
            pass
    try:
        with signals.installed():
            signals.watching()
            found = _watch_attempts(submitted, console, reader, signals)
            _await_run(submitted, console, signals)
            return found
    except JobDetachedError as error:
        raise JobDetachedError(
            f"{error}; job {job.name} goes on: batchai job attach {job.name} | batchai job terminate {job.name}"
        ) from None
    finally:
        console.close()


def _cancel_here(submitted: Submitted, console: JobConsole) -> None:
    console.say(f"ending job {submitted.job.name}; press Ctrl-C again to leave it to end by itself")
    cancel(submitted, "Ctrl-C")


def _watch_attempts(submitted: Submitted, console: JobConsole, reader: EventReader, signals: Signals) -> JobState:
    """Show one attempt after the other, until the job has ended."""
    shown = ""
    waiting: WhyQueued | None = None
    patience = Patience(submitted.job, console.say)
    while True:
        begun = time.monotonic()
        with patience.trying():
            signals.check(lambda: _cancel_here(submitted, console))
            for _, _, records in reader.read():
                console.records(records)
            found = submitted.job.state(reader.ending)
            if found.ended or found.next_attempt:
                for _, _, records in reader.read(to_the_end=True):
                    console.records(records)
                if found.next_attempt is None:
                    return found
                console.say(_goes_on(submitted.job, found))
                submitted.job = submitted.job.at(found.next_attempt)
                reader = EventReader(submitted.job)
            if found.execution_state != shown:
                shown = found.execution_state
                console.state({protocol.QUEUED: WAITING, protocol.RUNNING: "running"}.get(shown, shown))
                waiting = WhyQueued(submitted.job) if shown == protocol.QUEUED else None
            if waiting and (told := waiting.news()):
                console.state(told)
            keep_follower(submitted)
        time.sleep(pause_after(time.monotonic() - begun, WATCH_SECONDS))


def _goes_on(job: Job, over: JobState) -> str:
    """What a person is told between two attempts."""
    if over.retries_left is None:
        return f"the job waits in the queue again, as attempt {over.next_attempt}: {over.reason}"
    most = "" if job.plan.get("lowPriority") else f" of at most {(over.next_attempt or 0) + over.retries_left}"
    why = over.reason.partition("\n")[0]
    return f"attempt {job.attempt} ended: {why}; the job starts again, as attempt {over.next_attempt}{most}"


def _await_run(submitted: Submitted, console: JobConsole, signals: Signals) -> None:
    """The job has ended: wait until its run has."""
    job, patience = submitted.job, Patience(submitted.job, console.say)
    lease = Lease(job)
    ended, said = time.monotonic(), False
    while True:
        with patience.trying():
            signals.check(lambda: None)
            found = lease.glance()
            if found.hold is Hold.FINISHED:
                break
            console.sending(found.sending)
            keep_follower(submitted)
        if found.sending:
            ended = time.monotonic()
        if not said and time.monotonic() - ended > PATIENCE_SECONDS:
            said = True
            console.say(f"the job has ended; its last results are on their way to MLflow (see {follower_log(job)})")
        time.sleep(_look_seconds(job) / 2)


def _look_seconds(job: Job) -> float:
    """How often it is worth asking for one file of a job."""
    return WATCH_SECONDS if job.board is None else BOARD_WATCH_SECONDS


def outcome(submitted: Submitted, ended: JobState) -> None:
    """Raise JobFailedError, with the reason, unless the job has succeeded."""
    if ended.execution_state == protocol.SUCCEEDED:
        return
    if ended.terminated:
        raise JobFailedError(
            f"job {submitted.job.name} was {ended.reason or 'terminated'} (run {submitted.run_id} is KILLED)", None
        )
    raise JobFailedError(f"job {submitted.job.name} failed: {ended.reason}", ended.exit_code)
