"""Reserving nodes by hand, as the engine does it for nodes whose folders are all on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlflow_batchai.agent.reservation import agents, queue


def reserve(book: str, roots: Sequence[str], job: str, count: int, now: float | None = None) -> dict[str, Any]:
    """A reservation of ``count`` of these nodes; they are named by their index."""
    names = [str(index) for index in range(len(roots))]
    ended: dict[str, list[int]] = {name: [] for name in names}
    for entry in queue.listing(book, now):
        for name in entry["nodes"]:
            moment = entry["age"]
            if name in ended and agents.state(roots[int(name)], entry["number"], 0.0, moment) == "ended":
                ended[name].append(entry["number"])
    return queue.reserve(book, names, job, count, ended, now)
