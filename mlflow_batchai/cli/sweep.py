"""``batchai sweep``: a project run once for each combination of values, as jobs whose runs are children of one parent run."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import uuid
from collections.abc import Sequence
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import click

from mlflow_batchai import terminal
from mlflow_batchai.agent import protocol
from mlflow_batchai.cli.options import ask, command, confirmed, named, notice, tracking
from mlflow_batchai.cli.output import Column, Drawn, Incomplete
from mlflow_batchai.client import runner, submitting
from mlflow_batchai.client.console import JobConsole
from mlflow_batchai.client.signals import Signals
from mlflow_batchai.cluster.workspaces import iso
from mlflow_batchai.documents.model import secret_values
from mlflow_batchai.documents.reading import load_text
from mlflow_batchai.errors import UsageError
from mlflow_batchai.job.places import slug
from mlflow_batchai.sweep import driver, leader_lock, sweeps
from mlflow_batchai.sweep.parameters import combine, parse_values, read_rows
from mlflow_batchai.sweep.results import Results, comparison, judge
from mlflow_batchai.sweep.starter import JobStarter, code_hash
from mlflow_batchai.sweep.sweeps import Sweep, SweepPlan
from mlflow_batchai.terminal import printable
from mlflow_batchai.tracking import runs

# The most letters that MLflow's tables take.
LONGEST_NAME = 250
STYLES = {"succeeded": "green", "failed": "red", "terminated": "yellow", "running": "cyan"}
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


@command(example="batchai sweep run . -P learning_rate=1e-4,3e-4 -P batch_size=32,64", scoped=False, output="table")
@click.argument("project", default=".")
@click.option("-P", "--param-list", "values", metavar="NAME=VALUE,...", multiple=True, help="A parameter and its values.")
@click.option(
    "--from", "file", metavar="FILE", type=click.Path(path_type=Path), help="Sets of parameters: CSV, or a YAML or JSON list."
)
@click.option("--random", "sample", metavar="N", type=click.IntRange(1), help="Only N of the combinations, by chance.")
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="Of --random: the same takes the same.")
@click.option("-e", "--entry-point", metavar="NAME", default="main", show_default=True, help="Entry point of the project.")
@click.option("-v", "--version", metavar="COMMIT", help="Commit or branch of a project in git.")
@click.option("--experiment-name", metavar="NAME", envvar="MLFLOW_EXPERIMENT_NAME", help="MLflow experiment.")
@click.option("--run-name", "name", metavar="NAME", help="Name of the sweep.")
@click.option("-c", "--backend-config", metavar="FILE|JSON", help="Over the keys of batchai.yaml.")
@click.option("--env-manager", metavar="NAME", help="local, virtualenv or uv, as `mlflow run` has it.")
@click.option("--cluster", metavar="NAME", help="Cluster.  [as `mlflow run` chooses it]")
@click.option("--parallel", metavar="N", type=click.IntRange(1), help="Jobs at once.  [as many as have nodes, and one]")
@click.option("--metric", metavar="NAME", help="What jobs are compared by.  [model.promoteIf, or a usual one]")
@click.option("--mode", type=click.Choice(["max", "min"]), help="Whether more or less is better.  [less of a loss or an error]")
@click.option("--no-wait", is_flag=True, help="Return at once; a process of its own starts the jobs.")
def run(
    project: str,
    values: Sequence[str],
    file: Path | None,
    sample: int | None,
    seed: int,
    experiment_name: str | None,
    backend_config: str | None,
    cluster: str | None,
    no_wait: bool,
    **options: Any,
) -> Drawn | Incomplete:
    """Run a project once for each combination of values, and show what came of it, the best first.

    A value with a comma is written as in CSV: -P 'layers="64,32",128' are two. With --from, each of its sets is combined with
    the values of -P. Everything is checked before anything starts. Exit code 0 only if all jobs succeeded.

    Ctrl-C ends all jobs; a terminal that closes leaves them, and `batchai sweep attach` goes on with the rest. The word `run`
    may be left out.
    """
    if not values and file is None:
        raise UsageError("there is nothing to sweep: give a parameter's values (-P learning_rate=1e-4,3e-4) or --from FILE")
    combinations, repeated = combine(parse_values(values), read_rows(file) if file else (), sample, seed)
    if repeated:
        notice(f"{repeated} combination(s) stand there more than once; each is run once")
    settings = _settings(backend_config, cluster)
    # The options that are left are fields of the plan.
    plan = SweepPlan(
        **options, uri=_address(project), settings=settings, cwd=str(Path.cwd()), combinations=combinations, code=""
    )
    console = JobConsole(1)
    starter = JobStarter(notice, console.transfer)
    ready = starter.first = starter.check(plan)
    plan = _completed(plan, ready)
    store = tracking()
    if experiment_name:
        experiment = submitting.experiment_named(store, experiment_name)
    else:
        experiment = submitting.choose_experiment(store, ready.source, os.environ.get("MLFLOW_EXPERIMENT_ID") or None)
    tags = runs.source_tags(plan.uri, plan.entry_point, ready.source.project.directory, runner.user())
    if not no_wait:
        tags[sweeps.TAG_LEADER] = leader_lock.this_process()
    signals = Signals(ends="the sweep ends as soon as this submit is done")
    with signals.installed():
        sweep = sweeps.begin(plan, store, experiment.experiment_id, tags)
        where = runs.page(store.uri, experiment.experiment_id, sweep.run_id) or store.uri
        notice(f"sweep {plan.name}: {len(plan.combinations)} jobs, {plan.parallel} at once; run {sweep.run_id}: {where}")
        if no_wait:
            if signals.cancelled:
                runs.client(store).set_tag(sweep.run_id, runs.TAG_CANCEL, "true")  # the process that starts now ends it
            log = driver.start_process(sweep)
            notice(f"its jobs are started by a process that writes to {log}: batchai sweep attach {plan.name}")
            return _shown(sweep, judge(plan, {}, 0), "RUNNING")
        return _drive(driver.Driver(sweep, starter.submit, console, signals, fresh=True), sweep)


@command(example="batchai sweep attach digits-sweep-3f2a1c", scoped=False, output="table")
@named("sweep")
@taking_over
def attach(name: str, take_over: bool) -> Drawn | Incomplete:
    """Go on with a sweep and stay until it has ended: jobs that nobody has started are started from here.

    One process at a time starts jobs; if another one does, this one watches, and goes on when that is gone. Ctrl-C leaves the
    sweep; `batchai sweep terminate` ends it. The project must lie where it did, as it was.
    """
    store = tracking()
    sweep = sweeps.of_run(sweeps.find(store, name), store)
    return _drive(driver_of(sweep, take_over), sweep)


@command(example="batchai sweep show digits-sweep-3f2a1c -o json --query best.runId", scoped=False, output="table")
@named("sweep")
def show(name: str) -> Drawn:
    """A sweep's jobs and their results, the best first."""
    store = tracking()
    sweep = sweeps.of_run(sweeps.find(store, name), store)
    parent, jobs = sweeps.read_runs(runs.client(store), sweep)
    return _shown(sweep, judge(sweep.plan, jobs, protocol.now_ms()), str(parent.info.status) if parent else "DELETED")


