"""Taking tickets by hand, as the engine does it for nodes whose folders are all on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlflow_batchai.agent import tickets


def take(book: str, roots: Sequence[str], job: str, count: int, now: float | None = None) -> dict[str, Any]:
    """A ticket for ``count`` of these nodes; they are named by their index."""
    names = [str(index) for index in range(len(roots))]
    ended: dict[str, list[int]] = {name: [] for name in names}
    for ticket in tickets.listing(book, now):
        for name in ticket["nodes"]:
            moment = ticket["age"]
            if name in ended and tickets.state(roots[int(name)], ticket["number"], 0.0, moment) == "ended":
                ended[name].append(ticket["number"])
    return tickets.take(book, names, job, count, ended, now)
