"""``batchai sweep``: run a project once for each combination of values, as child runs of one parent run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlflow_batchai.cli.options import Noun, ask, confirmed, named, notice, tracking
from mlflow_batchai.cli.output import Column, Result, render
from mlflow_batchai.errors import UsageError
from mlflow_batchai.terminal import printable

if TYPE_CHECKING:
    from mlflow_batchai.client.signals import Signals
    from mlflow_batchai.sweep.results import Results
    from mlflow_batchai.sweep.sweeps import Sweep

COLUMNS: list[Column] = [
    ("Name", "name"),
    ("Run", "runId"),
    ("Status", "runStatus"),
    ("Jobs", "jobs"),
    ("Best", "bestMetric"),
    ("Created", "creationTime"),
]

sweep = Noun("sweep", usual="run", scoped=False, output="table")
_named = named("sweep")


@sweep.verb("run", example="batchai sweep run . -P learning_rate=1e-4,3e-4 -P batch_size=32,64")
@click.argument("project", default=".")
@click.option("-P", "--param-list", "values", metavar="NAME=VALUE,...", multiple=True, help="A parameter and its values.")
@click.option(
    "--from", "file", metavar="FILE", type=click.Path(path_type=Path), help="Sets of parameters: CSV, or a YAML or JSON list."
)
@click.option(
    "--sampler", type=click.Choice(["grid", "random", "tpe"]), default="grid", show_default=True, help="What is tried."
)
@click.option("--trials", metavar="N", type=click.IntRange(1, 1000), help="How many jobs, of --sampler random or tpe.")
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="Of --sampler: the same tries the same.")
@click.option("-e", "--entry-point", metavar="NAME", default="main", show_default=True, help="Entry point of the project.")
@click.option("-v", "--version", metavar="COMMIT", help="Commit or branch of a project in git.")
@click.option("--experiment-name", metavar="NAME", help="MLflow experiment.  [MLFLOW_EXPERIMENT_ID, or _NAME]")
@click.option("--run-name", "name", metavar="NAME", help="Name of the sweep.")
@click.option("-c", "--backend-config", metavar="FILE|JSON", help="Over the keys of batchai.yaml.")
@click.option("--env-manager", metavar="NAME", help="local, virtualenv or uv, as `mlflow run` has it.")
@click.option("--cluster", metavar="NAME", help="Cluster.  [as `mlflow run` chooses it]")
@click.option("--parallel", metavar="N", type=click.IntRange(1), help="Jobs at once.  [as many as have nodes, and one]")
@click.option("--metric", metavar="NAME", help="What jobs are compared by.  [model.promoteIf, or a usual one]")
@click.option("--goal", type=click.Choice(["maximize", "minimize"]), help="Of the metric.  [minimize a loss or an error]")
@click.option("--stop", type=click.Choice(["median"]), help="End jobs that fall behind the median of their epoch.")
@click.option("--no-wait", is_flag=True, help="Return at once.")
def run(
    project: str,
    values: Sequence[str],
    file: Path | None,
    sampler: str,
    trials: int | None,
    goal: str | None,
    stop: str | None,
    experiment_name: str | None,
    no_wait: bool,
    **options: Any,
) -> Result:
    """Run a project once for each combination of values, and show what came of it, the best first.

    A value with a comma is written as in CSV: -P 'layers="64,32",128' are two. With --from, each of its sets is combined with
    the values of -P. Everything is checked before anything starts. Exit code 0 only if all jobs succeeded.

    Numbers may be a range: -P learning_rate=1e-5..1e-2:log -P units=16..128:16 (LOW..HIGH:STEP). --sampler random tries some by
    chance (--trials N); tpe, which needs Optuna, goes by what it has seen: --sampler tpe --trials 40 --metric val_accuracy.

    A process of its own starts the jobs. Ctrl-C ends them all; a terminal that closes leaves the sweep, which goes on. The word
    `run` may be left out.
    """
    from mlflow_batchai.client import runner, submitting
    from mlflow_batchai.client.signals import Signals
    from mlflow_batchai.sweep import driver, search, sweeps
    from mlflow_batchai.sweep.parameters import combine, parse_values, read_rows, space
    from mlflow_batchai.sweep.results import is_less_better, judge
    from mlflow_batchai.sweep.starter import plan_sweep
    from mlflow_batchai.tracking import runs

    if not values and file is None:
        raise UsageError("there is nothing to sweep: give a parameter's values (-P learning_rate=1e-4,3e-4) or --from FILE")
    if (sampler == "grid") == bool(trials):
        raise UsageError("--trials N goes with --sampler random or tpe" if trials else f"--sampler {sampler} needs --trials N")
    lists, rows = parse_values(values), read_rows(file) if file else ()
    chosen, repeated = space(lists) if sampler != "grid" and not rows else {}, 0
    if sampler == "tpe":
        search.require()
        if rows or not chosen:
            raise UsageError(
                "--sampler tpe chooses from lists and ranges of -P (learning_rate=1e-5..1e-2:log), not from a file"
            )
        combinations = [{name: texts[0] for name, texts in lists.items() if name not in chosen}] * (trials or 0)
    else:
        combinations, repeated = combine(lists, rows, trials, options["seed"])
    if repeated:
        notice(f"{repeated} combination(s) stand there more than once; each is run once")
    options |= {
        "space": chosen,
        "asks": sampler == "tpe",
        "stop": bool(stop),
        "mode": {"maximize": "max", "minimize": "min"}.get(goal or ""),
    }
    plan, ready = plan_sweep(project, combinations, notice, **options)
    store = tracking()
    experiment = submitting.choose_experiment(store, ready.source, experiment_name)
    tags = runs.source_tags(plan.uri, plan.entry_point, ready.source.project.directory, runner.user())
    signals = Signals()
    with signals.installed():  # half a sweep would be left as it is
        begun = sweeps.begin(plan, store, experiment.experiment_id, tags)
        where = runs.page(store.uri, experiment.experiment_id, begun.run_id) or store.uri
        what = f"{len(plan.combinations)} jobs, {plan.parallel} at once"
        if plan.metric:
            what += f", to {'minimize' if is_less_better(plan.metric, plan.mode) else 'maximize'} {plan.metric}"
        notice(f"sweep {plan.name}: {what}; run {begun.run_id}: {where}")
        if not no_wait:
            return _watch(begun, signals)
        if signals.cancelled:
            runs.client(store).set_tag(begun.run_id, runs.TAG_CANCEL, "true")
        driver.ensure(begun)
    notice(f"stay with it: batchai sweep attach {plan.name}")
    return _shown(begun, judge(plan, {}, 0), "RUNNING")


@sweep.verb("attach", example="batchai sweep attach digits-sweep-3f2a1c")
@_named
def attach(name: str) -> Result:
    """Stay with a sweep until it has ended, and go on with it if the process that starts its jobs has ended.

    Ctrl-C leaves the sweep; `batchai sweep terminate` ends it. The project must lie where it did, as it was.
    """
    from mlflow_batchai.client.signals import Signals

    return _watch(_found(name), Signals(cancels=False))


@sweep.verb("show", example="batchai sweep show digits-sweep-3f2a1c -o json --query best.runId")
@_named
def show(name: str) -> Result:
    """A sweep's jobs and their results, the best first."""
    from mlflow_batchai.agent import protocol
    from mlflow_batchai.sweep import sweeps
    from mlflow_batchai.sweep.results import judge
    from mlflow_batchai.tracking import runs

    found = _found(name)
    seen = sweeps.look(runs.client(found.tracking), found)
    return _shown(found, judge(found.plan, seen.jobs, protocol.now_ms()), seen.status)


