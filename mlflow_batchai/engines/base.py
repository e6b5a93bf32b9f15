"""Interface of engines: numbered promises that the conformance suite (``tests/engines``) checks of each."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from mlflow_batchai.agent.plan import Container, Volume

if TYPE_CHECKING:
    from mlflow_batchai.agent.protocol import Record
    from mlflow_batchai.engines.census import Census
    from mlflow_batchai.engines.machines import Answer, Node

Handle = Mapping[str, Any]


class PollState(enum.Enum):
    """State of a command that an engine has started on N nodes."""

    QUEUED = "queued"
    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


class Poll(NamedTuple):
    """An engine's answer.

    Attributes:
        state: of the whole: ALIVE while every node's agent lives, GONE when all or some are gone for certain.
        gone: indexes of the nodes whose agents are gone for certain.
        unknown: indexes of the nodes that could not be asked.
        nodes: index -> one sentence on that node, of those that are gone or unknown.
        frozen: indexes of the nodes whose agents live and were stopped.
        failures: index -> why an agent had to give up the share, which it can't say there: a ``failed`` record.
        started: whether agents run, or may have run; False: the scheduler has given the job no nodes.
    """

    state: PollState
    detail: str = ""
    gone: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()
    nodes: Mapping[int, str] = MappingProxyType({})
    frozen: tuple[int, ...] = ()
    failures: Mapping[int, Record] = MappingProxyType({})
    started: bool = True

    def of(self, node: int) -> str:
        """State of a node, as far as known."""
        return self.nodes.get(node, self.detail)


def unknown_poll(handle: Handle, why: str) -> Poll:
    """The answer of an engine that can't ask any of a job's nodes."""
    return Poll(PollState.UNKNOWN, why, (), tuple(range(len(handle["nodes"]))))


def other_engine(handle: Handle, kind: str) -> str:
    """Why an engine of this kind can't ask a job's nodes, if another one has started them; else nothing."""
    if handle["engine"] == kind:
        return ""
    return f"the job runs on engine {handle['engine']}, and its cluster's document says {kind}"


class Terms(NamedTuple):
    """A job's limit and options for a scheduler, besides the number of its nodes.

    Attributes:
        seconds: the job's time limit; 0: none.
        options: the scheduler's own, in its words.
    """

    seconds: float = 0.0
    options: Sequence[str] = ()


class Needs(NamedTuple):
    """Requirements of a job, from its plan."""

    volumes: Sequence[Volume]
    container: Container | None
    python: str
    terms: Terms = Terms()


@dataclass(frozen=True)
class CheckResult:
    """Result of a check.

    Attributes:
        missing: tools that nodes lack and that can be sent to them -> the kinds of machine that those are.
        warnings: sentences on what is wrong and doesn't matter to the job.
    """

    usable: int
    missing: Mapping[str, Collection[str]] = field(default_factory=dict)
    warnings: Sequence[str] = ()


class StartRequest(NamedTuple):
    """A command to start on nodes.

    Attributes:
        mark: what its processes carry in their environment.
        secrets: what agents are told on their standard input and nowhere else (``agent/agent.py``).
    """

    job: str
    mark: str
    folder: str
    attempt: int
    node_count: int
    secrets: Mapping[str, Any]
    terms: Terms = Terms()

    def __repr__(self) -> str:
        return f"StartRequest({self.mark!r}, {self.folder!r}, {self.node_count})"


class NodeCommand(NamedTuple):
    """The command that one node would run."""

    node: int
    argv: tuple[str, ...]
    root: str
    archive: str


class Engine(Protocol):
    """Starts one command on N nodes.

    Promises:
        1. ``submit`` returns a handle that is JSON, holds no secret, and is enough for ``poll`` and ``cancel`` in any process.
        2. ``submit`` starts on all nodes or on none: what a failed one had started is ended.
        3. ``poll`` never says GONE unless the engine is certain, and never ALIVE for what is gone.
        4. ``cancel`` returns when nothing of the job is left on its nodes, or raises; a second one is no error.
        5. ``poll`` and ``poll_all`` return within seconds, whatever the nodes do.

    Attributes:
        poll_seconds: how often it is worth asking.
    """

    poll_seconds: ClassVar[float]

    @property
    def node_limit(self) -> int:
        """Nodes of the cluster."""

    def check(self, node_count: int, needs: Needs | None = None) -> CheckResult:
        """Whether a job of that many nodes could start. Raises ClusterError: it could not, and why."""

    def render(self, request: StartRequest) -> Sequence[NodeCommand]:
        """Show what each node would run, without starting anything (node indexes of the cluster are not chosen yet)."""

    def submit(self, request: StartRequest) -> Handle:
        """Start it; ClusterError if that can't be done."""

    def poll(self, handle: Handle) -> Poll:
        """Report the state of a started command."""

    def poll_all(self, handles: Sequence[Handle]) -> Sequence[Poll]:
        """``poll`` of many, which costs a node no more than that of one."""

    def cancel(self, handle: Handle) -> None:
        """End it, and everything it started."""

    def end_job(self, job: str) -> None:
        """End whatever runs of a job on the cluster's nodes, of any attempt, known by its mark: its handle can't be trusted.

        Raises:
            ClusterError: some of it may still run.
        """

    def close(self) -> None:
        """Let go of connections; what is asked next opens them again."""


@runtime_checkable
class Scalable(Protocol):
    """An engine whose nodes can be counted, and kept from taking jobs.

    Promises:
        1. ``census`` says of each node what it does just now; one that can't be asked is unusable, and holds up nothing.
        2. After ``admit`` a job that had not taken a node before takes only one of the first ``count``; what runs goes on.
    """

    def census(self) -> Census:
        """Report what the nodes do, and the queue; ClusterError if its book is there and can't be read."""

    def admit(self, count: int) -> None:
        """Have the first ``count`` nodes take jobs, and the others none; ClusterError if some can't be reached."""


@runtime_checkable
class NodeAccess(Protocol):
    """An engine whose nodes can be asked one by one: for commands on them, ``doctor`` and ``gc``."""

    @property
    def nodes(self) -> Sequence[Node]:
        """All of them, in the order of the cluster's document; of a scheduler's cluster one that stands for all."""

    def find(self, name: str, handle: Handle | None = None) -> Node | None:
        """A node by its name, for commands on it; None: there is no such node.

        Args:
            handle: of the job that runs there; None: it need not be there for one.

        Raises:
            ClusterError: the scheduler lets nobody on it now.
        """

    def folder_problems(self, places: Sequence[Answer | None]) -> Sequence[str]:
        """Why no job can be sent to nodes for their own folders: a sentence for each node, empty where it can.

        Args:
            places: what the verb ``place`` says of each node; None of one that can't be asked.
        """
