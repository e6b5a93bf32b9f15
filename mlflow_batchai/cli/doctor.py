"""``batchai doctor``: whether a cluster is ready for jobs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import click

from mlflow_batchai import clusters
from mlflow_batchai.doctor import CHECKS, Check, State, examine, names

_COLORS = {State.OK: "green", State.WARNING: "yellow", State.FAILED: "red"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("cluster", required=False)
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def doctor(cluster: str | None, output: str) -> int:
    """Whether a cluster is ready for jobs: every node, one line a check.

    CLUSTER is the name of a document in $BATCHAI_HOME/clusters, by default the local cluster. A check that failed says what to
    do; the exit code is then 1. Jobs that run are not disturbed.

    Example: batchai doctor nc6cluster
    """
    found, warnings = clusters.load(cluster)
    for warning in warnings:
        click.echo(f"batchai: {warning}", err=True)
    nodes = names(found)
    checks = _examined(found, len(nodes))
    checks.sort(key=lambda check: (nodes.index(check.node), CHECKS.index(check.name)))
    click.echo(_json(found.name, nodes, checks) if output == "json" else _table(nodes, checks))
    return 1 if any(check.state is State.FAILED for check in checks) else 0


def _examined(cluster: clusters.Cluster, count: int) -> list[Check]:
    """All checks; on a terminal a line tells how many there are so far."""
    terminal = sys.stderr.isatty()
    checks: list[Check] = []
    for check in examine(cluster):
        checks.append(check)
        if terminal:
            click.echo(f"\r{cluster.name}: {len(checks)} checks on {count} nodes", nl=False, err=True)
    if terminal:
        click.echo("\r\x1b[K", nl=False, err=True)
    # Not if it was interrupted: a connection is closed when its question has been answered.
    cluster.engine.close()
    return checks


def _json(cluster: str, nodes: Sequence[str], checks: Sequence[Check]) -> str:
    return json.dumps(
        {
            "cluster": cluster,
            "nodes": len(nodes),
            "ready": _ready(nodes, checks),
            "checks": [
                {"node": check.node, "name": check.name, "state": check.state.value, "text": check.text} for check in checks
            ],
        },
        indent=2,
    )


def _table(nodes: Sequence[str], checks: Sequence[Check]) -> str:
    colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    state_width, name_width = max(len(state.value) for state in State), max(len(name) for name in CHECKS)
    lines = []
    for node in nodes:
        lines.append(node)
        for check in checks:
            if check.node == node:
                state = check.state.value.ljust(state_width)
                shown = click.style(state, fg=_COLORS[check.state]) if colored else state
                lines.append(f"  {shown}  {check.name.ljust(name_width)}  {check.text}")
    counts = {state: sum(check.state is state for check in checks) for state in State}
    told = [_plural(counts[State.FAILED], "check") + " failed"] if counts[State.FAILED] else []
    told += [_plural(counts[State.WARNING], "warning")] if counts[State.WARNING] else []
    ready = f"{_ready(nodes, checks)} of {_plural(len(nodes), 'node')} {'is' if len(nodes) == 1 else 'are'} ready"
    return "\n".join([*lines, "; ".join([ready, ", ".join(told)]) if told else ready])


def _ready(nodes: Sequence[str], checks: Sequence[Check]) -> int:
    return len(nodes) - len({check.node for check in checks if check.state is State.FAILED})


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
