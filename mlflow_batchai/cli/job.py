"""``batchai job``: jobs as runs of the tracking store, each with its folder on a share."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mlflow_batchai.cli.file import growing, job_file, show_text
from mlflow_batchai.cli.lookup import find_job, find_run, load_cluster, of_attempt, short_name
from mlflow_batchai.cli.node import job_node
from mlflow_batchai.cli.options import (
    MountOptions,
    Noun,
    Scope,
    ask,
    confirmed,
    mount_options,
    named,
    new_name,
    notice,
    tracking,
)
from mlflow_batchai.cli.output import Column, Result, render
from mlflow_batchai.cluster import workspaces
from mlflow_batchai.config import default
from mlflow_batchai.errors import BatchAIError, DocumentError, JobChangedError, JobFailedError, ShareError, UsageError
from mlflow_batchai.terminal import printable
from mlflow_batchai.tracking import experiments

if TYPE_CHECKING:
    from mlflow.entities import Experiment, Run
    from mlflow.tracking import MlflowClient

    from mlflow_batchai.client.orphans import Candidate
    from mlflow_batchai.cluster.clusters import Cluster
    from mlflow_batchai.documents.job import JobDocument
    from mlflow_batchai.follower.detached import Submitted
    from mlflow_batchai.job.lease import LeaseView
    from mlflow_batchai.tracking.runs import Tracking

STATES = ("queued", "running", "terminating", "succeeded", "failed", "terminated")
DEFAULT_EXPERIMENT = "Default"
_SCOPE = {"group_": "-g", "workspace_": "-w", "experiment_": "-e"}
MOST_RETRIES = 100  # as ``documents.batchai`` has it, whose import a command's help need not wait for


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
RANK_COLUMNS: list[Column] = [("Rank", "rank"), ("Node", "node"), ("Command", lambda rank: rank["argv"][-1])]
ATTACH_COLUMNS: list[Column] = [("Name", "name"), ("Run", "runId"), ("State", "executionState"), ("Result", "detail")]

job = Noun("job", experiment=True)
_of_job = ("-n", "--name", "-j", "--job")
_named = named("job", _of_job)


@job.verb("create", COLUMNS, example="batchai job create -n myjob -c nc6 -f job.json")
@_named
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
    """Submit a Batch AI job document; returns at once, while the job is queued.

    The document names the program (pythonScriptFilePath, commandLine); its arguments are the parameters of the MLflow run.
    """
    new_name(name, "job")
    file = file.absolute()
    mounts.use_account()
    document = _read(file, mounts, dry_run)
    options = {"retries": retries, "min_nodes": min_nodes, "umask": umask}
    written = document.properties.cluster
    chosen = cluster_name or (written.name if written else None) or default("cluster")
    chosen = short_name(chosen) if chosen else None
    if dry_run:
        return _described(scope, name, document, load_cluster(chosen, noted=False), file, options)
    return _submitted(scope, name, document, chosen, file, options)


def _read(file: Path, mounts: MountOptions, dry_run: bool) -> JobDocument:
    """The document with what the options mount besides."""
    from mlflow_batchai.documents.job import parse_job
    from mlflow_batchai.documents.model import MASK, secret_values
    from mlflow_batchai.documents.reading import read

    data = read(file)
    properties = data.get("properties")
    if isinstance(properties, Mapping) and isinstance(properties.get("mountVolumes", {}), Mapping | None):
        data = {**data, "properties": {**properties, "mountVolumes": mounts.added_to(properties.get("mountVolumes"))}}
    document, warnings = parse_job(data, str(file))
    if MASK in secret_values(document):
        raise DocumentError(
            f"{file}: '{MASK}' stands in place of a secret, as where a job's document is kept: write the secret there"
        )
    notice(*warnings, noted=not dry_run)
    return document


def _described(
    scope: Scope, name: str, document: JobDocument, cluster: Cluster, file: Path, options: Mapping[str, Any]
) -> Result:
    """The job that would be started; neither the tracking store nor a node is asked."""
    from mlflow_batchai.plan import dryrun, standalone

    prepared = standalone.prepare(document, name, cluster, str(file), **options)
    notice(*prepared.warnings, noted=False)
    standalone.check_script(prepared, document.properties, str(file))
    found = dryrun.describe(prepared, cluster, scope.workspace, scope.experiment or DEFAULT_EXPERIMENT)
    busy = {rank["node"] for rank in found["ranks"]}
    idle = [{"rank": None, "node": node["node"], "argv": [""]} for node in found["nodes"] if node["node"] not in busy]
    return Result(found, lambda: render([*found["ranks"], *idle], "table", RANK_COLUMNS))


def _submitted(
    scope: Scope, name: str, document: JobDocument, cluster_name: str | None, file: Path, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Start the job, and show it."""
    from mlflow_batchai.client import jobview, runner, submitting
    from mlflow_batchai.plan import standalone
    from mlflow_batchai.tracking import index, runs

    store = tracking()
    mlflow = runs.client(store)
    experiment = _experiment(scope, mlflow)
    workspace = scope.workspace if scope.workspace_given else experiments.workspace_of(experiment)
    if index.jobs(mlflow, 1, experiments=[experiment.experiment_id], name=name, workspace=workspace):
        raise UsageError(
            f"there is a job '{name}' in experiment '{experiment.name}' already; choose another name, or delete it first"
            f" (batchai job delete {name})"
        )
    cluster = load_cluster(cluster_name)
    prepared = standalone.prepare(document, name, cluster, str(file), **options)
    notice(*prepared.warnings)
    standalone.check_script(prepared, document.properties, str(file))
    prepared = submitting.check_prepared(prepared, cluster, notice)
    tags = runs.document_tags(file, runner.user())
    group = scope.resource_group
    return jobview.view(
        submitting.create(prepared, cluster, store, experiment, workspace, tags, name, resource_group=group, unique=True)
    )


