"""A job as it lies on a share."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple
from urllib.parse import unquote

from mlflow_batchai.agent import protocol, records
from mlflow_batchai.agent.attempt import overrides
from mlflow_batchai.agent.plan import Plan, PlanError, read_plan
from mlflow_batchai.agent.protocol import JobPaths, Record
from mlflow_batchai.errors import JobChangedError, JobNotFoundError, JobNotTrustedError, JobUnreadableError, ShareError
from mlflow_batchai.job import signing
from mlflow_batchai.job.signing import Signature
from mlflow_batchai.job.states import JobState, Snapshot, fold
from mlflow_batchai.storage import Share, job_file, open_share
from mlflow_batchai.storage.directory import DirectoryShare

LONGEST_PAUSE_SECONDS = 5.0
# How often an index is looked at while there is news, and while there is none.
FAST_SECONDS, IDLE_SECONDS = 1.0, 5.0
SLOWER = 1.25
# What the engines rely on, of a handle that this user has not signed.
_HANDLE: records.Shape = {
    "engine": records.is_text,
    "host": records.is_text,
    "ticket": records.is_count,
    "nodes": records.list_of(lambda node: records.has(node, {"name": records.is_text, "id": records.is_text})),
}
_JOB_ID = re.compile(r"[A-Za-z0-9]{1,64}")


class Index:
    """The index of an attempt: one folder whose listing says all that is new, where every look costs a request.

    Who writes a file of the job folder puts a marker there after it (``docs/internals.md``, "The index"). Readers look
    at a pace that follows what they see: once a second while there is news, every few seconds while there is none.
    """

    def __init__(self, share: Share, paths: JobPaths, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._paths = paths
        self._clock = clock
        self._seen: dict[str, int] = {}
        self._pace = FAST_SECONDS
        self._next = 0.0
        # The relay and the supervisor of a job look at the same index, each from its thread.
        self._looking = threading.Lock()

    def look(self, now: bool = False) -> Mapping[str, int]:
        """Notice -> its number (0 for those that only say that something is there).

        Args:
            now: whether to look whatever the pace.

        Raises:
            ShareError: it can't be read; the next call tries again.
        """
        with self._looking:
            if now or self._clock() >= self._next:
                seen = {entry.name: entry.size for entry in self._share.list(self._paths.index)}
                # Heartbeats say only that someone lives: no reason to hurry.
                news = any(seen[name] != self._seen.get(name) for name in seen if not name.startswith("beats-"))
                self._pace = FAST_SECONDS if news else min(self._pace * SLOWER, IDLE_SECONDS)
                self._seen = seen
                self._next = self._clock() + self._pace
            return self._seen

    def count(self, name: str) -> int:
        """The number of a marker as of the last look, 0 if it wasn't there."""
        return self._seen.get(name, 0)

    def put(self, name: str) -> None:
        """Put up a marker that something is there."""
        self._share.claim(self._paths.marker(name))


class Origin(NamedTuple):
    """A job's plan, the record it was read from, without the signature, and what the signature says."""

    plan: Plan
    record: Record
    signature: Signature


