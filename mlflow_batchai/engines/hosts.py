"""The engine for machines without a scheduler: what is the same for this one, cut into nodes, and for others over SSH.

Which job has which node stands in the ticket book (``node/tickets.py``), on the disk of the cluster's first node; agents start
at submit and wait for their turn. What is asked of nodes is the same for both, and stands in ``node/host.py``.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mlflow_batchai.engines.base import Handle, NodeCommand, Poll, PollState, StartRequest
from mlflow_batchai.engines.machines import Answer, LocalMachine, Machine
from mlflow_batchai.errors import ClusterError

CANCEL_SECONDS = 40.0
# How long one poll waits for answers; those that come later are seen by the next one.
POLL_PATIENCE_SECONDS = 2.0
# How long a node may take for an answer that costs it nothing: one that hangs must not hold up a job's end for long.
ANSWER_SECONDS = 10.0
MOST_AT_ONCE = 64


class Node(NamedTuple):
    """One node of the cluster.

    Attributes:
        name: in the ticket book, and for people.
        root: its own folder, on its own disk.
        part: which part of its machine it is: ``0/1`` is all of it.
    """

    name: str
    machine: Machine
    root: str
    part: str = "0/1"


Outcome = Answer | ClusterError


class Hosts:
    """N nodes, asked through their machines.

    Args:
        nodes: the first one keeps the book.
        book: the book's folder, as that node's machine sees it.
        share: the control share's path on the nodes.
    """

    kind: ClassVar[str]
    poll_seconds: ClassVar[float]

    def __init__(self, nodes: Sequence[Node], book: str, share: str) -> None:
        self._nodes = list(nodes)
        self._book = book
        self._share = share
        self._pool: ThreadPoolExecutor | None = None
        self._asked: dict[tuple[Any, str], Future[Outcome]] = {}

    @property
    def nodes(self) -> Sequence[Node]:
        """All of them, for who asks them itself."""
        return self._nodes

    @property
    def node_limit(self) -> int:
        return len(self._nodes)

    def check(self, node_count: int) -> Sequence[str]:
        self._usable(node_count)
        return []

    def _usable(self, node_count: int) -> Sequence[Node]:
        """The nodes that jobs can be sent to."""
        if node_count > self.node_limit:
            raise ClusterError(f"the job wants {node_count} nodes and the cluster has {self.node_limit}")
        return self._nodes

    def render(self, request: StartRequest) -> Sequence[NodeCommand]:
        return [
            NodeCommand(index, node.machine.shown(["agent", *self._arguments(request, index, node), f"--root={node.root}"]))
            for index, node in enumerate(self._nodes[: request.node_count])
        ]

    def submit(self, request: StartRequest) -> Handle:
        usable = {node.name: node for node in self._usable(request.node_count)}
        ticket = self._take(usable, request)
        taken = time.monotonic()
        handle: dict[str, Any] = {
            "engine": self.kind,
            "host": socket.gethostname(),
            "ticket": ticket["number"],
            "mark": request.mark,
            "nodes": [{"name": name, "root": usable[name].root} for name in ticket["nodes"]],
        }
        log = f"logs/{request.job}-{request.attempt}.log"

        def start(index: int, node: Node) -> Answer:
            own = {
                "number": ticket["number"],
                "age": ticket["age"] + time.monotonic() - taken,
                "after": ticket["after"][node.name],
            }
            arguments = self._arguments(request, index, node)
            command, secrets = node.machine.command, dict(request.secrets)
            return node.machine.ask(
                "start", root=node.root, command=command, arguments=arguments, ticket=own, log=log, secrets=secrets
            )

        with contextlib.ExitStack() as undo:
            undo.push(lambda kind, error, trace: self._undo(handle))
            calls = [lambda index=index, name=name: start(index, usable[name]) for index, name in enumerate(ticket["nodes"])]
            for entry, said in zip(handle["nodes"], self._each(calls), strict=True):
                if isinstance(said, ClusterError):
                    raise said
                entry.update(said)
            undo.pop_all()
        return handle

    def _undo(self, handle: Handle) -> None:
        # What went wrong first is what a person has to see.
        with contextlib.suppress(ClusterError):
            self.cancel(handle)

    def poll(self, handle: Handle) -> Poll:
        answers = self._poll_nodes(handle)
        gone = tuple(index for index, said in enumerate(answers) if isinstance(said, dict) and not said["alive"])
        unknown = tuple(index for index, said in enumerate(answers) if not isinstance(said, dict))
        if gone or unknown:
            nodes = {index: self._told(handle, index, answers[index]) for index in (*gone, *unknown)}
            state = PollState.GONE if gone else PollState.UNKNOWN
            return Poll(state, nodes[(*gone, *unknown)[0]], gone, unknown, nodes)
        waiting = sum(isinstance(said, dict) and said["state"] == "waiting" for said in answers)
        if waiting:
            return Poll(PollState.QUEUED, f"{waiting} of {len(answers)} nodes are taken by other jobs")
        return Poll(PollState.ALIVE)

    def _told(self, handle: Handle, index: int, said: Outcome) -> str:
        """What is to be said of a node that is gone or could not be asked."""
        if isinstance(said, ClusterError):
            return str(said)
        return f"the agent of {self._called(handle, index)} is gone" + (f": {said['last']}" if said["last"] else "")

    def _called(self, handle: Handle, index: int) -> str:
        return f"node-{index}"

    def _poll_nodes(self, handle: Handle) -> list[Outcome]:
        calls = {}
        for entry in handle["nodes"]:
            asked = {key: entry.get(key) for key in ("root", "pid", "started", "boot", "log")}
            calls[entry["name"]] = self._call(entry, "poll", timeout=ANSWER_SECONDS, number=handle["ticket"], **asked)
        if self.kind == "local":
            return self._each(list(calls.values()))
        # A node that doesn't answer must not hold up who asks: its answer is waited for across polls.
        for name, call in calls.items():
            key = (handle["ticket"], name)
            if key not in self._asked:
                self._asked[key] = self._executor().submit(_outcome, call)
        wait([self._asked[handle["ticket"], name] for name in calls], POLL_PATIENCE_SECONDS)
        found: list[Outcome] = []
        for name in calls:
            future = self._asked[handle["ticket"], name]
            if future.done():
                del self._asked[handle["ticket"], name]
                found.append(future.result())
            else:
                found.append(ClusterError(f"node {name} has not answered yet"))
        return found

    def cancel(self, handle: Handle) -> None:
        machines: dict[int, tuple[Machine | None, list[Handle]]] = {}
        for entry in handle["nodes"]:
            machine = self._machine(entry)
            machines.setdefault(id(machine) if machine else id(entry), (machine, []))[1].append(entry)
        calls = [self._end(handle["mark"], machine, entries) for machine, entries in machines.values()]
        troubles = [str(said) for said in self._each(calls) if isinstance(said, ClusterError)]
        if troubles:
            raise ClusterError("; ".join(troubles) + "; what runs there of the job may go on: end it by hand")
        if self._nodes:
            self._nodes[0].machine.ask("drop", book=self._book, number=handle["ticket"])

    def _end(self, mark: str, machine: Machine | None, entries: Sequence[Handle]) -> Callable[[], Answer]:
        def call() -> Answer:
            if machine is None:
                raise ClusterError(f"node {entries[0]['name']} is no longer in the cluster document")
            agents = [(entry["pid"], entry["started"], entry["boot"]) for entry in entries if entry.get("pid")]
            # A node that is gone is known by now, not after the minutes that the end may take.
            machine.ask("ended", ANSWER_SECONDS, root=entries[0]["root"], asked=[])
            said = machine.ask("end", 2 * CANCEL_SECONDS + 20.0, mark=mark, agents=agents, give_up=CANCEL_SECONDS)
            if said["left"]:
                raise ClusterError(f"{machine.title}: processes {said['left']} of the job would not end")
            return said

        return call

    def close(self) -> None:
        for machine in {id(node.machine): node.machine for node in self._nodes}.values():
            machine.close()
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
            self._asked.clear()

    # Small things.

    def _arguments(self, request: StartRequest, index: int, node: Node) -> list[str]:
        return [
            f"--share={self._share}",
            f"--folder={request.folder}",
            f"--attempt={request.attempt}",
            f"--node={index}",
            f"--part={node.part}",
        ]

    def _take(self, usable: Mapping[str, Node], request: StartRequest) -> Answer:
        """A ticket for the job; what nodes say of earlier ones is asked first, since only they can know."""
        keeper = self._nodes[0].machine
        earlier = keeper.ask("listing", book=self._book)["tickets"]
        asked = {name: [(ticket["number"], ticket["age"]) for ticket in earlier if name in ticket["nodes"]] for name in usable}
        busy = [name for name in usable if asked[name]]
        calls = [self._call({"name": name}, "ended", root=usable[name].root, asked=asked[name]) for name in busy]
        ended = {}
        for name, said in zip(busy, self._each(calls), strict=True):
            if isinstance(said, ClusterError):
                raise said
            ended[name] = said["ended"]
        return keeper.ask("take", book=self._book, nodes=list(usable), job=request.mark, count=request.node_count, ended=ended)

    def _machine(self, entry: Handle) -> Machine | None:
        return next((node.machine for node in self._nodes if node.name == entry["name"]), None)

    def _call(self, entry: Handle, verb: str, **arguments: Any) -> Callable[[], Answer]:
        def call() -> Answer:
            machine = self._machine(entry)
            if machine is None:
                raise ClusterError(f"node {entry['name']} is no longer in the cluster document")
            return machine.ask(verb, **arguments)

        return call

    def _each(self, calls: Sequence[Callable[[], Answer]]) -> list[Outcome]:
        """What each call answers, or the error that it ends in, all at once where they go to several machines."""
        if self.kind == "local" or len(calls) < 2:
            return [_outcome(call) for call in calls]
        return list(self._executor().map(_outcome, calls))

    def _executor(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(MOST_AT_ONCE, 2 * len(self._nodes)), thread_name_prefix="node")
        return self._pool


def _outcome(call: Callable[[], Answer]) -> Outcome:
    try:
        return call()
    except ClusterError as error:
        return error


class LocalHosts(Hosts):
    """N nodes on this machine.

    Args:
        home: the client's folder (``$BATCHAI_HOME``).
        cluster: the cluster's name.
        nodes: how many.
        share: the control share's directory.
    """

    kind = "local"
    poll_seconds = 1.0

    def __init__(self, home: Path, cluster: str, nodes: int, share: Path) -> None:
        folder = home / "nodes" / cluster
        machine = LocalMachine(home / "agents")
        made = [Node(str(index), machine, str(folder / str(index)), f"{index}/{nodes}") for index in range(nodes)]
        super().__init__(made, str(folder / "book"), str(share))
        self._here = machine

    def _machine(self, entry: Handle) -> Machine:
        # The cluster's document may name fewer nodes by now.
        return self._here

    def poll(self, handle: Handle) -> Poll:
        if handle["host"] != socket.gethostname():
            detail = f"the job runs on {handle['host']}, whose processes can't be seen from here"
            return Poll(PollState.UNKNOWN, detail, (), tuple(range(len(handle["nodes"]))))
        return super().poll(handle)

    def cancel(self, handle: Handle) -> None:
        if handle["host"] != socket.gethostname():
            raise ClusterError(f"the job runs on {handle['host']}; end it there")
        super().cancel(handle)
