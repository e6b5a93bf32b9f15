"""Ask all nodes of a cluster at once: their states, which take jobs, and the reservation of a job."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mlflow_batchai.engines.base import StartRequest
from mlflow_batchai.engines.census import Census, Place, Said, work_out
from mlflow_batchai.engines.machines import Answer, Machine
from mlflow_batchai.errors import ClusterError

if TYPE_CHECKING:
    from mlflow_batchai.engines.machines import Node

Each = Callable[[Sequence[Callable[[], Answer]]], Sequence[Answer | ClusterError]]


class Known(NamedTuple):
    """A node as it is known before it is asked what it does.

    Attributes:
        lost: why it can't be asked.
        trouble: why no job can be sent to it, or nothing.
    """

    place: Place
    lost: ClusterError | None = None
    trouble: str = ""


def census(nodes: Sequence[Node], known: Sequence[Known], book: str, each: Each) -> Census:
    """Ask what the nodes do: one question a machine, and one for the queue to the first node."""
    groups: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        if known[index].lost is None:
            groups.setdefault(id(node.machine), []).append(index)
    calls: list[Callable[[], Answer]] = []
    if known[0].lost is None:
        calls.append(functools.partial(nodes[0].machine.ask, "listing", book=book))
    for group in groups.values():
        roots = [nodes[index].root for index in group]
        calls.append(functools.partial(nodes[group[0]].machine.ask, "census", roots=roots))
    answers = list(each(calls))
    listed = answers.pop(0) if known[0].lost is None else {"reservations": []}
    if isinstance(listed, ClusterError):
        raise listed
    said: list[Said] = [one.lost or ClusterError("") for one in known]
    for group, answer in zip(groups.values(), answers, strict=True):
        for position, index in enumerate(group):
            if isinstance(answer, ClusterError):
                said[index] = answer
            else:
                told = answer["nodes"][position]
                said[index] = {**told, "id": nodes[index].id or told["id"]}
    found = work_out([one.place for one in known], said, [one.trouble for one in known], listed["reservations"])
    return found if known[0].lost is None else found._replace(trouble=str(known[0].lost))


def admit(nodes: Sequence[Node], count: int, each: Each) -> None:
    """Have the first ``count`` nodes take jobs, and the others none.

    Raises:
        ClusterError: some could not be told, and why; the others have been.
    """
    calls = [
        functools.partial(node.machine.ask, "drain", root=node.root, drained=index >= count) for index, node in enumerate(nodes)
    ]
    errors = [str(said) for said in each(calls) if isinstance(said, ClusterError)]
    if errors:
        raise ClusterError("; ".join(errors))


def reserve(usable: Mapping[str, Node], first: Machine, book: str, request: StartRequest, each: Each) -> Answer:
    """Reserve nodes for the job, after asking them which earlier reservations have ended: only they can know.

    Args:
        usable: id -> node, in the cluster's order.
    """
    earlier = first.ask("listing", book=book)["reservations"]
    calls = []
    for identity, node in usable.items():
        asked = [(reservation["number"], reservation["age"]) for reservation in earlier if identity in reservation["nodes"]]
        calls.append(functools.partial(node.machine.ask, "ended", root=node.root, asked=asked))
    ended, drained = {}, []
    for identity, said in zip(usable, each(calls), strict=True):
        if isinstance(said, ClusterError):
            raise said
        ended[identity] = said["ended"]
        drained += [identity] if said["drained"] else []
    return first.ask(
        "reserve",
        book=book,
        nodes=list(usable),
        job=request.mark,
        count=request.node_count,
        ended=ended,
        drained=drained,
        folder=request.folder,
    )
