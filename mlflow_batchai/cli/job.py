"""``batchai job``: the jobs of a tracking store."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mlflow.entities import Run

    from mlflow_batchai.runs import Tracking

COLUMNS = ("Name", "Cluster", "Nodes", "State", "Exit code", "Run")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def job() -> None:
    """List, show, attach to and terminate jobs.

    A job is named by its name or by its MLflow run id. The tracking store is MLflow's: MLFLOW_TRACKING_URI, or
    sqlite:///mlflow.db in this folder.
    """


def _tracking() -> Tracking:
    from mlflow import get_tracking_uri

    # MLflow would try a server that is down for two minutes, in silence; a person at a prompt wants to know sooner.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    from mlflow_batchai import runs

    return runs.absolute(get_tracking_uri(), Path.cwd())


@job.command("list")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="The newest N jobs.")
def list_jobs(output: str, limit: int) -> None:
    """The newest jobs first.

    Example: batchai job list -n 10
    """
    from mlflow_batchai import runs

    rows = [_row(run) for run in runs.jobs(runs.client(_tracking()), limit)]
    if output == "json":
        click.echo(json.dumps(rows, indent=2))
        return
    table = [
        COLUMNS,
        *(tuple(str(row[key]) for key in ("name", "cluster", "nodes", "executionState", "exitCode", "runId")) for row in rows),
    ]
    widths = [max(len(line[column]) for line in table) for column in range(len(COLUMNS))]
    for number, line in enumerate(table):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        if number == 0:
            click.echo("  ".join("-" * width for width in widths))


def _row(run: Run) -> dict[str, Any]:
    tags = run.data.tags
    return {
        "name": tags["batchai.job"],
        "cluster": tags.get("batchai.cluster", ""),
        "nodes": int(tags["batchai.nodes"]) if "batchai.nodes" in tags else "",
        "executionState": tags.get("batchai.executionState", ""),
        "exitCode": int(tags["batchai.exitCode"]) if "batchai.exitCode" in tags else "",
        "runId": run.info.run_id,
        "runStatus": run.info.status,
    }


@job.command()
@click.argument("name")
def show(name: str) -> None:
    """A job as JSON: its state, errors, nodes, and where its folder lies.

    Example: batchai job show cifar_horovod-3f2a1c
    """
    from mlflow_batchai import lookup

    found = lookup.find(name, _tracking())
    snapshot = found.job.snapshot()
    state = found.job.state()
    plan = found.job.plan
    click.echo(
        json.dumps(
            {
                "name": plan["name"],
                "id": plan["job"],
                "runId": found.run_id,
                "cluster": plan["cluster"],
                "workspace": plan["workspace"],
                "experimentName": plan["experiment"],
                "executionState": state.execution_state,
                "executionInfo": {
                    "exitCode": state.exit_code,
                    "errors": list(state.errors),
                    "reason": state.reason,
                    "endTime": state.end_time,
                },
                "nodeCount": plan["nodeCount"],
                "processCount": plan["ranks"],
                "command": plan["command"],
                "nodes": [
                    {
                        "id": f"node-{node}",
                        "host": record["host"],
                        "address": record["address"],
                        "exit": snapshot.exits.get(node),
                    }
                    for node, record in sorted(snapshot.announces.items())
                ],
                "share": found.job.share.url,
                "folder": found.job.folder,
                "jobOutputDirectoryPathSegment": plan["segment"],
            },
            indent=2,
        )
    )


@job.command()
@click.argument("name")
@click.option("--new", "only_new", is_flag=True, help="Only output that comes from now on.")
def attach(name: str, only_new: bool) -> None:
    """Show a job until it has ended; exit code 0 only if it succeeds.

    Ctrl-C leaves the job running here (it was submitted elsewhere); `batchai job terminate` ends it.
    """
    from mlflow_batchai import detached, lookup, runner
    from mlflow_batchai.console import JobConsole
    from mlflow_batchai.signals import Signals

    found = lookup.find(name, _tracking())
    console = JobConsole(found.job.plan["ranks"])
    detached.ensure_follower(found)
    state = runner.watch(found, console, Signals(cancels=False), from_start=not only_new)
    runner.outcome(found, state)
    console.say(f"job {found.job.name} succeeded")


@job.command()
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--no-wait", is_flag=True, help="Return before the job has ended.")
def terminate(name: str, yes: bool, no_wait: bool) -> None:
    """End a job: its ranks are gone and its run is KILLED when this returns.

    Example: batchai job terminate cifar_horovod-3f2a1c -y
    """
    from mlflow_batchai import detached, lookup, runner

    tracking = _tracking()
    try:
        found = lookup.find(name, tracking)
    except lookup.NoFolderError as lost:
        if lost.run_ended:
            click.echo(f"job {lost.name} has ended already", err=True)
            return
        _ask(lost.name, yes)
        lookup.end_run(lost, tracking)
        click.echo(f"job {lost.name}: nothing of it had been started; its run is KILLED", err=True)
        return
    if found.job.state().ended:
        click.echo(f"job {found.job.name} has ended already", err=True)
        # Its run may not have: whoever relayed it may be gone.
        detached.ensure_follower(found)
        runner.wait(found)
        return
    _ask(found.job.name, yes)
    runner.cancel(found, "batchai job terminate")
    if no_wait:
        return
    detached.ensure_follower(found)
    state = runner.wait(found)
    click.echo(f"job {found.job.name}: {state.execution_state} ({state.reason or state.error_code})", err=True)


def _ask(name: str, yes: bool) -> None:
    """Have a person agree to ending a job, unless ``--yes`` has."""
    from mlflow_batchai.errors import UsageError

    if yes:
        return
    if not os.isatty(0):
        raise UsageError(f"ending job {name} needs -y where there is no terminal to ask on")
    click.confirm(f"End job {name}?", abort=True, err=True)
