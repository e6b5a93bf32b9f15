"""Engine for machines without a scheduler: the common part of ``local`` and ``ssh``.

Which job has which node stands in its queue (``agent/reservation/queue.py``), on the disk of the cluster's first node; agents
start at submit and wait for their node. What is asked of nodes is the same for both, and stands in ``agent/api/host.py``.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, ClassVar

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.plan import plain
from mlflow_batchai.agent.reservation.agents import ARRIVAL_SECONDS
from mlflow_batchai.engines.base import Handle, Needs, NodeCommand, Poll, PollState, StartRequest, other_engine, unknown_poll
from mlflow_batchai.engines.census import Census, Known, Place, Said, work_out
from mlflow_batchai.engines.machines import Answer, Node
from mlflow_batchai.engines.parallel import at_once, in_background
from mlflow_batchai.errors import ClusterError

CANCEL_SECONDS = 40.0
# How long one poll waits for answers; those that come later are seen by the next one.
POLL_PATIENCE_SECONDS = 2.0
# How long a node may take for an answer that costs it nothing: one that hangs must not hold up a job's end for long.
ANSWER_SECONDS = 10.0

Outcome = Answer | ClusterError
# A node of a handle: its name and id.
NodeKey = tuple[str, str]


class Hosts:
    """N nodes, asked through their machines: an ``Engine`` that is ``Scalable`` and gives ``NodeAccess``.

    Args:
        nodes: the first one keeps the book.
        book: the book's folder, as that node's machine sees it.
    """

    kind: ClassVar[str]
    poll_seconds: ClassVar[float]

    def __init__(self, nodes: Sequence[Node], book: str, share: str) -> None:
        self._nodes = list(nodes)
        self._book = book
        self._share = share
        self._asked: dict[NodeKey, Future[Mapping[int, Outcome]]] = {}
        self._said: dict[NodeKey, Mapping[int, Outcome]] = {}

    @property
    def nodes(self) -> Sequence[Node]:
        return self._nodes

    def find(self, name: str, handle: Handle | None = None) -> Node | None:
        return next((node for node in self._nodes if node.name == name), None)

    def folder_problems(self, places: Sequence[Answer | None]) -> Sequence[str]:
        return [""] * len(places)

    def census(self) -> Census:
        # One question a machine, and one for the queue to the first node.
        known = self._known()
        groups: dict[int, list[int]] = {}
        for index, node in enumerate(self._nodes):
            if known[index].lost is None:
                groups.setdefault(id(node.machine), []).append(index)
        calls: list[Callable[[], Answer]] = []
        if known[0].lost is None:
            calls.append(functools.partial(self._nodes[0].machine.ask, "listing", book=self._book))
        for group in groups.values():
            roots = [self._nodes[index].root for index in group]
            calls.append(functools.partial(self._nodes[group[0]].machine.ask, "census", roots=roots))
        answers = self._each(calls)
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
                    said[index] = {**told, "id": self._nodes[index].id or told["id"]}
        found = work_out([one.place for one in known], said, [one.trouble for one in known], listed["reservations"])
        return found if known[0].lost is None else found._replace(trouble=str(known[0].lost))

    def admit(self, count: int) -> None:
        calls = [
            functools.partial(node.machine.ask, "drain", root=node.root, drained=index >= count)
            for index, node in enumerate(self._nodes)
        ]
        errors = [str(said) for said in self._each(calls) if isinstance(said, ClusterError)]
        if errors:
            raise ClusterError("; ".join(errors))

    def _known(self) -> Sequence[Known]:
        """The nodes, before they are asked what they do."""
        return [Known(Place(node.name, "127.0.0.1", None)) for node in self._nodes]

    @property
    def node_limit(self) -> int:
        return len(self._nodes)

    def _lack(self, node: Node, needs: Needs | None) -> tuple[str, dict[str, set[str]]]:
        """What a node lacks for a job: a sentence, or nothing; and the tools that can be sent to it, as in ``CheckResult``."""
        if needs is None or not (needs.volumes or needs.container):
            return "", {}
        asked = {"volumes": needs.volumes, "container": needs.container, "python": needs.python}
        said = node.machine.ask("needs", **plain(asked))
        lack = f"{node.machine.title}: {said['trouble']}" if said["trouble"] else ""
        return lack, {tool: {said["machine"]} for tool in said["lacking"]}

    def _usable(self, node_count: int) -> Sequence[Node]:
        if node_count > self.node_limit:
            raise ClusterError(f"the job wants {node_count} nodes and the cluster has {self.node_limit}")
        return self._nodes

    def render(self, request: StartRequest) -> Sequence[NodeCommand]:
        return [
            NodeCommand(
                index,
                node.machine.shown(["agent", *self._arguments(request, index, node), f"--root={node.root}"]),
                node.root,
                node.machine.archive,
            )
            for index, node in enumerate(self._nodes[: request.node_count])
        ]

    def submit(self, request: StartRequest) -> Handle:
        usable = {node.id: node for node in self._usable(request.node_count)}
        asked = time.monotonic()
        reservation = self._reserve(usable, request)
        chosen = [usable[identity] for identity in reservation["nodes"]]
        handle: dict[str, Any] = {
            "engine": self.kind,
            "host": socket.gethostname(),
            "ticket": reservation["number"],
            "mark": request.mark,
            "nodes": [{"name": node.name, "id": node.id} for node in chosen],
        }

        def start(index: int, node: Node) -> Answer:
            return node.machine.ask(
                "start",
                root=node.root,
                command=node.machine.command,
                arguments=self._arguments(request, index, node),
                # Rather too old than too young: an agent that believes itself in time would stand in others' way.
                reservation={
                    "number": reservation["number"],
                    "age": reservation["age"] + time.monotonic() - asked,
                    "after": reservation["after"][node.id],
                },
                log=f"logs/{request.job}-{request.attempt}.log",
                mark=request.mark,
                secrets=dict(request.secrets),
                keeper=self._queue_node(),
            )

        with contextlib.ExitStack() as undo:
            undo.push(lambda kind, error, trace: self._undo(handle))
            answers = self._each([functools.partial(start, index, node) for index, node in enumerate(chosen)])
            for entry, said in zip(handle["nodes"], answers, strict=True):
                if isinstance(said, dict):
                    entry.update(said)
            for said in answers:
                if isinstance(said, ClusterError):
                    raise said
            if reservation["age"] + time.monotonic() - asked >= ARRIVAL_SECONDS:
                # Some nodes may have given its reservation up meanwhile and others not: jobs would wait for each other.
                raise ClusterError(
                    f"the nodes took longer than {ARRIVAL_SECONDS:.0f} s to start the job's agents; submit again"
                )
            undo.pop_all()
        return handle

    def _reserve(self, usable: Mapping[str, Node], request: StartRequest) -> Answer:
        """Reserve nodes, after asking them which earlier reservations have ended: only they can know."""
        first = self._nodes[0].machine
        earlier = first.ask("listing", book=self._book)["reservations"]
        calls = []
        for identity, node in usable.items():
            asked = [(reservation["number"], reservation["age"]) for reservation in earlier if identity in reservation["nodes"]]
            calls.append(functools.partial(node.machine.ask, "ended", root=node.root, asked=asked))
        ended, drained = {}, []
        for identity, said in zip(usable, self._each(calls), strict=True):
            if isinstance(said, ClusterError):
                raise said
            ended[identity] = said["ended"]
            drained += [identity] if said["drained"] else []
        return first.ask(
            "reserve",
            book=self._book,
            nodes=list(usable),
            job=request.mark,
            count=request.node_count,
            ended=ended,
            drained=drained,
            folder=request.folder,
        )

    def _queue_node(self) -> str:
        """The id of the node that keeps the queue; nothing where no other book could be used by mistake."""
        return ""

    def _expected(self, entry: Handle) -> str:
        """The id that a node of a handle must have; nothing where it can be no other."""
        return ""

    def _undo(self, handle: Handle) -> None:
        # What went wrong first is what a person has to see.
        with contextlib.suppress(ClusterError):
            self.cancel(handle)

    def poll(self, handle: Handle) -> Poll:
        return self.poll_all([handle])[0]

    def poll_all(self, handles: Sequence[Handle]) -> Sequence[Poll]:
        said = self._poll_nodes([handle for handle in handles if not self._cant_ask(handle)])
        return [self._poll_of(handle, said) for handle in handles]

    def _cant_ask(self, handle: Handle) -> str:
        """Why nothing can be said of a job's agents from here, or nothing."""
        return other_engine(handle, self.kind)

    def _poll_of(self, handle: Handle, said: Mapping[NodeKey, Mapping[int, Outcome]]) -> Poll:
        if reason := self._cant_ask(handle):
            return unknown_poll(handle, reason)
        silent = {entry["name"]: ClusterError(f"node {entry['name']} has not answered yet") for entry in handle["nodes"]}
        answers = [said[_key(entry)].get(handle["ticket"], silent[entry["name"]]) for entry in handle["nodes"]]
        gone = tuple(index for index, said in enumerate(answers) if isinstance(said, dict) and not said["alive"])
        unknown = tuple(index for index, said in enumerate(answers) if not isinstance(said, dict))
        told = {index: said for index, said in enumerate(answers) if isinstance(said, dict)}
        frozen = tuple(index for index, said in told.items() if said.get("frozen"))
        failures = {index: said["failure"] for index, said in told.items() if said.get("failure")}
        if gone or unknown:
            nodes = {index: self._described(handle, index, answers[index]) for index in (*gone, *unknown)}
            state = PollState.GONE if gone else PollState.UNKNOWN
            return Poll(state, nodes[(*gone, *unknown)[0]], gone, unknown, nodes, frozen, failures)
        waiting = sum(isinstance(said, dict) and said["state"] == "waiting" for said in answers)
        if waiting:
            why = f"{waiting} of {len(answers)} nodes are taken by other jobs"
            return Poll(PollState.QUEUED, why, frozen=frozen, failures=failures)
        return Poll(PollState.ALIVE, frozen=frozen, failures=failures)

    def _described(self, handle: Handle, index: int, said: Outcome) -> str:
        if isinstance(said, ClusterError):
            return str(said)
        return f"the agent of {self._called(handle, index)} is gone" + (f": {said['last']}" if said["last"] else "")

    def _called(self, handle: Handle, index: int) -> str:
        return f"node-{index}"

    def _poll_nodes(self, handles: Sequence[Handle]) -> Mapping[NodeKey, Mapping[int, Outcome]]:
        """Ask each node once for all of these jobs' agents on it: node -> number of the reservation -> what it says of that."""
        asked: dict[NodeKey, tuple[Handle, list[int]]] = {}
        for handle in handles:
            for entry in handle["nodes"]:
                asked.setdefault(_key(entry), (entry, []))[1].append(handle["ticket"])
        calls = {key: functools.partial(self._poll_node, *question) for key, question in asked.items()}
        if self.kind == "local":
            return {key: call() for key, call in calls.items()}
        # A node that doesn't answer must not hold up who asks: its answer is waited for across polls.
        for key, call in calls.items():
            if key not in self._asked:
                self._asked[key] = in_background(call)
        wait([self._asked[key] for key in calls], POLL_PATIENCE_SECONDS)
        found: dict[NodeKey, Mapping[int, Outcome]] = {}
        for key in calls:
            if self._asked[key].done():
                found[key] = self._said[key] = self._asked.pop(key).result()
            else:
                # What was wrong last says more than that nothing has come yet.
                last = self._said.get(key, {})
                found[key] = {number: said for number, said in last.items() if isinstance(said, ClusterError)}
        return found

    def _poll_node(self, entry: Handle, numbers: Sequence[int]) -> Mapping[int, Outcome]:
        try:
            node = self._asking(entry)
            asked = {"root": node.root, "numbers": numbers, "identity": self._expected(entry)}
            answers = node.machine.ask("polls", ANSWER_SECONDS, **asked)["polls"]
        except ClusterError as error:
            return dict.fromkeys(numbers, error)
        nothing = ClusterError(
            f"{node.machine.title} knows nothing of the job's agent; is it another machine by now, or was its folder"
            f" {node.root} removed?"
        )
        return {number: nothing if said["alive"] is None else said for number, said in zip(numbers, answers, strict=True)}

    def cancel(self, handle: Handle) -> None:
        if reason := other_engine(handle, self.kind):
            raise ClusterError(f"{reason}; what runs there of the job may go on: end it by hand")
        machines: dict[int, list[Handle]] = {}
        for entry in handle["nodes"]:
            node = self._node(entry)
            machines.setdefault(id(node.machine if node else entry), []).append(entry)
        self._end_all([functools.partial(self._end, handle, entries) for entries in machines.values()])
        # Nodes say by themselves what has ended there: this only tidies, and its failure is no failure.
        with contextlib.suppress(ClusterError):
            self._nodes[0].machine.ask("drop", ANSWER_SECONDS, book=self._book, number=handle["ticket"], job=handle["mark"])

    def end_job(self, job: str) -> None:
        machines: dict[int, list[Node]] = {}
        for node in self._nodes:
            machines.setdefault(id(node.machine), []).append(node)
        mark = protocol.job_mark(job, None)
        self._end_all([functools.partial(_end_marked, mark, [(node, "") for node in nodes]) for nodes in machines.values()])

    def _end_all(self, calls: Sequence[Callable[[], Answer]]) -> None:
        errors = [str(said) for said in self._each(calls) if isinstance(said, ClusterError)]
        if errors:
            raise ClusterError("; ".join(errors) + "; what runs there of the job may go on: end it by hand")

    def _end(self, handle: Handle, entries: Sequence[Handle]) -> Answer:
        return _end_marked(handle["mark"], [(self._asking(entry), self._expected(entry)) for entry in entries])

    def close(self) -> None:
        for machine in {id(node.machine): node.machine for node in self._nodes}.values():
            machine.close()
        self._asked.clear()
        self._said.clear()

    def _arguments(self, request: StartRequest, index: int, node: Node) -> list[str]:
        return [
            f"--share={self._share}",
            f"--folder={request.folder}",
            f"--attempt={request.attempt}",
            f"--node={index}",
            f"--name={node.name}",
            f"--part={node.part}",
        ]

    def _node(self, entry: Handle) -> Node | None:
        """The node of a handle by the cluster's document, which alone decides its folder and login."""
        return next((node for node in self._nodes if node.name == entry["name"]), None)

    def _asking(self, entry: Handle) -> Node:
        node = self._node(entry)
        if node is None:
            raise ClusterError(f"node {entry['name']} is no longer in the cluster document")
        return node

    def _each(self, calls: Sequence[Callable[[], Answer]]) -> list[Outcome]:
        """Result or error of each call; calls run at once where they go to several machines."""
        guarded = [functools.partial(_outcome, call) for call in calls]
        return [call() for call in guarded] if self.kind == "local" else at_once(guarded)


def _key(entry: Handle) -> NodeKey:
    return str(entry["name"]), str(entry.get("id"))


def _end_marked(mark: str, nodes: Sequence[tuple[Node, str]]) -> Answer:
    """End what carries a mark on one machine; ``nodes``: those of it, each with the id that it must have, or nothing."""
    machine = nodes[0][0].machine
    # A node that is gone is known by now, not after the minutes that the end may take.
    machine.ask("ended", ANSWER_SECONDS, root=nodes[0][0].root, asked=[])
    roots = [(node.root, identity) for node, identity in nodes]
    said = machine.ask("end", 2 * CANCEL_SECONDS + 20.0, mark=mark, nodes=roots, give_up=CANCEL_SECONDS)
    if said["left"]:
        raise ClusterError(f"{machine.title}: processes {said['left']} of the job would not end")
    return said


def _outcome(call: Callable[[], Answer]) -> Outcome:
    try:
        return call()
    except ClusterError as error:
        return error
