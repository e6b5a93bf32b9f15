"""A job's state: the pure fold of its folder, and the verdicts that clients give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlflow_batchai.agent import outcome, protocol, records
from mlflow_batchai.agent.protocol import Record


@dataclass(frozen=True)
class Snapshot:
    """Content of the job folder that decides the state of one attempt.

    Attributes:
        announces: node -> announce.json.
        exits: node -> exit.json.
        requests: what was asked of this attempt.
    """

    node_count: int
    announces: Mapping[int, Record] = field(default_factory=dict)
    exits: Mapping[int, Record] = field(default_factory=dict)
    requests: Sequence[Record] = ()
    verdict: Record | None = None

    @property
    def is_taken(self) -> bool:
        """Whether every node of the job is taken: no rank runs before."""
        return len(self.announces) >= self.node_count


@dataclass(frozen=True)
class JobState:
    """A job's state in Batch AI's words (reference: its REST API 2018-05-01, ``executionState`` and ``executionInfo``).

    Attributes:
        execution_state: queued, running, terminating, succeeded or failed.
        exit_code: the job's; None while it runs, and for one that was terminated or lost a node.
        reason: one sentence, and the last lines of the rank that failed.
        terminated: whether a person ended it.
        end_time: milliseconds since the epoch, None while it runs.
        start_time: when the last of its nodes was taken, likewise; None before.
        next_attempt: the attempt that a queued job goes on with, if the one that was looked at is over.
        retries_left: how many retries that one has, if the job goes on because this one has failed; None: it made room.
    """

    execution_state: str
    exit_code: int | None = None
    errors: tuple[Mapping[str, Any], ...] = ()
    reason: str = ""
    terminated: bool = False
    end_time: int | None = None
    start_time: int | None = None
    next_attempt: int | None = None
    retries_left: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the job's verdict has been given; one that puts it back in the queue is its attempt's only."""
        return self.execution_state in protocol.ENDED_STATES

    @property
    def run_status(self) -> str:
        """The MLflow run status that this state is."""
        if self.terminated:
            return "KILLED"
        return RUN_STATUS[self.execution_state]

    @property
    def error_code(self) -> str:
        """The first error's code, or an empty string."""
        return str(self.errors[0]["code"]) if self.errors else ""


RUN_STATUS = {
    protocol.QUEUED: "SCHEDULED",
    protocol.RUNNING: "RUNNING",
    protocol.TERMINATING: "RUNNING",
    protocol.SUCCEEDED: "FINISHED",
    protocol.FAILED: "FAILED",
}


def fold(snapshot: Snapshot) -> JobState:
    """The state that a snapshot says: verdict, then exits, then cancel request, then announcements.

    A request to put the job back in the queue changes nothing until the attempt has its verdict, and neither do the exits that
    follow from it. The order in which files were seen plays no part.
    """
    verdict, start = snapshot.verdict, _start_time(snapshot)
    if verdict is not None and verdict.get("next"):
        left = int(verdict.get("retriesLeft", 0)) if verdict.get("retry") else None
        return JobState(protocol.QUEUED, reason=verdict["reason"], next_attempt=int(verdict["next"]), retries_left=left)
    if verdict is not None:
        code, end = verdict["exitCode"], verdict["endTime"]
        return JobState(
            verdict["executionState"],
            None if code is None else int(code),
            tuple(verdict["errors"]),
            verdict["reason"],
            verdict["terminated"],
            None if end is None else int(end),
            _start_time(snapshot, end),
        )
    cancelled = any(request["kind"] == protocol.CANCEL for request in snapshot.requests)
    ending = any(record.get("failure") or record.get("stopped") for record in snapshot.exits.values())
    if ending and (cancelled or not snapshot.requests):
        return JobState(protocol.TERMINATING, start_time=start)
    if snapshot.exits:
        return JobState(protocol.RUNNING, start_time=start)
    if cancelled:
        return JobState(protocol.TERMINATING, start_time=start)
    if snapshot.is_taken:
        return JobState(protocol.RUNNING, start_time=start)
    return JobState(protocol.QUEUED)


def _start_time(snapshot: Snapshot, end: float | None = None) -> int | None:
    """When the last node was taken. A node whose clock is so fast that this lies behind the ``end`` plays no part."""
    if not snapshot.is_taken:
        return None
    found = [record["time"] for record in snapshot.announces.values() if records.has(record, {"time": records.is_number})]
    times = [int(time) for time in found if end is None or time <= end]
    return max(times) if times else int(end) if found and end is not None else None


def verdict_of_exits(snapshot: Snapshot, by: str) -> Record | None:
    """The verdict that node 0 has given, or would have, as far as the exits of all nodes tell; None: they don't."""
    exits = snapshot.exits.values()
    if len(exits) < snapshot.node_count:
        return None
    cause = outcome.first_cause([outcome.Failure.from_record(record["failure"]) for record in exits if record["failure"]])
    if cause is None and any(record["stopped"] for record in exits):
        return None
    return {**outcome.verdict(cause, None), "by": by}


def failed_verdict(code: str, sentence: str, by: str, terminated: bool = False) -> Record:
    """A verdict that a client gives when no agent can."""
    error = protocol.error_record(code, [("message", sentence)])
    return protocol.verdict_record(protocol.FAILED, by, errors=[error], reason=sentence, terminated=terminated)