def _experiment(scope: Scope, mlflow: MlflowClient) -> Experiment:
    """MLflow's experiment of that name, which must not be another workspace's."""
    if scope.workspace_given:
        workspaces.find(scope.workspace)
    found = experiments.find(mlflow, scope.experiment or DEFAULT_EXPERIMENT)
    if scope.workspace_given and found.tags.get(experiments.TAG_WORKSPACE, scope.workspace) != scope.workspace:
        return experiments.find(mlflow, found.name, scope.workspace)
    return found


@job.verb("show", COLUMNS, example="batchai job show digits-3f2a1c --query executionState")
@_named
def show(scope: Scope, name: str) -> Any:
    """A job: its state, errors, nodes, and where its files lie."""
    from mlflow_batchai.client import jobview

    found, run = _found(scope, name)
    if found is None:
        notice(f"the folder of job {run.data.tags['batchai.job']} is gone; this is what its run says")
        return jobview.summary(run)
    shown = jobview.view(found)
    if shown["follower"]["state"] == "none":
        why, attach = shown["follower"]["trouble"], f"batchai job attach {shown['name']}"
        notice(why if why and attach in why else f"{why or f'nobody relays job {name} into its run'}: {attach}")
    return shown


def _found(scope: Scope, name: str) -> tuple[Submitted | None, Run]:
    """A job and its run; no job if the run has ended and the job's folder is gone."""
    from mlflow_batchai.client import lookup

    run, store = find_run(scope, name)
    try:
        return lookup.of_run(run, store), run
    except lookup.NoFolderError as lost:
        if not lost.run_ended:
            raise
        return None, run


