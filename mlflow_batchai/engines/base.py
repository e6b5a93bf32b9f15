"""What every engine can do, as promises that the conformance suite (``tests/engines``) holds each implementation to."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Handle = Mapping[str, Any]


class PollState(enum.Enum):
    """What an engine can say of a command that it started on N nodes."""

    QUEUED = "queued"
    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


class Poll(NamedTuple):
    """An engine's answer.

    Attributes:
        state: of the whole: ALIVE while every node's agent lives, GONE when all or some are gone for certain.
        detail: one sentence, for people.
        gone: indexes of the nodes whose agents are gone for certain.
    """

    state: PollState
    detail: str = ""
    gone: tuple[int, ...] = ()


class StartRequest(NamedTuple):
    """What to start.

    Attributes:
        job: the job's id.
        mark: what its processes carry in their environment.
        folder: the job folder on the control share.
        attempt: from 1.
        node_count: nodes wanted, all or none.
        secrets: variables for the ranks; they go by standard input.
    """

    job: str
    mark: str
    folder: str
    attempt: int
    node_count: int
    secrets: Mapping[str, str]


class NodeCommand(NamedTuple):
    """What one node would run: text for a dry run, argv and environment for the real one."""

    node: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]


class Engine(Protocol):
    """Starts one command on N nodes.

    Promises:
        1. ``submit`` returns a handle that is JSON, holds no secret, and is enough for ``poll`` and ``cancel`` in any process.
        2. ``submit`` starts on all nodes or on none: what a failed one had started is ended.
        3. ``poll`` never says GONE unless the engine is certain, and never ALIVE for what is gone.
        4. ``cancel`` returns when nothing of the job is left on its nodes, or raises; a second one is no error.
    """

    @property
    def node_limit(self) -> int:
        """Nodes of the cluster."""

    def render(self, request: StartRequest) -> Sequence[NodeCommand]:
        """What each node would run, without starting anything (node indexes of the cluster are not chosen yet)."""

    def submit(self, request: StartRequest) -> Handle:
        """Start it; ClusterError if that can't be done."""

    def poll(self, handle: Handle) -> Poll:
        """How it stands."""

    def cancel(self, handle: Handle) -> None:
        """End it, and everything it started."""
