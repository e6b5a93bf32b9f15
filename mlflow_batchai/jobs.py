"""A job as it lies on a share, and the pure fold from what lies there to the job's state."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlflow_batchai.errors import JobNotFoundError, ShareNotFoundError
from mlflow_batchai.node import protocol
from mlflow_batchai.node.protocol import JobPaths, Record, TornFileError
from mlflow_batchai.shares import Share, open_share

LONGEST_PAUSE_SECONDS = 5.0


@dataclass(frozen=True)
class Snapshot:
    """What the job folder holds of one attempt, as far as its state goes.

    Attributes:
        node_count: nodes of the job.
        announces: node -> announce.json.
        exits: node -> exit.json.
        requests: cancel requests.
        verdict: the verdict, or None.
    """

    node_count: int
    announces: Mapping[int, Record] = field(default_factory=dict)
    exits: Mapping[int, Record] = field(default_factory=dict)
    requests: Sequence[Record] = ()
    verdict: Record | None = None


@dataclass(frozen=True)
class JobState:
    """A job's state in Batch AI's words (reference: its REST API 2018-05-01, ``executionState`` and ``executionInfo``).

    Attributes:
        execution_state: queued, running, terminating, succeeded or failed.
        exit_code: the job's; None while it runs, and for one that was terminated or lost a node.
        errors: Batch AI's errors: code, message, details.
        reason: one sentence, and the last lines of the rank that failed.
        terminated: whether a person ended it.
        end_time: milliseconds since the epoch, None while it runs.
    """

    execution_state: str
    exit_code: int | None = None
    errors: tuple[Mapping[str, Any], ...] = ()
    reason: str = ""
    terminated: bool = False
    end_time: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the verdict has been given."""
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

    The order in which files were seen plays no part.
    """
    verdict = snapshot.verdict
    if verdict is not None:
        return JobState(
            verdict["executionState"],
            verdict["exitCode"],
            tuple(verdict["errors"]),
            verdict["reason"],
            bool(verdict["terminated"]),
            verdict["endTime"],
        )
    if any(record.get("failure") or record.get("stopped") for record in snapshot.exits.values()):
        return JobState(protocol.TERMINATING)
    if snapshot.exits:
        return JobState(protocol.RUNNING)
    if snapshot.requests:
        return JobState(protocol.TERMINATING)
    if len(snapshot.announces) >= snapshot.node_count:
        return JobState(protocol.RUNNING)
    return JobState(protocol.QUEUED)


class Job:
    """One job on a share: everything that clients read of it and write to it.

    Args:
        share: the control share.
        folder: the job folder on it.

    Raises:
        JobNotFoundError: there is no plan in that folder.
    """

    def __init__(self, share: Share, folder: str, attempt: int = 1) -> None:
        self.share = share
        self.folder = folder
        self.paths = JobPaths(folder, attempt)
        plan = self._closed(self.paths.plan)
        if plan is None:
            raise JobNotFoundError(f"there is no job at {folder} on {share.url}")
        self.plan: Record = plan
        self._announces: dict[int, Record] = {}
        self._exits: dict[int, Record] = {}
        self._requests: dict[str, Record] = {}

    @property
    def name(self) -> str:
        """The job's name."""
        return str(self.plan["name"])

    @property
    def node_count(self) -> int:
        """Nodes of the job."""
        return int(self.plan["nodeCount"])

    def share_at(self, address: str) -> Share:
        """A share that the plan names by its submitter's address; the control share may lie elsewhere on this machine."""
        control = str(self.plan["volumes"][0]["share"])
        if address == control:
            return self.share
        if address.startswith(control + "/"):
            return open_share(self.share.url + address[len(control) :])
        return open_share(address)

    def _closed(self, path: str) -> Record | None:
        try:
            return protocol.decode_one(self.share.read(path))
        except (ShareNotFoundError, TornFileError):
            return None

    def handle(self) -> Record | None:
        """The engine's handle (``submitted.json``), or None."""
        return self._closed(self.paths.submitted)

    def snapshot(self, leaving: Collection[int] | None = None) -> Snapshot:
        """What lies there now. Files that never change are read once.

        Args:
            leaving: nodes whose ``exit.json`` is looked for, each in a folder of its own; None: all.
        """
        verdict = self._closed(self.paths.verdict_file)
        nodes: Collection[int] = range(self.node_count)
        if len(self._announces) < self.node_count:
            # A node's folder comes with the first file that it writes.
            there = {entry.name for entry in self.share.list(self.paths.nodes)}
            nodes = [node for node in nodes if str(node) in there]
        self._learn(self._announces, nodes, self.paths.announce)
        self._learn(self._exits, [node for node in nodes if leaving is None or node in leaving], self.paths.exit)
        return Snapshot(self.node_count, dict(self._announces), dict(self._exits), self.requests(), verdict)

    def _learn(self, known: dict[int, Record], nodes: Collection[int], path: Callable[[int], str]) -> None:
        wanted = {path(node): node for node in nodes if node not in known}
        for found, data in self.share.read_many(wanted):
            with contextlib.suppress(TornFileError):
                known[wanted[found]] = protocol.decode_one(data)

    def state(self, ending: bool = True) -> JobState:
        """The job's state now.

        Args:
            ending: whether an agent may have failed or stopped (``EventReader.ending``): only then does an exit say more.
        """
        return fold(self.snapshot(None if ending else ()))

    def requests(self) -> list[Record]:
        """Cancel requests."""
        for entry in self.share.list(self.paths.requests):
            if entry.name not in self._requests and (record := self._closed(f"{self.paths.requests}/{entry.name}")) is not None:
                self._requests[entry.name] = record
        return [record for _, record in sorted(self._requests.items())]

    def request_cancel(self, who: str, why: str) -> None:
        """Ask for the job's end; agents see it within a second."""
        record = {"kind": "cancel", "who": who, "why": why, "time": protocol.now_ms()}
        self.share.write(self.paths.request(uuid.uuid4().hex), protocol.encode([record]))

    def claim_verdict(self, verdict: Record) -> bool:
        """Give the attempt its one verdict; False if it has one, or another is just being given."""
        if not self.share.claim(self.paths.verdict):
            return False
        if self._closed(self.paths.verdict_file) is not None:
            return False  # we were frozen since the claim, and given up: someone else has finished it
        self.share.write(self.paths.verdict_file, protocol.encode([verdict]))
        return True

    def finish_claim(self, verdict: Record) -> None:
        """Write the verdict of a claimer that is certainly dead between its claim and its file."""
        if self._closed(self.paths.verdict_file) is None:
            self.share.write(self.paths.verdict_file, protocol.encode([verdict]))


