"""Compute what a cluster's nodes do from what its machines say: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from mlflow_batchai.agent.reservation.agents import ARRIVAL_SECONDS, MARGIN_SECONDS
from mlflow_batchai.errors import ClusterError

Said = Mapping[str, Any] | ClusterError


class NodeState(str, Enum):
    """Batch AI's words for what a node does, and ``closed``: it takes no jobs until the cluster grows."""

    IDLE = "idle"
    RUNNING = "running"
    PREPARING = "preparing"
    LEAVING = "leaving"
    UNUSABLE = "unusable"
    CLOSED = "closed"


class Reservation(NamedTuple):
    """A job's place in the queue.

    Attributes:
        mark: what the job's processes carry: ``<job id>/<attempt>``.
        folder: the job folder on the control share, empty if an earlier version took the reservation.
        started: whether it has all its nodes.
        why: why it waits, in a scheduler's words.
    """

    number: int
    mark: str
    folder: str
    nodes: tuple[int, ...]
    started: bool
    why: str = ""


class Place(NamedTuple):
    """Where a node is, for people."""

    name: str
    address: str
    port: int | None


class Known(NamedTuple):
    """A node as it is known before it is asked what it does.

    Attributes:
        lost: why it can't be asked.
        trouble: why no job can be sent to it, or nothing.
    """

    place: Place
    lost: ClusterError | None = None
    trouble: str = ""


class NodeReport(NamedTuple):
    """One node.

    Attributes:
        reservation: the number of the reservation that has it, or is just taking it.
        why: what makes it unusable.
    """

    place: Place
    state: NodeState
    reservation: int | None = None
    why: str = ""


class Census(NamedTuple):
    """What the nodes of a cluster do, and its queue.

    Attributes:
        reservations: the queue, in its order: jobs that run and jobs that wait.
        trouble: why the queue can't be seen, or nothing.
    """

    nodes: Sequence[NodeReport]
    reservations: Sequence[Reservation]
    trouble: str = ""


def work_out(
    places: Sequence[Place], said: Sequence[Said], problems: Sequence[str], book: Sequence[Mapping[str, Any]]
) -> Census:
    """The census.

    A node is *running* while a job has it, *leaving* if it is to take no other one, *preparing* while a job has it that waits
    for its other nodes, or is just taking it, and *unusable* if it can't be asked or no job could be sent to it.

    Args:
        said: of each node: what ``host.census`` says of it, or why it could not be asked.
        problems: why no job can be sent to it, or nothing.
    """
    reservations = [reservation for entry in book if (reservation := _reservation(entry, said)) is not None]
    by_number = {reservation.number: reservation for reservation in reservations}
    nodes = []
    for place, answer, problem in zip(places, said, problems, strict=True):
        if isinstance(answer, ClusterError):
            nodes.append(NodeReport(place, NodeState.UNUSABLE, None, str(answer)))
            continue
        held, waiting = (_numbers(answer, word) for word in ("held", "waiting"))
        if held:
            whole = by_number[held[0]].started if held[0] in by_number else True
            state = NodeState.LEAVING if answer["drained"] else NodeState.RUNNING if whole else NodeState.PREPARING
            nodes.append(NodeReport(place, state, held[0]))
        elif answer["drained"]:
            nodes.append(NodeReport(place, NodeState.CLOSED))
        elif problem:
            nodes.append(NodeReport(place, NodeState.UNUSABLE, None, problem))
        elif waiting:
            nodes.append(NodeReport(place, NodeState.PREPARING, waiting[0]))
        else:
            nodes.append(NodeReport(place, NodeState.IDLE))
    return Census(nodes, reservations)


def _numbers(answer: Mapping[str, Any], word: str) -> list[int]:
    """The reservations on a node whose agents say so, the earliest first."""
    return sorted(int(number) for number, state in answer["agents"].items() if state == word)


def _reservation(entry: Mapping[str, Any], said: Sequence[Said]) -> Reservation | None:
    """A reservation of the book, unless all of its nodes that can be asked say that it is over."""
    places: list[int] = []
    states: list[str] = []
    for index, answer in enumerate(said):
        if isinstance(answer, ClusterError) or answer["id"] not in entry["nodes"]:
            continue
        # Its agent may just be on its way.
        coming = "waiting" if entry["age"] < ARRIVAL_SECONDS + MARGIN_SECONDS else "ended"
        places.append(index)
        states.append(answer["agents"].get(str(entry["number"]), coming))
    if not places or set(states) == {"ended"}:
        return None
    started = "waiting" not in states
    return Reservation(entry["number"], entry["job"], entry.get("folder", ""), tuple(places), started)
