"""The job folder: the path of each file, the form of records, and the constants of both sides.

This module is the contract between agents (on nodes) and clients (where people are). Both import it; it imports nothing of
ours. The files, their single writers and their precedence are described in ``docs/architecture.md``.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Iterable
from typing import Any

Record = dict[str, Any]

# 2: a request says which attempt it is for, and may put the job back in the queue instead of ending it.
PROTOCOL_VERSION = 3
SEGMENTS_PER_FOLDER = 1000
# The most bytes that a file of the job folder may have (``longest``): what is longer counts as damaged, and is not read. A line
# is one record of a segment. A plan names each file of the project in about 150 bytes.
LONGEST_REQUEST = 64 << 10
LONGEST_RECORD = LONGEST_LINE = 1 << 20
LONGEST_SEGMENT, MOST_LINES = 8 << 20, 1 << 16
LONGEST_DOCUMENT = 32 << 20
DOCUMENTS = frozenset(["plan.json", "spec.json", "code.json", "cursor.json", "sent.json"])

# Execution states of a job, as Batch AI named them.
QUEUED = "queued"
RUNNING = "running"
TERMINATING = "terminating"
SUCCEEDED = "succeeded"
FAILED = "failed"
ENDED_STATES = (SUCCEEDED, FAILED)

# What a request asks for: the job's end, or only its attempt's, after which it waits in the queue again.
CANCEL = "cancel"
REQUEUE = "requeue"

# The phase of an attempt whose ranks have ended well, while node 0 has a process of its own try the job's model.
CHECKING = "checking the model"

# Error codes. The first four are Batch AI's (recorded answers of the service), and so are AZFMountError, BFSMountError and
# FailedStartingContainer (its users' reports); the others are ours.
JOB_FAILED = "JobFailed"
JOB_PREPARATION_FAILED = "JobPreparationFailed"
JOB_TERMINATED = "JobTerminated"  # terminated while queued
JOB_TERMINATE = "JobTerminate"  # terminated while running (sic)
NODE_LOST = "NodeLost"
SHARE_FAILED = "ShareFailed"
NODE_SETUP_FAILED = "NodeSetupFailed"
SETUP_TASK_FAILED = "SetupTaskFailed"
NETWORK_FAILED = "NetworkFailed"
ENVIRONMENT_FAILED = "EnvironmentFailed"
RENDEZVOUS_FAILED = "RendezvousFailed"
AZURE_FILES_MOUNT = "AZFMountError"
AZURE_BLOB_MOUNT = "BFSMountError"
NFS_MOUNT = "NFSMountError"
UNMANAGED_MOUNT = "UnmanagedMountError"
CONTAINER_FAILED = "FailedStartingContainer"
JOB_TIMEOUT = "JobTimeout"

MESSAGES = {
    JOB_FAILED: "Job failed with non-zero exit code",
    JOB_PREPARATION_FAILED: "Job preparation task failed with non-zero exit code",
    JOB_TERMINATED: "The specified job has been terminated by the user",
    JOB_TERMINATE: "The specified job has been terminated by the user",
    NODE_LOST: "A node of the job was lost",
    SHARE_FAILED: "The control share could not be used any more",
    NODE_SETUP_FAILED: "A node could not be made ready for the job",
    SETUP_TASK_FAILED: "The cluster's setup task failed on a node of the job",
    NETWORK_FAILED: "The nodes of the job can't reach each other",
    ENVIRONMENT_FAILED: "The training environment could not be built",
    RENDEZVOUS_FAILED: "Horovod's rendezvous server could not be started",
    AZURE_FILES_MOUNT: "An Azure file share could not be mounted",
    AZURE_BLOB_MOUNT: "An Azure blob container could not be mounted",
    NFS_MOUNT: "A file server could not be mounted",
    UNMANAGED_MOUNT: "An unmanaged file system could not be mounted",
    CONTAINER_FAILED: "The job's container could not be started",
    JOB_TIMEOUT: "The job ran longer than constraints.maxWallClockTime",
}

# Every process of a job carries this variable; ending a job sweeps by it.
MARK_VARIABLE = "BATCHAI_JOB"
NODE_VARIABLE = "BATCHAI_NODE"
# The same for an agent, which is no process of its job to those that it ends.
AGENT_VARIABLE = "BATCHAI_AGENT"

# The key of a record under which its signature stands; the rest of the record is what was signed.
MAC = "mac"


class TornFileError(Exception):
    """The file isn't closed yet (no valid terminator): to a reader it does not exist."""


def now_ms() -> int:
    """Milliseconds since the epoch, for display only: clocks of nodes differ."""
    return int(time.time() * 1000)


def error_record(code: str, details: Iterable[tuple[str, str]] = ()) -> Record:
    """Batch AI's error: one of our codes, its message, details of names and values."""
    return {
        "code": code,
        "message": MESSAGES[code],
        "details": [{"name": name, "value": value} for name, value in details],
    }