@job.verb("list", COLUMNS, example="batchai job list -w vision -e digits --state running -o table")
@click.option("-c", "--cluster", metavar="NAME", help="Only jobs of this cluster.")
@click.option("--state", type=click.Choice(STATES), help="Only jobs in this state.")
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="The newest N of them.")
@click.option("--all", "every", is_flag=True, help="All of them, however many there are.")
def list_jobs(scope: Scope, cluster: str | None, state: str | None, limit: int, every: bool) -> Any:
    """Jobs, the newest first: of all workspaces and experiments, unless one is named."""
    from mlflow_batchai.client import jobview
    from mlflow_batchai.tracking import index, reading

    store = tracking()
    mlflow = reading.client(store)
    searched = [experiments.find(mlflow, scope.experiment)] if scope.experiment_given else experiments.every(mlflow)
    names = {entry.experiment_id: entry.name for entry in searched}
    wanted = {
        "workspace": scope.workspace if scope.workspace_given else None,
        "cluster": short_name(cluster) if cluster else None,
        "state": state,
    }
    size = index.PAGE if every else limit + 1
    found = experiments.pages(lambda token: index.jobs(mlflow, size, token, names, **wanted))
    listed = list(found if every else itertools.islice(found, size))
    if len(listed) > limit and not every:
        del listed[limit:]
        notice(f"these are the newest {limit}: --limit N or --all shows more")
    if not listed:
        if scope.workspace_given:
            # Jobs may stand under a workspace that has no record here: only now it matters.
            workspaces.find(scope.workspace)
        filtered = scope.experiment_given or any(wanted.values())
        notice(f"{'no such jobs' if filtered else 'no jobs'} in {store.uri}")
    return [jobview.summary(run, names.get(run.info.experiment_id)) for run in listed]


@job.verb("wait", example="batchai job wait digits-3f2a1c")
@_named
@click.option("--interval", type=click.IntRange(1), default=15, help="Accepted as `az` had it; a job's end is noticed sooner.")
def wait(scope: Scope, name: str, interval: int) -> None:
    """Wait for a job's end; the exit code is the job's, and never 0 for one that did not succeed.

    Ctrl-C leaves the job running.
    """
    from mlflow_batchai.client import jobview, runner
    from mlflow_batchai.follower import detached

    found, run = _found(scope, name)
    if found is not None:
        detached.ensure_follower(found)
        runner.outcome(found, runner.wait(found, notice, news=notice))
        notice(f"job {found.job.name} succeeded")
        return
    known = jobview.summary(run)
    if run.info.status != "FINISHED":
        why = "was terminated" if jobview.is_terminated(known) else "failed"
        raise JobFailedError(f"job {known['name']} {why}: {known['reason']}", (known["executionInfo"] or {}).get("exitCode"))
    notice(f"job {known['name']} succeeded")


@job.verb("attach", ATTACH_COLUMNS, example="batchai job attach digits-3f2a1c")
@named("job", _of_job, optional=True)
@click.option("--new", "only_new", is_flag=True, help="Only output that comes from now on.")
@click.option("--all", "every", is_flag=True, help="Give each of your jobs that has not ended a follower, if it has none.")
@click.option("--wait", "waits", is_flag=True, help="With --all: until all of them have ended.")
@click.option(
    "--trust", "trusts", is_flag=True, help="Obey the plan of a job that was signed with another key, once it was shown."
)
@confirmed
def attach(scope: Scope, name: str | None, only_new: bool, every: bool, waits: bool, trusts: bool, yes: bool) -> Any:
    """Show a job's output and progress until it has ended; exit code 0 only if it succeeds.

    It can be any job whose share this machine sees, by its name or its run id. If nobody relays it into MLflow any more, that
    goes on from here, if it is yours: signed with your key, which a second machine of yours gets by `batchai key import`. For a
    job of another key --trust shows what its plan would have this machine open, and asks. Ctrl-C leaves the job running;
    `batchai job terminate` ends it.

    With --all, for cron: all jobs of yours in the tracking store, in whatever experiment, as your key's signature says. Those
    that nobody relays any more get a follower on this machine; no output is shown. Sweeps that nobody drives go on.
    Exit code 1 if some jobs can't be looked at from here.
    """
    from mlflow_batchai.client import runner
    from mlflow_batchai.client.console import JobConsole
    from mlflow_batchai.client.signals import Signals
    from mlflow_batchai.follower import detached

    if every:
        _refuse(name, only_new, trusts)
        return _attach_all(waits)
    if waits:
        raise click.UsageError("--wait belongs to --all; without that, attach always stays until the job has ended")
    if not name:
        raise click.UsageError("the name of the job is missing: -n NAME (or --all, for all of yours)")
    if trusts:
        _trust(scope, name, yes)
    found = find_job(scope, name)
    console = JobConsole(found.job.plan.ranks)
    if told := _who(detached.ensure_follower(found), found.job.name):
        console.say(told)
    runner.outcome(found, runner.watch(found, console, Signals(cancels=False), from_start=not only_new))
    console.say(f"job {found.job.name} succeeded")
    return None


