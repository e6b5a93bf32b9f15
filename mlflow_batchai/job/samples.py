"""The fold over what nodes measure of themselves: memory, CPUs, GPUs, network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlflow_batchai.agent.layout import node_id
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.agent.records import is_number
from mlflow_batchai.job.metrics import LARGEST_STEP, Point, metric_key, whole

SYSTEM = "system"


class SampleFold:
    """Turns what nodes say of themselves into points, named as MLflow's own system metrics: ``system/node-0/...``.

    A node's samples are numbered through all attempts of the job, from 0: these are the steps.

    Args:
        same_attempt: whether that was in this attempt.

    Attributes:
        unread: how many values were no numbers, or of no node.
    """

    def __init__(self, nodes: int, memory: Mapping[str, Any] | None = None, same_attempt: bool = True) -> None:
        memory = memory or {}
        self._nodes = nodes
        # Of each node that has said something: where this attempt's steps begin, and the step after its last sample.
        self._following: dict[str, int] = dict(memory.get("following", {}))
        self._first: dict[str, int] = dict(memory.get("first", {})) if same_attempt else dict(self._following)
        self.unread = int(memory.get("unread", 0))

    def remember(self) -> dict[str, Any]:
        """The memory for a later process, as JSON."""
        return {"first": dict(self._first), "following": dict(self._following), "unread": self.unread}

    def feed(self, records: Iterable[Record]) -> list[Point]:
        """The points of the samples among some records, in their order."""
        return [point for record in records if record["k"] == SYSTEM for point in self._points(record)]

    def _points(self, record: Record) -> list[Point]:
        node = node_id(record["node"])
        step = self._first.get(node, 0) + record["n"]
        if record["node"] >= self._nodes or step >= LARGEST_STEP:
            self.unread += len(record["v"])
            return []
        self._following[node] = max(step + 1, self._following.get(node, 0))
        numbers = {name: float(value) for name, value in record["v"].items() if is_number(value)}
        self.unread += len(record["v"]) - len(numbers)
        time = max(0, whole(record["t"]))
        return [Point(metric_key(f"{SYSTEM}/{node}/{name}"), value, time, step) for name, value in numbers.items()]
