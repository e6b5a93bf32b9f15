"""``batchai job attach``: a job shown until its end, or all jobs of a user given a follower again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mlflow_batchai.cli.lookup import find_job, find_run
from mlflow_batchai.cli.options import Scope, ask, command, confirmed, named, notice, tracking
from mlflow_batchai.cli.output import Column, Result, echo
from mlflow_batchai.cli.sweep import driver_of
from mlflow_batchai.errors import BatchAIError
from mlflow_batchai.terminal import printable

if TYPE_CHECKING:
    from mlflow_batchai.client.orphans import Charge
    from mlflow_batchai.job.lease import Glance
    from mlflow_batchai.tracking.runs import Tracking

COLUMNS: list[Column] = [("Name", "name"), ("Run", "runId"), ("State", "executionState"), ("Result", "detail")]
_SCOPE = {"group_": "-g", "workspace_": "-w", "experiment_": "-e"}


@command(COLUMNS, example="batchai job attach digits-3f2a1c", experiment=True)
@named("job", optional=True)
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
    that nobody relays any more get a follower on this machine; no output is shown. Sweeps whose jobs have all ended are ended.
    Exit code 1 if some jobs can't be looked at from here.
    """
    if every:
        _refuse(name, only_new, trusts)
        return _attach_all(waits)
    if waits:
        raise click.UsageError("--wait belongs to --all; without that, attach always stays until the job has ended")
    if not name:
        raise click.UsageError("the name of the job is missing: -n NAME (or --all, for all of yours)")
    if trusts:
        _trust(scope, name, yes)
    _attach(scope, name, only_new)
    return None


def _refuse(name: str | None, only_new: bool, trusts: bool) -> None:
    context = click.get_current_context()
    given = [option for key, option in _SCOPE.items() if context.get_parameter_source(key) is ParameterSource.COMMANDLINE]
    for what in [*([name] if name else []), *(["--new"] if only_new else []), *(["--trust"] if trusts else []), *given]:
        raise click.UsageError(f"--all is about all jobs of yours in the tracking store; it can't stand with {what}")


def _trust(scope: Scope, name: str, yes: bool) -> None:
    """Show what the plan of a job would have this machine do, and trust that plan if the person agrees."""
    from mlflow_batchai.client import lookup
    from mlflow_batchai.job import trust
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
    trust.pin(run.info.run_id, job.plan_digest, job.share.url)


def _attach(scope: Scope, name: str, only_new: bool) -> None:
    from mlflow_batchai.client import runner
    from mlflow_batchai.client.console import JobConsole
    from mlflow_batchai.client.signals import Signals
    from mlflow_batchai.follower import detached

    found = find_job(scope, name)
    console = JobConsole(found.job.plan.ranks)
    if told := _who(detached.ensure_follower(found), found.job.name):
        console.say(told)
    state = runner.watch(found, console, Signals(cancels=False), from_start=not only_new)
    runner.outcome(found, state)
    console.say(f"job {found.job.name} succeeded")


def _who(follower: Glance, job: str) -> str:
    """Who relays the job, and whether that goes on from here; empty if there is nothing to say of it."""
    from mlflow_batchai.job.lease import Hold

    if follower.hold is Hold.HELD:
        trouble = f", and says: {follower.trouble}; it is tried from here" if follower.trouble else ""
        return f"{follower.who} relays job {job}{trouble}"
    if follower.hold is Hold.UNKNOWN and follower.holder:
        return f"{follower.who} has relayed job {job}; if it is gone, that goes on from here"
    if follower.hold is Hold.FREE and follower.trouble:
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
    charges = [_said(charge) for charge in orphans.look_after(found, store, notice)]
    if waits:
        for charge in orphans.wait(charges, notice):
            _said(charge)
    _end_sweeps(store)
    seen = all(charge.result is not orphans.Result.UNSEEN for charge in charges)
    return Result([charge.row() for charge in charges], complete=seen)


def _end_sweeps(store: Tracking) -> None:
    """Runs of sweeps whose jobs have all ended are ended too; of the others it is said what they wait for."""
    from mlflow_batchai.sweep import sweeps
    from mlflow_batchai.tracking import runs

    for run in sweeps.unended(runs.client(store)):
        try:
            sweep = sweeps.of_run(run, store)
            told = (
                driver_of(sweep).end_if_over()
                if sweep.is_own
                else "its plan was changed in the tracking store; it is left alone"
            )
        except BatchAIError as error:
            told = str(error)
        echo(f"batchai: sweep {run.data.tags[sweeps.TAG_NAME]} (run {run.info.run_id}): {told}", err=True)


def _said(charge: Charge) -> Charge:
    echo(f"batchai: {charge.sentence}", err=True)
    return charge