def _refuse(name: str | None, only_new: bool, trusts: bool) -> None:
    context = click.get_current_context()
    given = [option for key, option in _SCOPE.items() if context.get_parameter_source(key) is ParameterSource.COMMANDLINE]
    for what in [*([name] if name else []), *(["--new"] if only_new else []), *(["--trust"] if trusts else []), *given]:
        raise click.UsageError(f"--all is about all jobs of yours in the tracking store; it can't stand with {what}")


def _trust(scope: Scope, name: str, yes: bool) -> None:
    """Show what the plan of a job would have this machine do, and trust that plan if the person agrees."""
    from mlflow_batchai.client import lookup
    from mlflow_batchai.job import signing
    from mlflow_batchai.job.places import output_places

    run, _ = find_run(scope, name)
    job = lookup.untrusted(run)
    if job.is_trusted:
        return
    plan = job.plan
    places = [f"{place['share']}/{place['path']}" for place in output_places(plan)]
    for what, values in (
        ("plan", [f"{job.share.url}/{job.folder}/batchai/plan.json"]),
        ("run that is written", [job.plan.run_id]),
        ("cluster that is asked", [plan.cluster]),
        ("logs that are sent to the run", [f"{job.share.url}/{job.paths.stdouterr}"]),
        ("outputs that are sent to the run", places),
    ):
        for value in values:
            click.echo(f"batchai: {what}: {printable(value)}", err=True)
    ask(f"Trust the plan of job {job.name}, as it is now, on this machine?", yes)
    signing.pin(run.info.run_id, job.plan_digest, job.share.url)


def _who(follower: LeaseView, job: str) -> str:
    """Describe who relays the job, and whether that continues from here; empty if there is nothing to say."""
    from mlflow_batchai.job.lease import LeaseState

    if follower.state is LeaseState.HELD:
        reason = f", and says: {follower.trouble}; it is tried from here" if follower.trouble else ""
        return f"{follower.who} relays job {job}{reason}"
    if follower.state is LeaseState.UNKNOWN and follower.holder:
        return f"{follower.who} has relayed job {job}; if it is gone, that goes on from here"
    if follower.state is LeaseState.FREE and follower.trouble:
        return f"{follower.who} has left job {job}: {follower.trouble}; it goes on from here"
    return ""


def _attach_all(waits: bool) -> Result:
    from mlflow_batchai.client import orphans
    from mlflow_batchai.tracking import index

    store = tracking()
    found = index.unended(store)
    if len(found) >= index.MOST:
        notice(f"there are more than {index.MOST} jobs that have not ended; these are the newest")
    if not found:
        hint = "" if os.environ.get("MLFLOW_TRACKING_URI") else " (MLFLOW_TRACKING_URI is not set)"
        notice(f"no job that was signed with your key has not ended in {store.uri}{hint}")
    candidates = [_said(candidate) for candidate in orphans.look_after(found, store, notice)]
    if waits:
        for candidate in orphans.wait(candidates, notice):
            _said(candidate)
    _attach_sweeps(store)
    seen = all(candidate.result is not orphans.Result.UNSEEN for candidate in candidates)
    return Result([candidate.row() for candidate in candidates], complete=seen)


def _attach_sweeps(store: Tracking) -> None:
    """Go on with sweeps that no process drives any more."""
    from mlflow_batchai.sweep import driver, sweeps
    from mlflow_batchai.tracking import runs

    for run in sweeps.unended(runs.client(store)):
        try:
            sweep = sweeps.of_run(run, store)
            if not sweep.is_own:
                told = "its plan was changed in the tracking store; it is left alone"
            elif (process := driver.ensure(sweep)) is None:
                told = "a process of this machine drives it"
            else:
                told = f"process {process} goes on with it, if no other machine does"
        except BatchAIError as error:
            told = str(error)
        notice(f"sweep {run.data.tags[sweeps.TAG_NAME]} (run {run.info.run_id}): {told}")


