"""``batchai run``: run a command of the current folder as a job, as `mlflow run` runs a project."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from mlflow_batchai.cli.options import EVERYWHERE, HELP, notice, tracking
from mlflow_batchai.errors import UsageError


@click.command(
    context_settings={**HELP, "allow_interspersed_args": False},
    epilog="Example: batchai run --nodes 2 -- python train.py --lr 0.1",
)
@click.argument("words", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-c", "--cluster", metavar="NAME", help="Cluster.  [as `mlflow run` chooses it]")
@click.option(
    "--nodes", metavar="N", type=click.IntRange(1), help="Nodes, with one Horovod rank on each.  [batchai.yaml's, or 1]"
)
@click.option("--ranks", metavar="N", type=click.IntRange(1), help="Horovod ranks, spread over the nodes.  [one a node]")
@click.option("-e", "--experiment", metavar="NAME", help="MLflow experiment.  [MLFLOW_EXPERIMENT_ID, or _NAME]")
@click.option("--run-name", metavar="NAME", help="Name of the MLflow run.")
@click.option("--env-manager", metavar="NAME", help="local, virtualenv or uv, as `mlflow run` has it.")
@click.option("--backend-config", metavar="FILE|JSON", help="Over the keys of batchai.yaml.")
@click.option("--no-wait", is_flag=True, help="Return at once.")
def run(
    words: Sequence[str],
    cluster: str | None,
    nodes: int | None,
    ranks: int | None,
    experiment: str | None,
    run_name: str | None,
    env_manager: str | None,
    backend_config: str | None,
    no_wait: bool,
) -> None:
    """Run a command of this folder as a job, and show it until it has ended; exit code 0 only if it succeeds.

    The folder's files go to the nodes, where every rank runs the command, each word as it was typed here; `bash -c '...'` runs
    shell text. A batchai.yaml or MLproject of the folder counts, but for its entry points. Arguments such as `--lr 0.1` are the
    run's parameters.

    Ctrl-C asks at a terminal: a second one ends the job, Enter leaves it running.
    """
    from mlflow_batchai.client import submitting
    from mlflow_batchai.documents.batchai import merge, settings_from
    from mlflow_batchai.documents.mlproject import command_entry_point

    if len(words) == 1 and " " in words[0].strip():
        raise UsageError(f"'{words[0]}' is one word; write the command as it is, or as shell text: bash -c '{words[0]}'")
    entry = command_entry_point(words)

    def read(settings: Mapping[str, Any]) -> submitting.Source:
        return submitting.read(".", entry.name, None, settings, notice, "the options", entry)

    given = {"cluster": cluster, "wait": False if no_wait else None}
    settings = merge(settings_from(backend_config), {key: value for key, value in given.items() if value is not None})
    settings = merge(settings, {"properties": {"nodeCount": nodes} if nodes else {}})
    source = read(settings)
    framework = source.config.properties.framework
    if ranks or (framework is None and (nodes or 1) > 1):
        block = framework[0] if framework and framework[0] != "customToolkitSettings" else "horovodSettings"
        source = read(merge(settings, {"properties": {block: {"processCount": ranks} if ranks else {}}}))
    ready = submitting.check(submitting.prepare(source, {}, env_manager, notice), notice)
    store = tracking()
    where = submitting.choose_experiment(store, source, experiment)
    submitting.run(ready, store, where, run_name)


run.params += EVERYWHERE
