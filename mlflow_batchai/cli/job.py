"""``batchai job``: jobs as runs of the tracking store, each with its folder on a share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from mlflow_batchai.cli.job_lookup import find_run
from mlflow_batchai.cli.options import Scope, ask, command, confirmed, named, notice, tracking
from mlflow_batchai.cli.output import Column
from mlflow_batchai.errors import JobChangedError, ShareError, UsageError

if TYPE_CHECKING:
    from mlflow.entities import Run

    from mlflow_batchai.follower.detached import Submitted

STATES = ("queued", "running", "terminating", "succeeded", "failed", "terminated")


def _state(job: Mapping[str, Any]) -> str:
    from mlflow_batchai.client import jobview

    return f"{job['executionState']} (terminated)" if jobview.is_terminated(job) else str(job["executionState"])


COLUMNS: list[Column] = [
    ("Name", "name"),
    ("Cluster", "cluster.name"),
    ("Cluster RG", "cluster.resourceGroup"),
    ("Cluster Workspace", "cluster.workspace"),
    ("Tool", "toolType"),
    ("Nodes", "nodeCount"),
    ("State", _state),
    ("Exit code", "executionInfo.exitCode"),
]


@command(COLUMNS, example="batchai job list -w vision -e digits --state running -o table", experiment=True)
@click.option("-c", "--cluster", metavar="NAME", help="Only jobs of this cluster.")
@click.option("--state", type=click.Choice(STATES), help="Only jobs in this state.")
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="The newest N of them.")
@click.option("--page-token", metavar="TOKEN", help="Go on where an earlier list ended, which gave this.")
@click.option("--all", "every", is_flag=True, help="All of them, however many there are.")
def list_jobs(scope: Scope, cluster: str | None, state: str | None, limit: int, page_token: str | None, every: bool) -> Any:
    """Jobs, the newest first: of all workspaces and experiments, unless one is named."""
    from mlflow.exceptions import MlflowException

    from mlflow_batchai.client import jobview
    from mlflow_batchai.cluster import workspaces
    from mlflow_batchai.tracking import experiments, index, runs

    store = tracking()
    mlflow = runs.client(store)
    if scope.experiment_given:
        found = experiments.find(mlflow, scope.experiment)
        names = {found.experiment_id: found.name}
    else:
        names = {entry.experiment_id: entry.name for entry in experiments.every(mlflow)}
    wanted = {
        "workspace": scope.workspace if scope.workspace_given else None,
        "cluster": cluster.rstrip("/").rpartition("/")[2] if cluster else None,
        "state": state,
    }
    listed: list[Run] = []
    try:
        while True:
            page = index.jobs(mlflow, index.PAGE if every else limit, page_token, names, **wanted)
            listed += page
            # A database gives it as bytes, a server as text.
            page_token = page.token.decode() if isinstance(page.token, bytes) else page.token
            if not (every and page_token):
                break
    except MlflowException as error:
        if page_token is None:
            raise
        raise UsageError(f"--page-token {page_token}: MLflow does not know it: {error.message}") from error
    if page_token:
        notice(f"there are more: --page-token {page_token}, or --all")
    if not listed:
        if scope.workspace_given:
            # Jobs may stand under a workspace that has no record here: only now it matters.
            workspaces.find(scope.workspace)
        filtered = scope.experiment_given or any(wanted.values())
        notice(f"{'no such jobs' if filtered else 'no jobs'} in {store.uri}")
    return [jobview.summary(run, names.get(run.info.experiment_id)) for run in listed]


@command(COLUMNS, example="batchai job show digits-3f2a1c --query executionState", experiment=True)
@named("job")
def show(scope: Scope, name: str) -> Any:
    """A job: its state, errors, nodes, and where its files lie."""
    from mlflow_batchai.client import jobview, lookup

    run, store = find_run(scope, name)
    try:
        shown = jobview.view(lookup.of_run(run, store))
    except lookup.NoFolderError as lost:
        if not lost.run_ended:
            raise
        notice(f"the folder of job {lost.name} is gone; this is what its run says")
        return jobview.summary(run)
    if shown["follower"]["state"] == "none":
        why, attach = shown["follower"]["trouble"], f"batchai job attach {shown['name']}"
        notice(why if why and attach in why else f"{why or f'nobody relays job {name} into its run'}: {attach}")
    return shown


@command(example="batchai job wait digits-3f2a1c", experiment=True)
@named("job")
@click.option("--interval", type=click.IntRange(1), default=15, help="Accepted as `az` had it; a job's end is noticed sooner.")
def wait(scope: Scope, name: str, interval: int) -> None:
    """Wait for a job's end; the exit code is the job's, and never 0 for one that did not succeed.

    Ctrl-C leaves the job running.
    """
    from mlflow_batchai.client import lookup, runner
    from mlflow_batchai.follower import detached

    run, store = find_run(scope, name)
    try:
        found = lookup.of_run(run, store)
    except lookup.NoFolderError as lost:
        if not lost.run_ended:
            raise
        _told(run)
        return
    detached.ensure_follower(found)
    runner.outcome(found, runner.wait(found, notice))
    notice(f"job {found.job.name} succeeded")


def _told(run: Run) -> None:
    """How a job ended whose folder is gone.

    Raises:
        JobFailedError: it did not succeed.
    """
    from mlflow_batchai.client import jobview
    from mlflow_batchai.errors import JobFailedError

    known = jobview.summary(run)
    if run.info.status != "FINISHED":
        why = "was terminated" if jobview.is_terminated(known) else "failed"
        raise JobFailedError(f"job {known['name']} {why}: {known['reason']}", (known["executionInfo"] or {}).get("exitCode"))
    notice(f"job {known['name']} succeeded")


@command(example="batchai job terminate digits-3f2a1c -y", experiment=True)
@named("job")
@confirmed
@click.option("--no-wait", is_flag=True, help="Return before the job has ended.")
def terminate(scope: Scope, name: str, yes: bool, no_wait: bool) -> None:
    """End a job: its ranks are gone and its run is KILLED when this returns. One that has ended stays as it is."""
    from mlflow_batchai.client import lookup, runner
    from mlflow_batchai.follower import changed, detached

    run, store = find_run(scope, name)
    try:
        found = lookup.of_run(run, store)
    except lookup.NoFolderError as lost:
        if lost.run_ended:
            notice(f"job {lost.name} has ended already")
            return
        ask(f"Terminate job {lost.name}?", yes)
        lookup.end_run(lost, store)
        notice(f"job {lost.name}: nothing of it had been started; its run is KILLED")
        return
    except JobChangedError as error:
        ask(f"{error}. Terminate the job by its mark on the nodes?", yes)
        changed.end(store, run.info.run_id, f"terminated; {error}", "KILLED")
        notice(f"{error}; nothing of the job runs any more, and its run is KILLED")
        return
    if found.job.state().ended:
        notice(f"job {found.job.name} has ended already")
        # Its run may not have: whoever relayed it may be gone.
        detached.ensure_follower(found)
        if not no_wait:
            runner.wait(found, notice)
        return
    ask(f"Terminate job {found.job.name}?", yes)
    state = _end(found, "batchai job terminate", no_wait)
    if state is not None:
        notice(f"job {found.job.name}: {state.execution_state} ({state.reason or state.error_code})")


@command(example="batchai job delete digits-3f2a1c -y", experiment=True)
@named("job")
@confirmed
@click.option("--no-wait", is_flag=True, help="Return before a job that runs has ended.")
def delete(scope: Scope, name: str, yes: bool, no_wait: bool) -> None:
    """End a job and delete its run, which MLflow can restore until `mlflow gc`. Its files stay until `batchai gc`."""
    from mlflow_batchai.client import jobview, lookup, runner
    from mlflow_batchai.follower import changed, detached
    from mlflow_batchai.tracking import runs

    run, store = find_run(scope, name)
    job, run_id = run.data.tags[runs.TAG_JOB], run.info.run_id
    ask(f"Delete job {job}?", yes)
    files = "nothing of it lies on its share"
    try:
        found = lookup.of_run(run, store)
        files = f"its files stay at {jobview.address(found.job.share, found.job.folder)} until `batchai gc`"
        if not found.job.state().ended:
            _end(found, "batchai job delete", no_wait)
        elif not no_wait:
            detached.ensure_follower(found)
            runner.wait(found, notice)
    except lookup.NoFolderError:
        pass
    except JobChangedError as error:
        changed.end(store, run_id, str(error), "KILLED")
        files = f"{error}: its files stay"
    except ShareError as error:
        if run.info.end_time is None:
            raise
        files = f"its files stay where this machine can't see them ({error})"
    runs.client(store).delete_run(run_id)
    notice(f"job {job} is deleted; {files}; its run is in MLflow's trash (mlflow runs restore --run-id {run_id})")


def _end(found: Submitted, why: str, no_wait: bool) -> Any:
    """Have a job end; its state then, None if that isn't waited for."""
    from mlflow_batchai.client import runner
    from mlflow_batchai.follower import detached

    runner.cancel(found, why)
    if not found.job.is_trusted:
        notice(f"job {found.job.name} was asked to end; its run is brought to its end by who has submitted it")
        return None
    detached.ensure_follower(found)
    return None if no_wait else runner.wait(found, notice)
