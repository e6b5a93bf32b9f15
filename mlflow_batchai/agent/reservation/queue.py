"""The queue of a cluster without a scheduler: which job has reserved which nodes, in one order.

There is no daemon. A job reserves its N nodes in one step under one lock, with one number that only rises, so all nodes serve
jobs in the same order and two jobs of several nodes can't wait for each other. The queue is a file on the disk of the cluster's
first node (never on a share: flock is not to be trusted there).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from mlflow_batchai.agent.reservation import locks

# Nodes that left the cluster so many seconds ago keep no reservation.
FORGET_SECONDS = 30 * 86400.0

Entry = dict[str, Any]


class QueueError(Exception):
    """The queue can't be read, or can't give what is asked; the message is one sentence."""


def _locked(folder: str) -> AbstractContextManager[None]:
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return locks.held(os.path.join(folder, "book.lock"))


def _load(folder: str, moment: float) -> dict[str, Any]:
    """The queue; a new one begins with a number that no lost one before it has come to."""
    path = os.path.join(folder, "book.json")
    try:
        with open(path, encoding="utf-8") as file:
            found: dict[str, Any] = json.load(file)
            return found
    except FileNotFoundError:
        return {"next": int(moment * 1000), "tickets": []}
    except ValueError:
        raise QueueError(f"the queue {path} is damaged; remove it when no job of the cluster runs") from None


def _store(folder: str, queue: Mapping[str, Any]) -> None:
    path = os.path.join(folder, "book.json")
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(queue, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


def listing(folder: str, now: float | None = None) -> list[Entry]:
    """The reservations: ``number``, ``job``, ``folder``, ``nodes`` and ``age``, the seconds since it was made."""
    moment = time.time() if now is None else now
    return [_aged(entry, moment) for entry in _load(folder, moment)["tickets"]]


def _aged(entry: Entry, moment: float) -> Entry:
    return {
        "number": entry["number"],
        "job": entry["job"],
        # Queues of versions before this one have none.
        "folder": entry.get("folder", ""),
        "nodes": entry["nodes"],
        "age": moment - entry["taken"],
    }


def reserve(
    folder: str,
    nodes: Sequence[str],
    job: str,
    count: int,
    ended: Mapping[str, Sequence[int]],
    now: float | None = None,
    drained: Collection[str] = (),
    job_folder: str = "",
) -> Entry:
    """Reserve ``count`` nodes for a job, in one step.

    The nodes with the fewest jobs before them are chosen, earlier names first, and drained ones only after all others. Asked
    again for a job that has its reservation already, it gives that one.

    Args:
        folder: the queue's folder, on the disk of the cluster's first node.
        nodes: names of the nodes that can be had, in the cluster's order.
        job: the job's mark.
        count: nodes wanted, at most ``len(nodes)``.
        ended: name -> numbers of reservations that have ended there, whenever that was seen.
        drained: names of those that take no jobs for now.
        job_folder: on the control share, for those who want to know which job it is.

    Returns:
        As ``listing`` gives it, and ``after``: name -> earlier numbers, of its nodes.
    """
    moment = time.time() if now is None else now
    if len(set(nodes)) < max(count, len(nodes)):
        raise QueueError(f"{count} nodes are wanted of {len(set(nodes))} that have different ids")
    with _locked(folder):
        queue = _load(folder, moment)
        live = [entry for entry in queue["tickets"] if not _over(entry, nodes, ended, moment)]
        entry = next((entry for entry in live if entry["job"] == job), None)
        if entry is None:
            waiting = _waiting(live, nodes, ended)
            order = sorted(range(len(nodes)), key=lambda index: (nodes[index] in drained, len(waiting[nodes[index]]), index))
            chosen = [nodes[index] for index in sorted(order[:count])]
            entry = {"number": queue["next"], "job": job, "folder": job_folder, "nodes": chosen, "taken": moment}
            _store(folder, {"next": queue["next"] + 1, "tickets": [*live, entry]})
    earlier = _waiting([other for other in live if other["number"] < entry["number"]], entry["nodes"], ended)
    return dict(_aged(entry, moment), after=earlier)


def _waiting(live: Sequence[Entry], nodes: Sequence[str], ended: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Name -> numbers of the reservations of that node."""
    found: dict[str, list[int]] = {name: [] for name in nodes}
    for entry in live:
        for name in entry["nodes"]:
            if name in found and entry["number"] not in ended.get(name, ()):
                found[name].append(entry["number"])
    return found


def _over(entry: Entry, nodes: Sequence[str], ended: Mapping[str, Sequence[int]], moment: float) -> bool:
    """Whether a reservation can be forgotten; one of nodes that nobody can ask any more is, in time."""
    asked = entry["nodes"] if moment - entry["taken"] <= FORGET_SECONDS else [name for name in entry["nodes"] if name in nodes]
    return all(entry["number"] in ended.get(name, ()) for name in asked)


def drop(folder: str, number: int, job: str) -> None:
    """Forget a job's reservation; one that isn't there is fine."""
    with _locked(folder):
        queue = _load(folder, time.time())
        queue["tickets"] = [entry for entry in queue["tickets"] if (entry["number"], entry["job"]) != (number, job)]
        _store(folder, queue)
