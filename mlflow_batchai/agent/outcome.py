"""How an attempt ends: failures of nodes with their cause, stops from outside, and the resulting verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlflow_batchai.agent import protocol, records
from mlflow_batchai.agent.layout import node_id

# What a rank prints when another rank went away: its own end is a consequence, not the cause.
_CONSEQUENCES = (
    "HorovodInternalError",
    "Connection closed by peer",
    "Connection reset by peer",
    "gloo::IoException",
    "Gloo all-reduce failed",
    "Horovod has been shut down",
    "ncclRemoteError",
    "Failed to recv, got 0 bytes",
)
SHORT_LINE = 20


class Stop(Exception):
    """The attempt ends here for a reason that isn't this node's failure.

    Attributes:
        kind: ``cancel`` or ``requeue`` (someone asked), ``verdict`` (it has been given), ``node0`` (node 0 said so), ``peer``
            (a peer failed or is gone).
        queued: whether the node wasn't taken yet.
    """

    def __init__(self, kind: str, why: str, queued: bool = False, by: str | None = None) -> None:
        super().__init__(why)
        self.kind = kind
        self.queued = queued
        self.by = by

    @property
    def asked(self) -> bool:
        """Whether someone asked for it: then what fails meanwhile is no cause."""
        return self.kind in (protocol.CANCEL, protocol.REQUEUE)


class Failure(Exception):
    """This node's part has failed; the message is one sentence.

    Attributes:
        time: milliseconds since the epoch.
        details: names and values that Batch AI's error for this code has besides.
    """

    def __init__(
        self,
        code: str,
        message: str,
        node: int,
        rank: int | None = None,
        exit_code: int | None = None,
        tail: Sequence[str] = (),
        signalled: bool = False,
        time: int | None = None,
        details: Sequence[Sequence[str]] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.node = node
        self.rank = rank
        self.exit_code = exit_code
        self.tail = list(tail)
        self.signalled = signalled
        self.time = protocol.now_ms() if time is None else time
        self.details = [list(detail) for detail in details]

    def as_record(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "message": str(self),
            "node": self.node,
            "rank": self.rank,
            "exitCode": self.exit_code,
            "tail": self.tail,
            "signalled": self.signalled,
            "time": self.time,
            "details": self.details,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Failure:
        """The failure in a peer's record; fields that are missing or of the wrong type are left out."""

        def get(key: str, kind: Any) -> Any:
            value = record.get(key)
            return value if isinstance(value, kind) and not isinstance(value, bool) else None

        code, node, details = record.get("code"), get("node", int) or 0, get("details", list) or []
        return cls(
            code if isinstance(code, str) and code in protocol.MESSAGES else protocol.JOB_FAILED,
            get("message", str) or f"{node_id(node)} failed",
            node,
            get("rank", int),
            get("exitCode", int),
            [str(line) for line in get("tail", list) or []],
            record.get("signalled") is True,
            get("time", int),
            [pair for pair in details if records.list_of(records.is_text)(pair) and len(pair) == 2],
        )

    def as_error(self) -> dict[str, Any]:
        rank = [] if self.rank is None else [("rank", str(self.rank))]
        details = [(name, value) for name, value in self.details]
        return protocol.error_record(self.code, [("node", str(self.node)), *rank, *details, ("message", str(self))])

    def reason(self, lines: int = 20) -> str:
        # What the sentence has said already isn't said twice.
        tail = "\n".join(line for line in self.tail[-lines:] if len(line) < SHORT_LINE or line.strip() not in str(self))
        return f"{self}\n{tail}" if tail else str(self)

    @property
    def is_consequence(self) -> bool:
        """Whether this rank only noticed that another had gone."""
        return any(mark in line for line in self.tail for mark in _CONSEQUENCES)


def first_cause(failures: list[Failure]) -> Failure | None:
    """The failure that brought the others about.

    A rank that was killed or that failed by itself comes before one whose last lines say that a peer went away; then the
    earlier one (clocks of nodes differ, so this is the weakest sign).
    """
    if not failures:
        return None
    return min(failures, key=lambda failure: (failure.is_consequence and not failure.signalled, failure.time))


def verdict(cause: Failure | None, stop: Stop | None, node: int = 0, attempt: int = 1) -> protocol.Record:
    """Make the verdict on an attempt: a request to end it comes before failures, which it may have caused."""
    by = protocol.agent_writer(node)
    if stop and stop.kind == protocol.REQUEUE:
        return protocol.requeued_record(str(stop), by, attempt)
    if stop and stop.kind == protocol.CANCEL:
        return protocol.terminated_record(by, not stop.queued, {"who": stop.by, "why": str(stop)})
    if cause:
        terminated = cause.code == protocol.JOB_TERMINATED
        return protocol.verdict_record(
            protocol.FAILED, by, cause.exit_code, [cause.as_error()], cause.reason(), terminated=terminated
        )
    if stop:
        return protocol.verdict_record(protocol.FAILED, by, reason=str(stop))
    return protocol.verdict_record(protocol.SUCCEEDED, by, exit_code=0)