@command(COLUMNS, example="batchai sweep list", scoped=False, output="table")
def list_sweeps() -> list[dict[str, Any]]:
    """Sweeps of all experiments, the newest first."""
    store = tracking()
    found = sweeps.search(runs.client(store))
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
    store = tracking()
    parent = sweeps.find(store, name)
    if parent.info.status != "RUNNING":
        notice(f"sweep {parent.data.tags[sweeps.TAG_NAME]} has ended already ({parent.info.status})")
        return None
    if sweeps.TAG_SWEEP not in parent.data.tags:
        # The process that began it died before it kept the plan, so it has no jobs.
        ask(f"Terminate sweep {parent.data.tags[sweeps.TAG_NAME]}, which was never started?", yes)
        runs.client(store).set_terminated(parent.info.run_id, "KILLED")
        return None
    sweep = sweeps.of_run(parent, store)
    ask(f"Terminate sweep {sweep.plan.name} and all of its jobs?", yes)
    runs.client(store).set_tag(sweep.run_id, runs.TAG_CANCEL, "true")
    if no_wait:
        driver.start_process(sweep)
        return None
    driving = driver_of(sweep, take_over)
    driving.run()
    return _shown(sweep, driving.results, driving.status)


def driver_of(sweep: Sweep, take_over: bool = False) -> driver.Driver:
    """The driver of a sweep that was begun earlier; Ctrl-C leaves the sweep."""
    console = JobConsole(1)
    return driver.Driver(sweep, JobStarter(notice, console.transfer).submit, console, Signals(cancels=False), take_over)


