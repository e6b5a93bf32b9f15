"""Compare what was read of an attempt with its agents' own totals (``agent/transport/totals.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.layout import node_id
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.agent.transport import totals
from mlflow_batchai.job.jobs import Job

# Sentences of one attempt; a record of somebody else's may have any number of ranks.
MOST_TOLD = 20
# What a sentence on something that is missing begins with, among the run's notes.
MISSING = "missing: "

Totals = dict[int, Record | None]


def totals_of(job: Job) -> Totals:
    """The totals of each node that had been taken; None of one whose agent has left none."""
    snapshot = job.snapshot()
    told = (snapshot.verdict or {}).get("totals")
    again: Mapping[str, object] = told if isinstance(told, dict) else {}
    found: Totals = {}
    for node in snapshot.announces:
        records = (snapshot.exits.get(node), again.get(str(node)))
        usable = (totals.of(record) for record in records if isinstance(record, dict))
        found[node] = next((record for record in usable if record), None)
    return found


def missing(known: Totals, cursor: Mapping[str, int], received: Mapping[str, Sequence[int]]) -> list[str]:
    """Sentences on what has not come of what agents and ranks have counted.

    Args:
        cursor: of each writer how many segments were read.
        received: of each rank how many records and points were.
    """
    found = list(_missing(known, cursor, received))
    more = [f"{MISSING}{len(found) - MOST_TOLD} more of such sentences"] if len(found) > MOST_TOLD else []
    return found[:MOST_TOLD] + more


def _missing(known: Totals, cursor: Mapping[str, int], received: Mapping[str, Sequence[int]]) -> Iterator[str]:
    for node, told in sorted(known.items()):
        name = node_id(node)
        if told is None:
            yield f"{MISSING}the totals of {name}, whose agent has left none: what it had not sent is not known"
            continue
        segments, read = told["segments"], cursor.get(protocol.agent_writer(node), 0)
        if read < segments:
            yield f"{MISSING}the last {segments - read} of {segments} event files of {name}"
        if told["unsent"]:
            yield f"{MISSING}{told['unsent']} lines of {name} that the share did not take before it was given up"
        for rank in told["uncounted"]:
            yield f"{MISSING}what rank {rank} reported on {name}, whose disk took nothing: how much it was is not known"
        for rank, (records, points) in sorted(told["reports"].items(), key=lambda item: int(item[0])):
            records_read, points_read = received.get(rank, (0, 0))
            if points_read < points:
                yield f"{MISSING}{points - points_read} of {points} points that rank {rank} reported"
            elif records_read < records:
                yield f"{MISSING}{records - records_read} of {records} records (params, tags, files) that rank {rank} reported"


def log_totals(known: Totals) -> dict[str, tuple[int, int]]:
    """Bytes and lines that an agent has given to each log file."""
    return {
        name: (size, lines)
        for told in known.values()
        if told is not None
        for name, (size, lines) in told["logs"].items()
        if totals.is_log_name(name)
    }
