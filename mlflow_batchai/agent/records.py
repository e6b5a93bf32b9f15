"""Check records against the shape of their kind, and skip damaged files.

A file that isn't closed is not there. One that will never be closed (its writer went on, or is gone) was damaged: a server that
crashed has cut it, or something has written over it. Readers look at such a file for a while, since a mount with a cache may
show an old piece of it; then they skip and count it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Callable

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.protocol import Record, TornFileError

# For so long a file that isn't closed has to stay as it is before it counts as damaged.
SETTLE_SECONDS = 5.0
SKIPPED = "skipped"
MOST_NODES = 10_000

Check = Callable[[Any], bool]
Shape = Mapping[str, Check]


def is_number(value: object) -> bool:
    """Whether it is a number that fits into 64 bits; not true or false, nor NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_count(value: object) -> bool:
    """Whether it is a whole number, not below zero, that fits into 64 bits."""
    return isinstance(value, int) and is_number(value) and value >= 0


def is_node_count(value: object) -> bool:
    """Whether it can be the number of a job's nodes: no cluster has more than ``MOST_NODES``."""
    return isinstance(value, int) and is_count(value) and 0 < value <= MOST_NODES


def is_text(value: object) -> bool:
    return isinstance(value, str)


def is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def is_pair_of_counts(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_count, value))


def _is_finding(value: object) -> bool:
    return has(value, {"why": is_text, "name": is_text, "address": is_text})


# What those who read an event rely on; other kinds are read with defaults for what they lack.
EVENTS: Mapping[str, Shape] = {
    "log": {"r": or_none(is_count), "s": is_text, "x": is_text, "t": is_number},
    "note": {"x": is_text},
    "report": {"body": is_mapping},
    "phase": {"phase": is_text, "node": is_count},
    "reached": {"node": is_count, "findings": list_of(_is_finding)},
    "dropped": {"lines": is_count},
    # One sample of a node's meters: the values by their names.
    "system": {"node": is_count, "n": is_count, "v": is_mapping, "t": is_number},
    # What the training interpreter of node 0 has: its version, and a ``name==version`` each.
    "environment": {"python": is_text, "packages": list_of(is_text)},
    SKIPPED: {"lines": is_count, "files": is_count},
}

ANNOUNCE: Shape = {"host": is_text, "address": is_text}
EXIT: Shape = {"failure": or_none(is_mapping), "stopped": or_none(is_text)}
REQUEST: Shape = {"kind": lambda value: value in (protocol.CANCEL, protocol.REQUEUE)}
VERDICT: Shape = {
    "executionState": lambda value: value in (protocol.QUEUED, *protocol.ENDED_STATES),
    "exitCode": or_none(is_number),
    "errors": list_of(lambda value: isinstance(value, dict) and is_text(value.get("code"))),
    "reason": is_text,
    "terminated": lambda value: isinstance(value, bool),
    "endTime": or_none(is_number),
}


def has(record: object, shape: Shape) -> bool:
    """Whether a record has all keys of a shape, with values that it takes."""
    return isinstance(record, dict) and all(key in record and check(record[key]) for key, check in shape.items())


def is_event(record: object) -> bool:
    """Whether a record of a segment is one that readers can take; a kind that nobody knows is."""
    return isinstance(record, dict) and is_text(record.get("k")) and has(record, EVENTS.get(record["k"], {}))


def is_verdict(record: object) -> bool:
    """Whether a record ends an attempt: with the job, or naming the attempt that follows."""
    if not isinstance(record, dict) or not has(record, VERDICT):
        return False
    follows = record.get("next")
    if record["executionState"] != protocol.QUEUED:
        return follows is None
    if not is_count(record.get("retriesLeft", 0)):
        return False
    return isinstance(follows, int) and is_count(follows) and follows > 0


def sort_out(found: list[Any]) -> tuple[list[Record], int]:
    """(those that readers can take, the number of the others)."""
    events = [record for record in found if is_event(record)]
    return events, len(found) - len(events)


def skipped(lines: int, files: int = 0) -> Record:
    """The record that stands for what was left out: so many records of another shape, so many damaged or missing files."""
    return {"k": SKIPPED, "t": protocol.now_ms(), "lines": lines, "files": files}


class TornFiles:
    """Files of one record that are there and not closed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}

    def record(self, path: str, data: bytes | None) -> Record | None:
        """The record of a file of one; None while it isn't closed. ``data``: the file's content; None: there is no file."""
        record = None
        if data is not None:
            try:
                record = protocol.decode_one(data)
            except TornFileError:
                self._since.setdefault(path, self._clock())
                return None
        self._since.pop(path, None)
        return record

    def seconds(self, path: str) -> float | None:
        """For how long a file has been torn whenever it was read; None: it wasn't when it was read last."""
        return self._clock() - self._since[path] if path in self._since else None