def _drive(driving: driver.Driver, sweep: Sweep) -> Drawn | Incomplete:
    """Stay to the end; the command fails unless all jobs have succeeded."""
    driving.run()
    notice(f"sweep {sweep.plan.name}: {driving.results.counts}")
    shown = _shown(sweep, driving.results, driving.status)
    return shown if driving.status == "FINISHED" else Incomplete(shown)


def _settings(given: str | None, cluster: str | None) -> dict[str, Any]:
    """Settings over batchai.yaml, the same from any folder: JSON, or a file by its name."""
    settings: dict[str, Any] = {}
    if given is not None:
        is_json = given.lstrip().startswith("{")
        if not is_json and not Path(given).expanduser().is_file():
            raise UsageError(f"--backend-config {given}: is neither a file nor JSON")
        settings = load_text(given, "--backend-config") if is_json else {"config": given}
    if "config" in settings:
        settings["config"] = str(Path(str(settings["config"])).expanduser().absolute())
    return {**settings, "cluster": cluster} if cluster else settings


def _address(project: str) -> str:
    """The project's address, the same from any folder.

    Raises:
        UsageError: it holds a password, which must not be kept with the sweep.
    """
    path, mark, inside = project.partition("#")
    folder = Path(path).expanduser().absolute()
    if "://" not in path and folder.exists():
        return f"{folder}{mark}{inside}"
    if terminal.shown(project) != project:
        raise UsageError(
            f"{terminal.shown(project)}: the address is kept with the sweep, and can't hold a password; leave that to git"
            " (git help credentials)"
        )
    return project


def _completed(plan: SweepPlan, ready: submitting.Ready) -> SweepPlan:
    """The plan with what follows from the project.

    Raises:
        UsageError: the settings hold a secret, or the name can't be used.
    """
    source, text = ready.source, json.dumps(plan.settings, ensure_ascii=False)
    if any(json.dumps(secret, ensure_ascii=False)[1:-1] in text for secret in secret_values(source.config) if secret):
        raise UsageError(
            "--backend-config holds a secret, and would be kept with the sweep's run; put it into a file: --backend-config FILE"
        )
    name = plan.name or source.config.name or f"{slug(source.project.name, 30)}-sweep-{uuid.uuid4().hex[:6]}"
    if not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME or set("'\"") <= set(name):
        raise UsageError(
            f"the sweep's name '{printable(name[:LONGEST_NAME])}' should be one line of 1 to {LONGEST_NAME} letters, without"
            " both kinds of quotes: --run-name NAME"
        )
    parallel = plan.parallel or max(1, source.cluster.open_nodes // ready.prepared.plan.node_count) + 1
    metric, mode = comparison(plan.metric, plan.mode, source.config)
    return dataclasses.replace(plan, name=name, parallel=parallel, metric=metric, mode=mode, code=code_hash(ready))


def _shown(sweep: Sweep, results: Results, status: str) -> Drawn:
    return Drawn(results.data(sweep.run_id, status), lambda: table(results))


def table(results: Results) -> str:
    """The results as a table, the best job, and a sentence for each job that failed."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    colored = terminal and not os.environ.get("NO_COLOR")
    # Elsewhere than on a terminal no line is broken.
    console = Console(file=StringIO(), force_terminal=colored, width=None if terminal else 1000, highlight=False)
    drawn = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (*results.columns, "State", *results.metrics, "Duration", "Job"):
        is_number = name in results.metrics or name == "Duration"
        drawn.add_column(Text(printable(name)), justify="right" if is_number else "left", overflow="fold")
    for row in results.rows:
        values = [f"{row.metrics[name]:.6g}" if name in row.metrics else "" for name in results.metrics]
        duration = "" if row.seconds is None else str(timedelta(seconds=round(row.seconds)))
        parameters = [row.parameters.get(name, "") for name in results.columns]
        texts = [Text(printable(cell)) for cell in (*parameters, row.state, *values, duration, row.name)]
        texts[len(results.columns)].style = STYLES.get(row.state, "")
        drawn.add_row(*texts, style="bold" if results.best is row else "")
    failed = (row for row in results.rows if row.state == protocol.FAILED)
    sentences = [results.summary, *(f"{row.name} failed: {row.reason or 'no reason is known'}" for row in failed)]
    with console.capture() as captured:
        console.print(drawn)
        for sentence in filter(None, sentences):
            console.print(Text(printable(sentence)), soft_wrap=True)
    return "\n".join(line.rstrip() for line in captured.get().strip("\n").split("\n"))
