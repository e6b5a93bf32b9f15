"""``batchai sweep``: a project run once for each combination of values, as jobs whose runs stand under one parent run."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from mlflow_batchai.cli.options import command, notice, tracking
from mlflow_batchai.cli.sweep_table import drawn, outcome
from mlflow_batchai.errors import UsageError
from mlflow_batchai.terminal import printable

if TYPE_CHECKING:
    from mlflow_batchai.cli.output import Drawn, Incomplete
    from mlflow_batchai.console import JobConsole
    from mlflow_batchai.documents.batchai import BatchaiFile
    from mlflow_batchai.submitting import Source
    from mlflow_batchai.sweep.grid import Combination
    from mlflow_batchai.sweep.jobs import Jobs
    from mlflow_batchai.sweep.plan import SweepPlan

MODES = ("max", "min")
# What MLflow's tables have room for.
LONGEST_NAME = 250


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
@click.option("--run-name", metavar="NAME", help="Name of the sweep.")
@click.option("-c", "--backend-config", metavar="FILE|JSON", help="Over the keys of batchai.yaml.")
@click.option("--env-manager", metavar="NAME", help="local, virtualenv or uv, as `mlflow run` has it.")
@click.option("--cluster", metavar="NAME", help="Cluster.  [as `mlflow run` chooses it]")
@click.option("--parallel", metavar="N", type=click.IntRange(1), help="Jobs at once.  [as many as have nodes, and one]")
@click.option("--metric", metavar="NAME", help="What jobs are compared by.  [model.promoteIf, or a usual one]")
@click.option("--mode", type=click.Choice(MODES), help="Whether more or less is better.  [less of a loss or an error]")
@click.option("--no-wait", is_flag=True, help="Return at once; a process of its own starts the jobs.")
def run(
    project: str,
    values: Sequence[str],
    file: Path | None,
    sample: int | None,
    seed: int,
    entry_point: str,
    version: str | None,
    experiment_name: str | None,
    run_name: str | None,
    backend_config: str | None,
    env_manager: str | None,
    cluster: str | None,
    parallel: int | None,
    metric: str | None,
    mode: Literal["min", "max"] | None,
    no_wait: bool,
) -> Drawn | Incomplete:
    """Run a project once for each combination of values, and show what came of it, the best first.

    A value with a comma is written as in CSV: -P 'layers="64,32",128' are two. With --from, each of its sets is combined with
    the values of -P. Everything is checked before anything starts. Exit code 0 only if all jobs succeeded.

    Ctrl-C ends all jobs; a terminal that closes leaves them, and `batchai sweep attach` goes on with the rest. The word `run`
    may be left out.
    """
    from mlflow_batchai.console import JobConsole
    from mlflow_batchai.sweep import jobs
    from mlflow_batchai.sweep.plan import SweepPlan, code_hash

    console = JobConsole(1)
    combinations = _combinations(values, file, sample, seed)
    settings = _settings(backend_config, cluster)
    uri = _address(project)
    source = jobs.read(uri, entry_point, version, settings, combinations[0], notice)
    _refuse_secrets(source, settings)
    made = jobs.Jobs(source, env_manager, Path.cwd(), notice, console.transfer)
    ready = made.check(combinations)
    metric, mode = _compared_by(metric, mode, source.config)
    plan = SweepPlan(
        name=_name(run_name, source),
        uri=uri,
        entry_point=entry_point,
        version=version,
        settings=settings,
        env_manager=env_manager,
        cwd=str(Path.cwd()),
        combinations=combinations,
        parallel=parallel or max(1, source.cluster.open_nodes // ready.prepared.plan["nodeCount"]) + 1,
        metric=metric,
        mode=mode,
        code=code_hash(ready.prepared.plan["code"]),
    )
    return _started(plan, made, console, experiment_name, no_wait)


def _started(
    plan: SweepPlan, made: Jobs, console: JobConsole, experiment_name: str | None, no_wait: bool
) -> Drawn | Incomplete:
    from mlflow_batchai import runner, runs, submitting
    from mlflow_batchai.signals import Signals
    from mlflow_batchai.sweep import background, right, sweeps
    from mlflow_batchai.sweep.driving import Driving
    from mlflow_batchai.sweep.results import judge

    store, source = tracking(), made.source
    if experiment_name:
        experiment = submitting.experiment_named(store, experiment_name)
    else:
        # As `mlflow run` has it; the variable with a name is one of the option.
        experiment = submitting.choose_experiment(store, source, os.environ.get("MLFLOW_EXPERIMENT_ID") or None)
    tags = runs.source_tags(plan.uri, source.entry.name, source.project.directory, runner.user())
    if not no_wait:
        tags[sweeps.TAG_DRIVER] = right.mark()
    signals = Signals(ends="the sweep ends as soon as this submit is done")
    with signals.installed():
        sweep = sweeps.begin(plan, store, experiment.experiment_id, tags)
        where = runs.page(store.uri, experiment.experiment_id, sweep.run_id) or store.uri
        notice(f"sweep {plan.name}: {len(plan.combinations)} jobs, {plan.parallel} at once; run {sweep.run_id}: {where}")
        if no_wait:
            if signals.cancelled:
                runs.client(store).set_tag(sweep.run_id, runs.TAG_CANCEL, "true")  # for the process that would start its jobs
            log = background.start(sweep)
            notice(f"its jobs are started by a process that writes to {log}: batchai sweep attach {plan.name}")
            return drawn(judge(plan, {}, 0), sweep.run_id, "RUNNING")
        driving = Driving(sweep, made, console, signals, fresh=True)
        driving.run()
    return outcome(driving, sweep.run_id)


def _compared_by(
    metric: str | None, mode: Literal["min", "max"] | None, config: BatchaiFile
) -> tuple[str | None, Literal["min", "max"] | None]:
    """What jobs are compared by, as MLflow has it: as was asked for, else as their models are (``model.promoteIf``)."""
    from mlflow_batchai.job.metrics import metric_key

    promotion = config.model.promote_if if config.model else None
    if promotion is not None and metric in (None, promotion.metric):
        metric, mode = promotion.metric, mode or promotion.mode
    return metric_key(metric) if metric else None, mode


def _combinations(values: Sequence[str], file: Path | None, sample: int | None, seed: int) -> list[Combination]:
    from mlflow_batchai.sweep.grid import combine, parse_values, read_rows

    if not values and file is None:
        raise UsageError("there is nothing to sweep: give a parameter's values (-P learning_rate=1e-4,3e-4) or --from FILE")
    combinations, repeated = combine(parse_values(values), read_rows(file) if file else (), sample, seed)
    if repeated:
        notice(f"{repeated} combination(s) stand there more than once; each is run once")
    return combinations


def _settings(given: str | None, cluster: str | None) -> dict[str, Any]:
    """What stands over the keys of batchai.yaml: a file by its name, JSON as it is."""
    from mlflow_batchai.documents.reading import load_text

    settings: dict[str, Any] = {}
    if given is not None and given.lstrip().startswith("{"):
        settings = load_text(given, "--backend-config")
        if "config" in settings:
            settings["config"] = str(_absolute(str(settings["config"])))
    elif given is not None:
        if not _absolute(given).is_file():
            raise UsageError(f"--backend-config {given}: is neither a file nor JSON")
        settings = {"config": str(_absolute(given))}
    return {**settings, "cluster": cluster} if cluster else settings


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _address(project: str) -> str:
    """The project's address, the same from any folder, without what opens a repository: it is kept with the sweep."""
    from mlflow_batchai import runs

    path, mark, inside = project.partition("#")
    if "://" not in path and _absolute(path).exists():
        return f"{_absolute(path)}{mark}{inside}"
    if runs.shown(project) != project:
        raise UsageError(
            f"{runs.shown(project)}: the address is kept with the sweep, and can't hold a password; leave that to git"
            " (git help credentials)"
        )
    return project


def _refuse_secrets(source: Source, settings: Mapping[str, Any]) -> None:
    """The plan of a sweep, which is kept with its run, has the settings as they were written.

    Raises:
        UsageError: a secret stands there.
    """
    import json

    from mlflow_batchai.documents.model import secret_values

    text = json.dumps(settings, ensure_ascii=False)
    if any(json.dumps(secret, ensure_ascii=False)[1:-1] in text for secret in secret_values(source.config) if secret):
        raise UsageError(
            "--backend-config holds a secret, and would be kept with the sweep's run; put it into a file: --backend-config FILE"
        )


def _name(given: str | None, source: Source) -> str:
    from mlflow_batchai.job.places import slug

    name = given or source.config.name or f"{slug(source.project.name, 30)}-sweep-{uuid.uuid4().hex[:6]}"
    if not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME or set("'\"") <= set(name):
        raise UsageError(
            f"the sweep's name '{printable(name[:LONGEST_NAME])}' should be one line of 1 to {LONGEST_NAME} letters, without"
            " both kinds of quotes: --run-name NAME"
        )
    return name
