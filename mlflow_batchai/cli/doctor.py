"""``batchai doctor``: check whether a cluster is ready for jobs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import click

from mlflow_batchai.admin.doctor import CHECKS, Check, State, examine
from mlflow_batchai.cli.options import command, notice
from mlflow_batchai.cli.output import Result
from mlflow_batchai.cluster import clusters
from mlflow_batchai.config import default
from mlflow_batchai.terminal import has_colors, is_quiet

_COLORS = {State.OK: "green", State.WARNING: "yellow", State.FAILED: "red"}


@command(example="batchai doctor nc6cluster", scoped=False, output="table")
@click.argument("cluster", required=False)
def doctor(cluster: str | None) -> Result:
    """Whether a cluster is ready for jobs: every node, one line a check.

    CLUSTER is the name of a document in $BATCHAI_HOME/clusters, by default BATCHAI_CLUSTER or the local cluster. A check that
    failed says what to do; the exit code is then 1. Jobs that run are not disturbed.
    """
    found, warnings = clusters.load(cluster or default("cluster"))
    notice(*warnings)
    checks = _examined(found)
    nodes = list(dict.fromkeys(check.node for check in checks))
    is_fine = not any(check.state is State.FAILED for check in checks)
    return Result(_data(found.name, nodes, checks), lambda: _table(nodes, checks), complete=is_fine)


def _examined(cluster: clusters.Cluster) -> list[Check]:
    """All checks; each is told as it ends: on a terminal in one line that is drawn anew, elsewhere in a line of its own."""
    is_terminal = sys.stderr.isatty()

    def tell(sentence: str) -> None:
        # Its reader may have gone; a node that Slurm gave has to be given back all the same.
        with contextlib.suppress(OSError):
            if not is_quiet():
                click.echo(f"\r\x1b[K{sentence}" if is_terminal else f"batchai: {sentence}", nl=not is_terminal, err=True)

    try:
        checks = examine(cluster, tell)
    finally:
        if is_terminal:
            tell("")
    # Not if it was interrupted: a connection is closed when its question has been answered.
    cluster.engine.close()
    return checks


def _data(cluster: str, nodes: Sequence[str], checks: Sequence[Check]) -> dict[str, Any]:
    return {
        "cluster": cluster,
        "nodes": len(nodes),
        "ready": _ready(nodes, checks),
        "checks": [
            {"node": check.node, "name": check.name, "state": check.state.value, "text": check.text} for check in checks
        ],
    }


def _table(nodes: Sequence[str], checks: Sequence[Check]) -> str:
    """A block of lines for each node, and the summary."""
    colored = has_colors(sys.stdout)
    state_width, name_width = max(len(state.value) for state in State), max(len(name) for name in CHECKS)
    lines = []
    for node in nodes:
        lines.append(node)
        for check in (check for check in checks if check.node == node):
            state = check.state.value.ljust(state_width)
            shown = click.style(state, fg=_COLORS[check.state]) if colored else state
            lines.append(f"  {shown}  {check.name.ljust(name_width)}  {check.text}")
    return "\n".join([*lines, _summary(nodes, checks)])


def _summary(nodes: Sequence[str], checks: Sequence[Check]) -> str:
    counts = {state: sum(check.state is state for check in checks) for state in State}
    told = [_plural(counts[State.FAILED], "check") + " failed"] if counts[State.FAILED] else []
    told += [_plural(counts[State.WARNING], "warning")] if counts[State.WARNING] else []
    ready = f"{_ready(nodes, checks)} of {_plural(len(nodes), 'node')} {'is' if len(nodes) == 1 else 'are'} ready"
    return "; ".join([ready, ", ".join(told)]) if told else ready


def _ready(nodes: Sequence[str], checks: Sequence[Check]) -> int:
    return len(nodes) - len({check.node for check in checks if check.state is State.FAILED})


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
