"""``batchai sweep attach|show|list|terminate``: sweeps that were begun."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mlflow_batchai.cli.options import ask, command, confirmed, named, notice, tracking
from mlflow_batchai.cli.output import Column
from mlflow_batchai.cli.sweep_table import drawn, outcome

if TYPE_CHECKING:
    from mlflow_batchai.cli.output import Drawn, Incomplete
    from mlflow_batchai.sweep.driving import Driving
    from mlflow_batchai.sweep.sweeps import Sweep

COLUMNS: list[Column] = [
    ("Name", "name"),
    ("Run", "runId"),
    ("Status", "runStatus"),
    ("Jobs", "jobs"),
    ("Best", "bestMetric"),
    ("Created", "creationTime"),
]

taking_over = click.option(
    "--take-over", is_flag=True, help="Another machine's process that starts its jobs is gone: go on from here."
)


@command(example="batchai sweep attach digits-sweep-3f2a1c", scoped=False, output="table")
@named("sweep")
@taking_over
def attach(name: str, take_over: bool) -> Drawn | Incomplete:
    """Go on with a sweep and stay until it has ended: jobs that nobody has started are started from here.

    One process at a time starts jobs; if another one does, this one watches, and goes on when that is gone. Ctrl-C leaves the
    sweep; `batchai sweep terminate` ends it. The project must lie where it did, as it was.
    """
    sweep = _find(name)
    driving = _driving(sweep, take_over)
    driving.run()
    return outcome(driving, sweep.run_id)


@command(example="batchai sweep show digits-sweep-3f2a1c -o json --query best.runId", scoped=False, output="table")
@named("sweep")
def show(name: str) -> Drawn:
    """A sweep's jobs and their results, the best first."""
    from mlflow_batchai import runs
    from mlflow_batchai.node import protocol
    from mlflow_batchai.sweep import sweeps
    from mlflow_batchai.sweep.results import judge

    sweep = _find(name)
    parent, jobs = sweeps.members(runs.client(sweep.tracking), sweep)
    status = str(parent.info.status) if parent else "DELETED"
    return drawn(judge(sweep.plan, jobs, protocol.now_ms()), sweep.run_id, status)


@command(COLUMNS, example="batchai sweep list", scoped=False, output="table")
def list_sweeps() -> list[dict[str, Any]]:
    """Sweeps of all experiments, the newest first."""
    from mlflow_batchai import runs
    from mlflow_batchai.sweep import sweeps
    from mlflow_batchai.workspaces import iso

    store = tracking()
    found = sweeps.every(runs.client(store))
    if not found:
        notice(f"no sweeps in {store.uri}")
    return [
        {
            "name": run.data.tags[sweeps.TAG_NAME],
            "runId": run.info.run_id,
            "runStatus": run.info.status,
            "jobs": int(run.data.tags[sweeps.TAG_JOBS]),
            "best": run.data.tags.get(sweeps.TAG_BEST),
            "bestMetric": run.data.tags.get(sweeps.TAG_BEST_METRIC),
            "creationTime": iso(run.info.start_time),
        }
        for run in found
    ]


@command(example="batchai sweep terminate digits-sweep-3f2a1c -y", scoped=False, output="table")
@named("sweep")
@confirmed
@taking_over
@click.option("--no-wait", is_flag=True, help="Return before its jobs have ended.")
def terminate(name: str, yes: bool, take_over: bool, no_wait: bool) -> Drawn | None:
    """End a sweep: its jobs are ended, no more are started, and its run is KILLED when this returns."""
    from mlflow_batchai import runs
    from mlflow_batchai.sweep import background, sweeps

    store = tracking()
    run = sweeps.find(store, name)
    if run.info.status != "RUNNING":
        notice(f"sweep {run.data.tags[sweeps.TAG_NAME]} has ended already ({run.info.status})")
        return None
    ask(f"Terminate sweep {run.data.tags[sweeps.TAG_NAME]} and all of its jobs?", yes)
    mlflow = runs.client(store)
    if sweeps.TAG_SWEEP not in run.data.tags:
        mlflow.set_terminated(run.info.run_id, "KILLED")
        notice(f"none of the jobs of sweep {run.data.tags[sweeps.TAG_NAME]} had been started; its run is KILLED")
        return None
    sweep = sweeps.of_run(run, store)
    mlflow.set_tag(sweep.run_id, runs.TAG_CANCEL, "true")
    if no_wait:
        background.start(sweep)
        return None
    driving = _driving(sweep, take_over)
    driving.run()
    return drawn(driving.results(), sweep.run_id, driving.status)


def _find(name: str) -> Sweep:
    from mlflow_batchai.sweep import sweeps

    store = tracking()
    return sweeps.of_run(sweeps.find(store, name), store)


def _driving(sweep: Sweep, take_over: bool) -> Driving:
    from mlflow_batchai.console import JobConsole
    from mlflow_batchai.signals import Signals
    from mlflow_batchai.sweep.driving import Driving
    from mlflow_batchai.sweep.jobs import JobsOfPlan

    console = JobConsole(1)
    return Driving(sweep, JobsOfPlan(sweep.plan, console.say, console.transfer), console, Signals(cancels=False), take_over)
