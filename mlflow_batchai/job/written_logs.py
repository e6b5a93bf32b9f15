"""An attempt's log files, written anew from what its agents have sent: their text is in the events as well."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from mlflow_batchai.agent import logfiles
from mlflow_batchai.agent.plan import Plan
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.job.events import EventReader
from mlflow_batchai.job.jobs import Job


def write(job: Job, names: Collection[str], folder: Path) -> dict[str, int]:
    """Write log files into a folder of this machine; the number of lines of each that has any.

    Of a progress line that was overwritten they have the last state, as the joined files do.
    """
    lines: dict[str, int] = {}
    for writer, _, found in EventReader(job).read(to_the_end=True):
        texts: dict[str, list[str]] = {}
        node = int(writer.rpartition("-")[2])
        for name, text in (piece for record in found for piece in _pieces(job.plan, node, record)):
            if name in names:
                texts.setdefault(name, []).append(text)
        for name, pieces in texts.items():
            text = "".join(pieces)
            # Of a job of many ranks not all can be open.
            with (folder / name).open("ab") as file:
                file.write(logfiles.encoded(text))
            lines[name] = lines.get(name, 0) + text.count("\n")
    return lines


def _pieces(plan: Plan, node: int, record: Record) -> Iterator[tuple[str, str]]:
    """(file, text) of all that a record adds to log files."""
    if record["k"] == logfiles.NOTE:
        yield logfiles.own_file(plan, node, logfiles.EXECUTION, None), record["x"]
    elif record["k"] == "log":
        yield logfiles.own_file(plan, node, record["s"], record["r"]), record["x"]
        if (text := logfiles.joined(plan, record)) is not None:
            yield logfiles.joined_file(record["s"]), text
