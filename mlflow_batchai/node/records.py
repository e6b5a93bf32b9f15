"""Records as they are found: which have the shape of their kind, and what can still be read of a file that was damaged.

A file that isn't closed is not there. One that will never be closed (its writer went on, or is gone) was damaged: a server that
crashed has cut it, or something has written over it. Both sides look at such a file for a while, since a mount with a memory
may show an old piece of it, and then take what is whole, count the rest, and go on.
"""

import json
import time
import zlib
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from mlflow_batchai.node import protocol
from mlflow_batchai.node.protocol import Record

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
    """What the check takes, or nothing."""
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    """A list of what the check takes."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def is_pair_of_counts(value: object) -> bool:
    """Whether it is a list of two whole numbers that are not below zero."""
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


def sort_out(found: List[Any]) -> Tuple[List[Record], int]:
    """(those that readers can take, the number of the others)."""
    events = [record for record in found if is_event(record)]
    return events, len(found) - len(events)


def skipped(lines: int, files: int = 0) -> Record:
    """The record that stands for what could not be read: so many lines, so many damaged files."""
    return {"k": SKIPPED, "t": protocol.now_ms(), "lines": lines, "files": files}


def salvage(data: bytes) -> List[Record]:
    """The events of a damaged segment that are whole, and behind them what is missing, as a record."""
    events: List[Record] = []
    lost = 0
    for line in protocol.lines_of(protocol.unpacked(data)[: protocol.LONGEST_SEGMENT]):
        record: Any = _parsed(line) if len(line) <= protocol.LONGEST_LINE else None
        if is_event(record):
            events.append(record)
        elif line and not has(record, {"end": is_count, "crc32": is_text}):
            lost += 1
    return [*events, skipped(lost, 1)]


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None


def salvage_one(data: bytes) -> Optional[Record]:
    """The record of a file of one that was cut behind it, in its terminator; None if it isn't whole for certain."""
    line, newline, rest = data.partition(b"\n")
    terminator = '{"end":1,"crc32":"%08x"}\n' % zlib.crc32(line + newline)
    record = _parsed(line)
    # A file that grows by REST is made longer before it is written: it ends in NULs until then.
    whole = newline and terminator.encode("ascii").startswith(rest.rstrip(b"\0"))
    return record if whole and isinstance(record, dict) else None


class Damage:
    """Files of one record that were found damaged.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: Dict[str, Tuple[bytes, float]] = {}

    def record(self, path: str, data: Optional[bytes]) -> Optional[Record]:
        """The record of a file of one; None while it isn't closed, unless it has stayed as it is for a while and the record in
        it is whole.

        Args:
            data: what lies there; None: nothing.
        """
        if data is None:
            self._seen.pop(path, None)
            return None
        try:
            record = protocol.decode_one(data)
        except protocol.TornFileError:
            return self._look(path, data)
        self._seen.pop(path, None)
        return record

    def _look(self, path: str, data: bytes) -> Optional[Record]:
        before, since = self._seen.get(path, (None, 0.0))
        if before != data:
            since = self._clock()
            self._seen[path] = (data, since)
        return salvage_one(data) if self._clock() - since >= SETTLE_SECONDS else None

    def found(self, path: str) -> bool:
        """Whether a file wasn't closed when it was looked at last."""
        return path in self._seen

    def seconds(self, path: str) -> float:
        """For how long a file has not been closed, and not been written either; 0 for any other."""
        return self._clock() - self._seen[path][1] if path in self._seen else 0.0

    def is_new(self, path: str) -> bool:
        """Whether a file that isn't closed may be whole at another look."""
        return path in self._seen and self.seconds(path) < SETTLE_SECONDS