class Job:
    """One attempt of a job on a share: everything that clients read of it and write to it.

    Args:
        attempt: its number, from 1; None: the job's current one.
        origin: the plan, if it was read or written by us already.

    Attributes:
        plan: as it holds for this attempt (``agent.attempt.overrides``), once what that has of its own was seen.
        signature: what the plan's says: ``OWN``, or ``OTHER`` for a job of another key.
        index: what says what is new, where asking for every file by name would cost too many requests; else None.

    Raises:
        JobNotFoundError: there is no plan in that folder.
        JobUnreadableError: the plan is damaged, or of a version that can't be read here.
        JobChangedError: the plan has this user's signature, and was changed since.
    """

    def __init__(self, share: Share, folder: str, attempt: int | None = None, origin: Origin | None = None) -> None:
        self.share = share.keeping(folder)
        self.folder = folder
        self._torn = records.TornFiles()
        self._origin = origin or self._read_plan()
        self.signature = self._origin.signature
        self.paths = JobPaths(folder, attempt or self.newest())
        self._own: Record | None = None
        self.plan = overrides.plan_of(self._origin.plan, self.attempt, None)
        if origin is None:
            self._look_for_terms()
        self.index = Index(share, self.paths) if self.plan.board else None
        self._announces: dict[int, Record] = {}
        self._exits: dict[int, Record] = {}
        self._requests: dict[str, Record] = {}

    def glimpse(self) -> tuple[int, ...] | None:
        """Times of folders that change when the attempt gets a node, is asked to end, and ends; None: asking costs requests."""
        if not isinstance(self.share, DirectoryShare):
            return None
        # For every waiting job every few seconds, with names of our own: ``Share.local``'s checks would cost most of it.
        folders = (self.paths.events.rpartition("/")[0], self.paths.nodes, self.paths.requests)
        attempt, *later = (self.share.root / folder for folder in folders)
        try:
            # The first node that is taken, and the first request, make the later ones.
            return (attempt.stat().st_mtime_ns, *(folder.stat().st_mtime_ns if folder.exists() else 0 for folder in later))
        except OSError:
            return None

    @property
    def name(self) -> str:
        """The job's name."""
        return self.plan.name

    @property
    def node_count(self) -> int:
        """Nodes of the job."""
        return self.plan.node_count

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self.paths.attempt

    @property
    def hosts(self) -> list[str]:
        """Machines of the nodes that were taken, as far as was seen by now."""
        return [str(record["host"]) for _, record in sorted(self._announces.items())]

    def newest(self) -> int:
        """The number of the job's current attempt: the last one that was begun, or that its verdict says is to follow."""
        begun = {entry.name for entry in self.share.list(JobPaths(self.folder).attempts)}
        last = 1
        # None begins before the one before has its verdict.
        while (verdict := self._verdict(last)) is not None and str(last + 1) in begun:
            last += 1
        return int((verdict or {}).get("next") or last)

    def at(self, attempt: int) -> Job:
        """Another attempt of the same job; nothing is read."""
        return self if attempt == self.attempt else Job(self.share, self.folder, attempt, self._origin)

    def check_there(self) -> None:
        """Raise ShareError unless the job's folder lies there: an empty mount point has nothing, and says nothing."""
        if job_file(self.share, JobPaths(self.folder).plan) is None:
            raise ShareError(f"the folder of job {self.name} is not on {self.share.url} any more; is the share mounted there?")

    def afresh(self) -> Job:
        """The same, with a memory of its own of what it has seen: for another thread."""
        return Job(self.share, self.folder, self.attempt, self._origin)

    def begin(self, attempt: int, own: Record) -> Job | None:
        """Begin an attempt; None if somebody else has, or has given it up meanwhile.

        Args:
            own: what the attempt has of its own (``overrides.record``).
        """
        begun = self.at(attempt)
        if not self.share.claim(begun.paths.begun) or begun._verdict() is not None:
            return None
        self.share.write(begun.paths.overrides, protocol.encode([signing.sign(begun.paths.overrides, own)]))
        begun._look_for_terms()
        return begun

    def is_begun(self) -> bool:
        """Whether somebody has begun this attempt."""
        folder, _, name = self.paths.begun.rpartition("/")
        return any(entry.name == name for entry in self.share.list(folder))

    def overrides(self) -> Record:
        """The overrides of this attempt (``attempt.json``); empty while the file is absent, and for the first."""
        self._look_for_terms()
        return dict(self._own or {})

    def _look_for_terms(self) -> None:
        # Written before anything of the attempt is started, so whoever sees something of it sees this.
        if self._own is None and self.attempt > 1:
            own = self._directing(self.paths.overrides, f"record of attempt {self.attempt}")
            if own is not None and overrides.is_record(own):
                self._own = own
                self.plan = overrides.plan_of(self._origin.plan, self.attempt, own)

    def place(self, address: str, path: str) -> tuple[Share, str]:
        """(the share, the path on it) that a path on a volume of the plan is here.

        What lies on the control share is reached from the root of that one, which may lie elsewhere on this machine: a volume's
        folder is made by nodes, and may be a link.

        Args:
            address: the volume's, as its submitter had it.

        Raises:
            JobNotTrustedError: it is another share, and the plan that says so may be anybody's.
            ShareError: there is no such share here.
        """
        control = str(self._origin.plan.volumes[0].share)
        if address == control:
            return self.share, path
        if address.startswith(control + "/"):
            inside = unquote(address[len(control) + 1 :], errors="surrogateescape")
            return self.share, f"{inside}/{path}"
        self.check_trusted()
        return open_share(address), path

    def _changed(self, what: str) -> JobChangedError:
        # The job's name as its folder has it: of a plan that was changed nothing is believed.
        name = self.folder.rpartition("/")[0].rpartition("/")[2] or self.folder
        return JobChangedError(changed_sentence(what, name))

    def _read_plan(self) -> Origin:
        path = JobPaths(self.folder).plan
        found = self._closed(path)
        record, signature = signing.examine(path, found or {})
        if signature is Signature.WRONG:
            raise self._changed("plan")
        try:
            return Origin(read_plan(record), record, signature)
        except PlanError as error:
            # The plan comes before any attempt is begun, and goes only with all of the folder.
            there = {entry.name for entry in self.share.list(f"{self.folder}/batchai")}
            if "attempts" in there and "removing" not in there and record.get("protocol") in (None, protocol.PROTOCOL_VERSION):
                raise self._changed("plan") from None
            place = f"at {self.folder} on {self.share.url}"
            if found is None:
                raise JobNotFoundError(f"there is no job {place}") from None
            raise JobUnreadableError(f"the plan {place} can't be read: {error}") from None

    def _directing(self, path: str, what: str) -> Record | None:
        """A record that clients obey: of a job of this user's only what he has signed."""
        found = self._closed(path)
        if found is None:
            return None
        record, signature = signing.examine(path, found)
        if signature is Signature.WRONG or (signature is Signature.OTHER and self.signature is Signature.OWN):
            raise self._changed(what)
        return record

    @property
    def is_trusted(self) -> bool:
        """Whether clients may obey the plan: this user has signed it, or has pinned it (``trust``)."""
        if self.signature is Signature.OWN:
            return True
        plan, identity = self._origin.plan, self.folder.rpartition("/")[2]
        # Processes are ended by it, and files of this machine are named after it.
        named = _JOB_ID.fullmatch(identity) is not None and plan.job == identity
        return named and signing.is_pinned(plan.run_id, self.plan_digest)

    def check_trusted(self) -> None:
        """Raise JobNotTrustedError unless clients may obey the plan."""
        if not self.is_trusted:
            raise JobNotTrustedError(
                f"job {self.name} was submitted by another user, or from a machine with another key: take that key along"
                " (batchai key export, batchai key import), or see what the job would open and decide:"
                f" batchai job attach --trust {self.name}"
            )

    @property
    def plan_digest(self) -> str:
        """The digest of the plan (``protocol.digest``), which agents check."""
        return protocol.digest(self._origin.record)

    @property
    def terms_digest(self) -> str | None:
        """The same of what this attempt has of its own; None for the first, which has nothing."""
        return protocol.digest(self._own) if self._own is not None else None

    def _closed(self, path: str) -> Record | None:
        return self._torn.record(path, job_file(self.share, path))

    def _verdict(self, attempt: int | None = None) -> Record | None:
        """The verdict of an attempt, by default of this one; one that names another than the next is none."""
        attempt = attempt or self.attempt
        path = JobPaths(self.folder, attempt).verdict_file
        record = self._closed(path)
        if record is None or not records.is_verdict(record) or record.get("next", attempt + 1) != attempt + 1:
            return None
        return record

    def signed_plan(self) -> Record:
        """The plan with its signature, as its submitter wrote it; without one if it isn't there any more."""
        return self._closed(JobPaths(self.folder).plan) or self._origin.record

    def document(self) -> Record:
        """The document as it was submitted, secrets masked; empty if it isn't there any more."""
        return self._closed(self.paths.spec) or {}

    def changes(self) -> Record:
        """How its code differs from its git commit (``plan.changes``); empty if it isn't in git."""
        return self._closed(self.paths.code) or {}

    def handle(self) -> Record | None:
        """The engine's handle (``submitted.json``), or None. Raises JobChangedError: somebody else has written it."""
        found = self._directing(self.paths.submitted, "record of the agents")
        if found is None or self.signature is Signature.OWN:
            return found
        # What carries another mark is not this job's to end, whatever its record says.
        if not records.has(found, _HANDLE):
            raise self._changed("record of the agents")
        return {**found, "mark": protocol.job_mark(self.plan.job, self.attempt)}

    def snapshot(self, leaving: Collection[int] | None = None) -> Snapshot:
        """Read the job folder. Files that never change are read once.

        Args:
            leaving: nodes whose ``exit.json`` is looked for, each in a folder of its own; None: all.
        """
        self._look_for_terms()
        if self.index is not None:
            return self._indexed(self.index, leaving)
        verdict = self._verdict()
        nodes: Collection[int] = range(self.node_count)
        if len(self._announces) < self.node_count:
            # A node's folder comes with the first file that it writes.
            there = {entry.name for entry in self.share.list(self.paths.nodes)}
            nodes = [node for node in nodes if str(node) in there]
        self._learn(self._announces, nodes, self.paths.announce, records.ANNOUNCE)
        left = [node for node in nodes if leaving is None or node in leaving]
        self._learn(self._exits, left, self.paths.exit, records.EXIT)
        return Snapshot(self.node_count, dict(self._announces), dict(self._exits), self.requests(), verdict)

    def _indexed(self, index: Index, leaving: Collection[int] | None) -> Snapshot:
        """The same, from what the index names; ``leaving`` are looked for in any case: they may have died too early for it."""
        names = index.look()
        verdict = self._verdict() if "verdict" in names else None
        nodes = range(self.node_count)
        announced = [node for node in nodes if f"announce-{node}" in names]
        self._learn(self._announces, announced, self.paths.announce, records.ANNOUNCE)
        noticed = [node for node in nodes if f"exit-{node}" in names]
        self._learn(self._exits, noticed if leaving is None else leaving, self.paths.exit, records.EXIT)
        return Snapshot(self.node_count, dict(self._announces), dict(self._exits), self.requests(), verdict)

    def _learn(
        self, known: dict[int, Record], nodes: Collection[int], path: Callable[[int], str], shape: records.Shape
    ) -> None:
        wanted = {path(node): node for node in nodes if node not in known}
        for found, data in self.share.read_many(wanted, protocol.LONGEST_RECORD) if wanted else ():
            record = self._torn.record(found, data)
            if record is not None and records.has(record, shape):
                known[wanted[found]] = record

    def state(self, ending: bool = True) -> JobState:
        """The job's state now.

        Args:
            ending: whether an agent may have failed or stopped (``EventReader.ending``): only then does an exit say more.
        """
        return fold(self.snapshot(None if ending else ()))

    def requests(self) -> list[Record]:
        """Requests for this attempt."""
        if self.index is not None:
            prefix = "request-"
            names = [f"{name[len(prefix) :]}.json" for name in self.index.look() if name.startswith(prefix)]
        else:
            names = [entry.name for entry in self.share.list(self.paths.requests)]
        for name in names:
            if name not in self._requests:
                record = self._closed(f"{self.paths.requests}/{name}")
                if record is not None and records.has(record, records.REQUEST):
                    self._requests[name] = record
        return [record for _, record in sorted(self._requests.items()) if record.get("attempt", 1) == self.attempt]

    def request_cancel(self, who: str, why: str) -> None:
        """Ask for the job's end; agents see it within a second, those that look seldom within 16."""
        self._request(protocol.CANCEL, who, why)
        # Asked first, then looked: who begins the next attempt does it the other way round, so one of us sees the other.
        if (newest := self.newest()) != self.attempt:
            self.at(newest).request_cancel(who, why)

    def request_requeue(self, who: str, why: str) -> None:
        """Ask for the end of this attempt; whoever asks begins the next one once this has its verdict."""
        self._request(protocol.REQUEUE, who, why)

    def _request(self, kind: str, who: str, why: str) -> None:
        record = protocol.request_record(kind, self.attempt, who, why)
        identity = uuid.uuid4().hex
        self.share.write(self.paths.request(identity), protocol.encode([record]))
        self._mark(f"request-{identity}")

    def claim_verdict(self, verdict: Record) -> bool:
        """Give the attempt its one verdict; False if it has one, or another is just being given."""
        if not self.share.claim(self.paths.verdict):
            if self.index is not None and self._verdict() is not None:
                self._mark("verdict")  # its writer may have died before it could
            return False
        if self._verdict() is not None:
            return False  # we were frozen since the claim, and given up: someone else has finished it
        self._write_verdict(verdict)
        return True

    def _write_verdict(self, verdict: Record) -> None:
        self.share.write(self.paths.verdict_file, protocol.encode([verdict]))
        self._mark("verdict")

    def _mark(self, name: str) -> None:
        """Set a marker in the index for what we have written."""
        if self.index is not None:
            self.index.put(name)
            self.index.look(now=True)

    def finish_claim(self, verdict: Record) -> None:
        """Write the verdict of a claimer that is certainly dead, if its file isn't there, or has been torn for a while."""
        if self._verdict() is None:
            torn = self._torn.seconds(self.paths.verdict_file)
            if torn is None or torn >= records.SETTLE_SECONDS:
                self._write_verdict(verdict)


def changed_sentence(what: str, name: str) -> str:
    """Sentence on a job of which a record was changed on the share."""
    return (
        f"the {what} of job {name} was changed on the share; nothing was read from it; what still runs of the job is ended by:"
        f" batchai job terminate {name}"
    )


def pause_after(took: float, least: float) -> float:
    """Seconds to wait after a round of looking at a job that took ``took``: a slow share has as long to itself, up to 5 s."""
    return max(least, min(took, LONGEST_PAUSE_SECONDS))