@sweep.verb("list", COLUMNS, example="batchai sweep list")
def list_sweeps() -> list[dict[str, Any]]:
    """Sweeps of all experiments, the newest first."""
    from mlflow_batchai.cluster.workspaces import iso
    from mlflow_batchai.sweep import sweeps
    from mlflow_batchai.tracking import runs

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


@sweep.verb("terminate", example="batchai sweep terminate digits-sweep-3f2a1c -y")
@_named
@confirmed
@click.option("--no-wait", is_flag=True, help="Return before its jobs have ended.")
def terminate(name: str, yes: bool, no_wait: bool) -> Result | None:
    """End a sweep: its jobs are ended, no more are started, and its run is KILLED when this returns."""
    from mlflow_batchai.client.signals import Signals
    from mlflow_batchai.sweep import driver, sweeps
    from mlflow_batchai.tracking import runs

    found = _found(name)
    mlflow = runs.client(found.tracking)
    if (status := sweeps.look(mlflow, found).status) != "RUNNING":
        notice(f"sweep {found.plan.name} has ended already ({status})")
        return None
    ask(f"Terminate sweep {found.plan.name} and all of its jobs?", yes)
    mlflow.set_tag(found.run_id, runs.TAG_CANCEL, "true")
    if no_wait:
        driver.ensure(found)
        return None
    return _watch(found, Signals(cancels=False))._replace(complete=True)


def _found(name: str) -> Sweep:
    from mlflow_batchai.sweep import sweeps

    store = tracking()
    return sweeps.of_run(sweeps.find(store, name), store)


def _watch(begun: Sweep, signals: Signals) -> Result:
    """Stay to the end; the command fails unless all jobs have succeeded."""
    from mlflow_batchai.client.console import JobConsole
    from mlflow_batchai.sweep import driver

    found, status = driver.watch(begun, JobConsole(1), signals)
    notice(f"sweep {begun.plan.name}: {found.counts}")
    return _shown(begun, found, status)._replace(complete=status == "FINISHED")


def _shown(begun: Sweep, results: Results, status: str) -> Result:
    return Result(results.data(begun.run_id, status), lambda: table(results))


def table(results: Results) -> str:
    """The results as a table, the best job, and a sentence for each job that failed."""
    titles = [*results.columns, "State", *results.metrics, "Duration", "Job"]
    rows = []
    for row in results.rows:
        parameters = [row.parameters.get(name, "") for name in results.columns]
        metrics = [f"{row.metrics[name]:.6g}" if name in row.metrics else "" for name in results.metrics]
        duration = "" if row.seconds is None else str(timedelta(seconds=round(row.seconds)))
        rows.append(dict(enumerate([*parameters, row.state, *metrics, duration, row.name])))
    columns: list[Column] = [(printable(title), itemgetter(number)) for number, title in enumerate(titles)]
    failed = (row for row in results.rows if row.state == "failed")
    sentences = [results.summary, *(f"{row.name} failed: {row.reason or 'no reason is known'}" for row in failed)]
    return "\n".join([render(rows, "table", columns), *map(printable, filter(None, sentences))])
