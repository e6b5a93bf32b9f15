"""A sweep's results for people: one table, the best job first, and a sentence for each that failed."""

from __future__ import annotations

import os
import sys
from io import StringIO
from typing import TYPE_CHECKING

from mlflow_batchai.cli.options import notice
from mlflow_batchai.cli.output import Drawn, Incomplete
from mlflow_batchai.terminal import printable

if TYPE_CHECKING:
    from mlflow_batchai.sweep.driving import Driving
    from mlflow_batchai.sweep.results import Results, Row

# Where it isn't read on a terminal nothing is broken into lines.
UNBOUNDED = 1000
STYLES = {"succeeded": "green", "failed": "red", "terminated": "yellow", "running": "cyan"}


def drawn(results: Results, run_id: str, status: str) -> Drawn:
    """The result of a command on a sweep."""
    return Drawn(results.data(run_id, status), lambda: draw(results))


def outcome(driving: Driving, run_id: str) -> Drawn | Incomplete:
    """The result of a command that has seen a sweep to its end, and fails unless all of its jobs succeeded."""
    results = driving.results()
    notice(f"sweep {results.plan.name}: {results.counts}")
    shown = drawn(results, run_id, driving.status)
    return shown if driving.status == "FINISHED" else Incomplete(shown)


def draw(results: Results) -> str:
    """The table and the failures, as text."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console(
        file=StringIO(),
        force_terminal=terminal and not os.environ.get("NO_COLOR"),
        width=None if terminal else UNBOUNDED,
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False, padding=(0, 2, 0, 0))
    names, metrics = results.plan.varying, results.metrics
    for name in (*names, "State", *metrics, "Duration", "Job"):
        number = name in metrics or name == "Duration"
        table.add_column(Text(printable(name)), justify="right" if number else "left", overflow="fold")
    for row in results.rows:
        style = "bold" if results.best is row else ""
        cells = [row.parameters.get(name, "") for name in names]
        values = [f"{row.metrics[name]:.6g}" if name in row.metrics else "" for name in metrics]
        state = Text(printable(row.state), style=STYLES.get(row.state, ""))
        shown = [Text(printable(cell)) for cell in (*cells, *values, _duration(row), row.name)]
        table.add_row(*shown[: len(cells)], state, *shown[len(cells) :], style=style)
    with console.capture() as captured:
        console.print(table)
        if best := results.best_in_words:
            console.print(Text(printable(best)), soft_wrap=True)
        for row in results.rows:
            if row.state == "failed":
                told = f"{row.name} failed: {row.reason or 'no reason is known'}"
                console.print(Text(printable(told)), soft_wrap=True)
    return "\n".join(line.rstrip() for line in captured.get().strip("\n").split("\n"))


def _duration(row: Row) -> str:
    if row.seconds is None:
        return ""
    minutes, seconds = divmod(round(row.seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