def _said(candidate: Candidate) -> Candidate:
    notice(candidate.sentence)
    return candidate


@job.verb("logs", example="batchai job logs -f digits-3f2a1c --rank 3")
@_named
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Only what this rank wrote.  [all, joined]")
@click.option("--stderr", is_flag=True, help="Standard error instead of standard output.")
@of_attempt
def logs(scope: Scope, name: str, follow: bool, rank: int | None, stderr: bool, attempt: int | None) -> None:
    """A job's output so far, of all ranks or of one. Ctrl-C leaves the job running."""
    from mlflow_batchai.job import streams
    from mlflow_batchai.tracking import directories

    found = find_job(scope, name, attempt)
    job = found.job
    file = directories.log_name(job, rank, "stderr" if stderr else "stdout")
    if follow:
        show_text(growing(found, directories.LOGS, file, required=False), job.name)
        return
    place = directories.directory(job, directories.LOGS)
    state = job.state()
    ended = state.ended or state.next_attempt is not None
    tail = streams.Tail(place.share, place.inside(file))
    show_text(streams.so_far(tail, ended), job.name)
    if not tail.position:
        other = "" if stderr or not state.start_time else "; --stderr shows standard error"
        notice(f"job {job.name} has written nothing to {file}{'' if ended else ' yet'}{other}")


@job.verb("terminate", example="batchai job terminate digits-3f2a1c -y")
@_named
@confirmed
@click.option("--no-wait", is_flag=True, help="Return before the job has ended.")
def terminate(scope: Scope, name: str, yes: bool, no_wait: bool) -> None:
    """End a job: its ranks are gone and its run is KILLED when this returns. One that has ended stays as it is."""
    from mlflow_batchai.client import lookup
    from mlflow_batchai.follower import detached

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
        detached.end_changed(store, run.info.run_id, f"terminated; {error}", "KILLED")
        notice(f"{error}; nothing of the job runs any more, and its run is KILLED")
        return
    if found.job.state().ended:
        notice(f"job {found.job.name} has ended already")
        _end(found, None, no_wait)
        return
    ask(f"Terminate job {found.job.name}?", yes)
    if (state := _end(found, "batchai job terminate", no_wait)) is not None:
        notice(f"job {found.job.name}: {state.execution_state} ({state.reason or state.error_code})")


@job.verb("retry", COLUMNS, example="batchai job retry digits-3f2a1c")
@_named
def retry(scope: Scope, name: str) -> Any:
    """Run a job that has not succeeded once more: the same plan, run and output directories, in a new attempt.

    Returns when its agents wait for their nodes. A script that finds its checkpoint in its output directory goes on from there;
    the logs of earlier attempts are kept. The values of the document's secrets are taken from variables BATCHAI_SECRET_<NAME>.
    """
    from mlflow_batchai.client import attempts, jobview

    found = find_job(scope, name)
    attempts.retry(found, load_cluster(found.job.plan.cluster), notice)
    job_name, attempt = found.job.name, found.job.attempt
    notice(f"job {job_name}: attempt {attempt} submitted; follow it with: batchai job attach {job_name}")
    return jobview.view(found)


