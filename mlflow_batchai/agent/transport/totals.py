"""Count everything that an agent hands on, so that readers of the attempt see what is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow_batchai.agent import records
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.agent.transport.reports import Count


def _mapping_of_pairs(value: object) -> bool:
    return isinstance(value, dict) and all(map(records.is_pair_of_counts, value.values()))


# ``segments``; ``logs``: file -> bytes and lines; ``reports``: rank -> records and points in them; ``uncounted``: ranks whose
# disk took nothing, not even their count; ``unsent``: lines that were in no segment when the share was given up.
SHAPE: records.Shape = {
    "segments": records.is_count,
    "logs": _mapping_of_pairs,
    "reports": lambda value: _mapping_of_pairs(value) and all(rank.isdecimal() and len(rank) < 7 for rank in value),
    "uncounted": records.list_of(records.is_count),
    "unsent": records.is_count,
}

_LOG_NAME = re.compile(r"(execution|std(out|err))(-[a-z0-9_-]{1,100})?\.(txt|log)")


def is_log_name(name: str) -> bool:
    return _LOG_NAME.fullmatch(name) is not None


def record(
    segments: int, logs: Mapping[str, Sequence[int]], unsent: int, reports: Mapping[int, Count], uncounted: Sequence[int]
) -> Record:
    """The part of ``exit.json`` that has them."""
    return {
        "segments": segments,
        "logs": {name: list(sizes) for name, sizes in logs.items()},
        "reports": {str(rank): list(count) for rank, count in reports.items()},
        "uncounted": list(uncounted),
        "unsent": unsent,
    }


def of(exit_record: Mapping[str, Any]) -> Record | None:
    """The totals of an ``exit.json``; None if it has none that can be used."""
    return {key: exit_record[key] for key in SHAPE} if records.has(exit_record, SHAPE) else None