def verdict_record(
    state: str,
    by: str,
    exit_code: int | None = None,
    errors: Iterable[Record] = (),
    reason: str = "",
    terminated: bool = False,
    next_attempt: int | None = None,
) -> Record:
    """The content of ``verdict.json``, given now.

    Args:
        state: one of ``ENDED_STATES``; ``QUEUED`` if the job goes on with another attempt.
        exit_code: the job's; None if it was terminated or no command ended it.
        reason: one sentence, and the last lines of what failed.
        terminated: whether a person ended the job.
    """
    record = {
        "executionState": state,
        "exitCode": exit_code,
        "errors": list(errors),
        "reason": reason,
        "terminated": terminated,
        "by": by,
        "endTime": now_ms(),
    }
    return record if next_attempt is None else dict(record, next=next_attempt)


def requeued_record(reason: str, by: str, attempt: int) -> Record:
    """The verdict on an attempt after which the job waits in the queue again."""
    return verdict_record(QUEUED, by, reason=reason, next_attempt=attempt + 1)


def terminated_record(by: str, running: bool, wish: Record) -> Record:
    """The verdict on a job, running or still queued, that a person wanted ended by a request (``who``, ``why``)."""
    who, why = wish.get("who"), wish.get("why")
    errors = [error_record(JOB_TERMINATE if running else JOB_TERMINATED)]
    reason = f"terminated{f' by {who}' if who else ''}{f': {why}' if why else ''}"
    return verdict_record(FAILED, by, errors=errors, reason=reason, terminated=True)


def request_record(kind: str, attempt: int, who: str, why: str) -> Record:
    """The content of a request: what is asked of an attempt (``CANCEL`` or ``REQUEUE``), by whom and why."""
    return {"kind": kind, "attempt": attempt, "who": who, "why": why, "time": now_ms()}


def wish(requests: Iterable[Record], attempt: int) -> Record | None:
    """The request that counts for an attempt: one for the job's end comes before one for the queue."""
    known = [request for request in requests if request.get("kind") in (CANCEL, REQUEUE)]
    asked = [request for request in known if request.get("attempt", 1) == attempt]
    return min(asked, key=lambda request: request["kind"] != CANCEL) if asked else None


def encode(records: Iterable[Record], compress: bool = False) -> bytes:
    """Records as a closed file: one JSON line each, and a terminator with their count and CRC-32.

    Args:
        compress: whether the whole is deflated, for shares where every byte is sent over a network.
    """
    lines = [json.dumps(record, separators=(",", ":"), ensure_ascii=False) for record in records]
    # Lone surrogates (bytes that are not UTF-8 in a path or an argument) must not stop a record from being written.
    body = "".join(line + "\n" for line in lines).encode("utf-8", "backslashreplace")
    end = {"end": len(lines), "crc32": f"{zlib.crc32(body):08x}"}
    data = body + json.dumps(end, separators=(",", ":")).encode("ascii") + b"\n"
    return zlib.compress(data, 1) if compress else data


def longest(path: str) -> int:
    """The most bytes that a file of the job folder may have."""
    folder, _, name = path.rpartition("/")
    if name.endswith(".jsonl"):
        return LONGEST_SEGMENT
    if folder.endswith("/requests"):
        return LONGEST_REQUEST
    return LONGEST_DOCUMENT if name in DOCUMENTS else LONGEST_RECORD


def decode(data: bytes) -> list[Record]:
    """The records of a segment.

    Raises:
        TornFileError: the terminator is missing or doesn't fit, or what stands before it are no records: the file is still
            being written, or was damaged. So was one that is too long, or has a line that is.
    """
    data = unpacked(data)
    if len(data) > LONGEST_SEGMENT or any(len(line) > LONGEST_LINE for line in lines_of(data)):
        raise TornFileError("too long")
    return _decode(data)


def lines_of(data: bytes) -> list[bytes]:
    """The lines of a segment; what follows after more than any has is the last one, since each takes memory of its own."""
    return data.split(b"\n", MOST_LINES)