@job.verb("rerun", example="batchai job rerun digits-3f2a1c -P learning_rate=1e-3")
@_named
@click.option("-P", "--param-list", "values", metavar="NAME=VALUE", multiple=True, help="Another value for a parameter.")
@click.option("-c", "--cluster", metavar="NAME", help="Cluster.  [the job's]")
@click.option("--into", metavar="NAME", help="MLflow experiment of the new run.  [the job's]")
@click.option("--run-name", metavar="NAME", help="Name of the new run.")
@click.option("--no-wait", is_flag=True, help="Return at once.")
@click.option("--trust", "trusts", is_flag=True, help="Run what another key has signed, once it was shown.")
@confirmed
def rerun(
    scope: Scope,
    name: str,
    values: Sequence[str],
    cluster: str | None,
    into: str | None,
    run_name: str | None,
    no_wait: bool,
    trusts: bool,
    yes: bool,
) -> None:
    """Run the code and the document of a job as a new job, also of one that succeeded, and show it until it has ended.

    They are kept with the job's run, if its code is small (artifacts.code of batchai.yaml), so its folder may be gone. The
    values of the document's secrets are taken from variables BATCHAI_SECRET_<NAME>. Exit code 0 only if the new job succeeds.
    """
    if wrong := [value for value in values if not value.partition("=")[0] or "=" not in value]:
        raise UsageError(f"-P {wrong[0]}: should be NAME=VALUE")
    from mlflow_batchai.client import rerun, submitting
    from mlflow_batchai.tracking import runs

    def trust(facts: Mapping[str, str]) -> None:
        for what, value in facts.items():
            click.echo(f"batchai: {what}: {printable(value)}", err=True)
        ask(f"Run this code of job {name} on this user's behalf?", yes)

    run, store = find_run(scope, name)
    parameters = {key: value for key, _, value in (value.partition("=") for value in values)}
    with tempfile.TemporaryDirectory(prefix="batchai-") as folder:
        ready = rerun.prepare(
            run, store, Path(folder), parameters, short_name(cluster) if cluster else None, notice, trust if trusts else None
        )
        mlflow = runs.client(store)
        where = submitting.experiment_named(store, into) if into else mlflow.get_experiment(run.info.experiment_id)
        if no_wait:
            ready = replace(ready, source=replace(ready.source, config=ready.source.config.model_copy(update={"wait": False})))
        submitting.run(ready, store, where, run_name, tags={runs.TAG_RERUN_OF: run.info.run_id})


@job.verb("delete", example="batchai job delete digits-3f2a1c -y")
@_named
@confirmed
@click.option("--no-wait", is_flag=True, help="Return before a job that runs has ended.")
def delete(scope: Scope, name: str, yes: bool, no_wait: bool) -> None:
    """End a job and delete its run, which MLflow can restore until `mlflow gc`. Its files stay until `batchai gc`."""
    from mlflow_batchai.client import jobview, lookup
    from mlflow_batchai.follower import detached
    from mlflow_batchai.tracking import runs

    run, store = find_run(scope, name)
    job, run_id = run.data.tags[runs.TAG_JOB], run.info.run_id
    ask(f"Delete job {job}?", yes)
    files = "nothing of it lies on its share"
    try:
        found = lookup.of_run(run, store)
        files = f"its files stay at {jobview.address(found.job.share, found.job.folder)} until `batchai gc`"
        ended = found.job.state().ended
        if not (ended and no_wait):
            _end(found, None if ended else "batchai job delete", no_wait)
    except lookup.NoFolderError:
        pass
    except JobChangedError as error:
        detached.end_changed(store, run_id, str(error), "KILLED")
        files = f"{error}: its files stay"
    except ShareError as error:
        if run.info.end_time is None:
            raise
        files = f"its files stay where this machine can't see them ({error})"
    runs.client(store).delete_run(run_id)
    notice(f"job {job} is deleted; {files}; its run is in MLflow's trash (mlflow runs restore --run-id {run_id})")


def _end(found: Submitted, why: str | None, no_wait: bool) -> Any:
    """Bring a job and its run to their end.

    Args:
        why: for the job's log; None: the job has ended, and only its run may not have, if nobody relays the job any more.

    Returns:
        The job's state then; None if that isn't waited for.
    """
    from mlflow_batchai.client import runner
    from mlflow_batchai.follower import detached

    if why is not None:
        runner.cancel(found, why)
        if not found.job.is_trusted:
            notice(f"job {found.job.name} was asked to end; its run is brought to its end by who has submitted it")
            return None
    detached.ensure_follower(found)
    return None if no_wait else runner.wait(found, notice)


job.add_command(job_file)
job.add_command(job_node)