def failed_verdict(code: str, sentence: str, by: str, terminated: bool = False) -> Record:
    """A verdict that a client gives when no agent can."""
    error = protocol.error_record(code, [("message", sentence)])
    return protocol.verdict_record(protocol.FAILED, by, errors=[error], reason=sentence, terminated=terminated)


def pause_after(took: float, least: float) -> float:
    """Seconds to wait after a round of looking at a job that took ``took``: a slow share has as long to itself, up to 5 s."""
    return max(least, min(took, LONGEST_PAUSE_SECONDS))


Cursor = dict[str, int]
ENDING = ("failed", "stop")


class EventReader:
    """Reads an attempt's segments, each writer's in order, each once.

    Args:
        job: the job.
        cursor: writer -> next sequence; kept up to date.
        ending: what it was when the cursor was there.

    Attributes:
        cursor: with ``ending``, enough to go on from in another process.
        ending: whether an agent has said that it failed or stops, as each does before it writes so into its ``exit.json``.
    """

    def __init__(self, job: Job, cursor: Cursor | None = None, ending: bool = False) -> None:
        self._share = job.share
        self._paths = job.paths
        self._writers = [protocol.agent_writer(node) for node in range(job.node_count)]
        self.cursor: Cursor = dict(cursor or {})
        self.ending = ending

    def read(self) -> Iterator[tuple[str, int, list[Record]]]:
        """(writer, sequence, records) of each segment that was closed since the last call, of all writers in turn.

        The cursor moves on when the consumer takes the next one, so a segment that it fails on comes again.
        """
        # Each writer's next file is asked for by name: listing folders of a thousand segments costs a hundred times as much.
        writers = self._writers
        while writers:
            wanted = {self._paths.segment(writer, self.cursor.get(writer, 0)): writer for writer in writers}
            writers = []
            for path, data in self._share.read_many(wanted):
                try:
                    records = protocol.decode(data)
                except TornFileError:
                    continue
                writer = wanted[path]
                sequence = self.cursor.get(writer, 0)
                self.ending = self.ending or any(record.get("k") in ENDING for record in records)
                yield writer, sequence, records
                self.cursor[writer] = sequence + 1
                writers.append(writer)