def _decode(data: bytes) -> list[Record]:
    if not data.endswith(b"}\n"):
        raise TornFileError("no terminator")
    cut = data.rfind(b"\n", 0, len(data) - 1) + 1
    body, last = data[:cut], data[cut:]
    try:
        end = json.loads(last.decode("ascii"))
        count, checksum = end["end"], end["crc32"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise TornFileError("no terminator") from None
    if checksum != f"{zlib.crc32(body):08x}":
        raise TornFileError("checksum does not fit")
    try:
        records = [json.loads(line) for line in body.decode("utf-8").split("\n")[:-1]]
    except (ValueError, RecursionError):
        raise TornFileError("a line that is no JSON") from None
    if len(records) != count:
        raise TornFileError("record count does not fit")
    if not all(isinstance(record, dict) for record in records):
        raise TornFileError("a line that is no record")
    return records


def unpacked(data: bytes) -> bytes:
    """A file's content, inflated if it was deflated, as far as a segment may go and one byte more: of one that was cut its
    beginning. Of one in which something was written over nothing: it can be inflated, but to something else."""
    # Deflated data begins with an "x" (RFC 1950), JSON lines with a brace.
    if data[:1] != b"x":
        return data
    try:
        return zlib.decompressobj().decompress(data, LONGEST_SEGMENT + 1)
    except zlib.error:
        return b""


def digest(record: Record) -> str:
    """SHA-256 of a record's content, in whatever order its keys are: what tells whether it is the one that was meant."""
    plain = {key: value for key, value in record.items() if key != MAC}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def decode_one(data: bytes) -> Record:
    """The single record of a closed file such as ``exit.json``; raises TornFileError if it isn't closed, or damaged."""
    records = _decode(unpacked(data))
    if len(records) != 1:
        raise TornFileError(f"one record expected, {len(records)} found")
    return records[0]


class JobPaths:
    """All file names of one job folder, as paths relative to the share's root, with ``/``.

    Attributes:
        log_folder: where in the job folder this attempt's logs lie; those of later ones have a folder in the first one's.
        artifacts: what scripts have logged: the run's in ``run``, a logged model's in ``models/<id>``.
        code: what the job's code differs in from its git commit, if it is in git.
        reserve: a file whose room is for the attempt's last word on a share that is full.
        begun: a folder that whoever begins an attempt after the first creates.
        notified: a folder that the follower creates before it tells people of the job's end.
        overrides: what such an attempt has of its own (``attempt/overrides.py``).
    """

    def __init__(self, folder: str, attempt: int = 1) -> None:
        self.folder = folder.strip("/")
        self.attempt = attempt
        self.log_folder = "stdouterr" if attempt == 1 else f"stdouterr/attempt-{attempt}"
        self.stdouterr = self._in(self.log_folder)
        self.spec = self._in("batchai/spec.json")
        self.plan = self._in("batchai/plan.json")
        self.code = self._in("batchai/code.json")
        self.artifacts = self._in("artifacts")
        self.requests = self._in("batchai/requests")
        self.relay = self._in("batchai/relay")
        self.attempts = self._in("batchai/attempts")
        base = f"batchai/attempts/{attempt}"
        self.begun = self._in(base + "/begun")
        self.notified = self._in(base + "/notified")
        self.overrides = self._in(base + "/attempt.json")
        self.submitted = self._in(base + "/submitted.json")
        self.nodes = self._in(base + "/nodes")
        self.events = self._in(base + "/events")
        self.network = self._in(base + "/network.json")
        self.rendezvous = self._in(base + "/rendezvous.json")
        self.index = self._in(base + "/board")
        self.reserve = self._in(base + "/reserve")
        self.verdict = self._in(base + "/verdict")
        self.verdict_file = self._in(base + "/verdict/verdict.json")

    def _in(self, name: str) -> str:
        return self.folder + "/" + name

    def announce(self, node: int) -> str:
        return f"{self.nodes}/{node}/announce.json"

    def exit(self, node: int) -> str:
        return f"{self.nodes}/{node}/exit.json"

    def event_folder(self, sequence: int) -> str:
        return f"{self.events}/{sequence // SEGMENTS_PER_FOLDER:04}"

    def segment(self, writer: str, sequence: int) -> str:
        return f"{self.event_folder(sequence)}/{writer}-{sequence:08}.jsonl"

    def marker(self, name: str) -> str:
        """The file of the index which says that something else lies there: see ``docs/internals.md``, "The index"."""
        return f"{self.index}/{name}"

    def heartbeats(self, writer: str) -> str:
        """A file that gets longer as long as its writer lives and has nothing to say, where that takes no segment."""
        return self.marker(f"beats-{writer}")

    def request(self, identity: str) -> str:
        return f"{self.requests}/{identity}.json"

    def lease(self, number: int) -> str:
        return f"{self.relay}/{number}"

    def cursor(self, number: int) -> str:
        return f"{self.relay}/{number}/cursor.json"

    def sent(self, number: int) -> str:
        return f"{self.relay}/{number}/sent.json"


IDENTITIES = ".batchai/identity"
OBJECTS = ".batchai/objects"
# What says that all objects of one set lie on the share; removed with them, as it lies in the same folder.
TREES = OBJECTS + "/trees"


def object_path(sha256: str) -> str:
    return f"{OBJECTS}/{sha256[:2]}/{sha256}"


def identity_path(identity: str) -> str:
    """The folder on the share whose being there says that it is this very share, and no other folder of the same path."""
    return f"{IDENTITIES}/{identity}"


def agent_writer(node: int) -> str:
    return f"agent-{node}"


def job_mark(job: str, attempt: int | None) -> str:
    """The value of MARK_VARIABLE in every process of this attempt; None: the beginning that those of all attempts have."""
    return f"{job}/{'' if attempt is None else attempt}"


def is_marked(found: str, mark: str) -> bool:
    """Whether a value of MARK_VARIABLE is a mark, or one of the job's attempts where the mark is that of all attempts."""
    return found == mark or (mark.endswith("/") and found.startswith(mark))
