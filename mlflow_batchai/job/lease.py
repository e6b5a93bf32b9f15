"""The lease: the right to write a job's MLflow run, numbered in the job folder, held by one process at a time.

The next one, on any machine, takes the next number when the holder is certainly gone (it was a process of this machine) or its
counter stands still by the reader's own clock, and the holder stops when it sees that. The cursor of the relay lies in the same
file: whoever comes next goes on from there. The run has one lease for all attempts of its job; its numbers only rise.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from typing import NamedTuple

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.protocol import Record, TornFileError
from mlflow_batchai.agent.records import Shape, has, is_count, is_text, list_of
from mlflow_batchai.errors import BatchAIError, JobError
from mlflow_batchai.job import signing
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.signing import Signature
from mlflow_batchai.storage import job_file

# A holder on another machine is known by its heartbeats only, and counts as dead when it has sent none for the grace time.
HEARTBEAT_SECONDS, GRACE_SECONDS = 20.0, 70.0
# Between two looks at a lease; the second where each costs requests.
LOOK_SECONDS, INDEX_LOOK_SECONDS = 0.5, 5.0
# So many folders behind the last lease that counts are looked into: none but forged ones are left without a cursor for long.
MOST_FORGED = 100
# A cursor with another shape is none: its holder hasn't said a word.
_CURSOR: Shape = {
    "counter": is_count,
    "attempt": is_count,
    "finished": lambda value: isinstance(value, bool),
    "holder": lambda value: isinstance(value, dict) and all(map(is_count, (value.get("pid", 1), value.get("started", 1)))),
}
_SENTENCES = ("notes", "leftOut", "onlyThere", "missing")


class LeaseLostError(JobError):
    """Another relay has taken over; this one must write nothing more."""


class LeaseState(Enum):
    """State of a lease, as far as one look shows."""

    FINISHED = "finished"
    """The run is finished, or a relay is at a later attempt."""
    FREE = "free"
    """Nobody has it: never, not any more, or its holder was a process of this machine that is gone."""
    HELD = "held"
    """A process of this machine has it, which lives."""
    UNKNOWN = "unknown"
    """A process has it that can't be seen from here, or that hasn't said a word yet: only time tells whether it lives."""


class LeaseView(NamedTuple):
    """A look at a lease.

    Attributes:
        number: the newest; 0: nobody has ever had it.
        counter: its holder's; None: it hasn't said a word yet.
        holder: its ``proc.identity``; empty: not known.
        trouble: what keeps its holder from getting anything into the store, or why it has let go early; empty: nothing.
        sending: how far the outputs have come that it is sending; empty: it isn't, or they are few.
    """

    state: LeaseState
    number: int
    counter: int | None
    holder: Record
    trouble: str = ""
    sending: str = ""

    @property
    def moves(self) -> tuple[int, int | None]:
        """Values that stand still when nobody holds the lease."""
        return self.number, self.counter

    @property
    def who(self) -> str:
        """Its holder, for people."""
        return f"process {self.holder.get('pid', '?')} on {self.holder.get('host') or 'another machine'}"


class Lease:
    """The right to write the run, as a numbered directory that only one process can create.

    Args:
        job: the job, at the attempt that it is about.
        clock: seconds, for the grace time.
        sleep: waits that long.

    Attributes:
        attempt: once it is held: the attempt that is to be relayed, which may be an earlier one that isn't yet.
        memory: what the relay has to know to go on.
        trouble: what keeps us from getting anything into the store, told with the next heartbeat: one that can take over may.
        sending: how far large outputs have come, told with the next heartbeat.
    """

    def __init__(
        self, job: Job, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._job = job
        self._clock = clock
        self._sleep = sleep
        self._checked: float | None = None
        self._saved: float | None = None
        self.attempt = job.attempt
        self.number = 0
        self._counter = 0
        self._finished = False
        self._released = False
        self._writing = threading.RLock()
        self.memory: Record = {}
        self.trouble = ""
        self.sending = ""

    def _taken(self) -> int:
        """The last number that is taken: a name far behind the others is nobody's."""
        taken = {entry.name for entry in self._job.share.list(self._job.paths.relay)}
        return next(number for number in itertools.count() if str(number + 1) not in taken)

    def _newest(self, least: int = 0) -> tuple[int, Record, int]:
        """(number and cursor of the lease that counts, the last number that is taken); ``least`` and no cursor if none after
        that one counts.

        Of a job of this user's that is the last one with a cursor that he has signed: others may make folders there, too.
        """
        taken = self._taken()
        if self._job.signature is not Signature.OWN:
            return taken, self._cursor(taken) or {}, taken
        for number in range(taken, max(least, taken - MOST_FORGED), -1):
            if (cursor := self._cursor(number)) is not None:
                return number, cursor, taken
        return least, {}, taken

    def _cursor(self, number: int) -> Record | None:
        path = self._job.paths.cursor(number)
        try:
            cursor, signature = signing.examine(path, protocol.decode_one(job_file(self._job.share, path) or b""))
        except TornFileError:
            return None
        known = {key: check for key, check in _CURSOR.items() if key in cursor}
        if not has(cursor, known) or (signature is not Signature.OWN and self._job.signature is Signature.OWN):
            return None
        if signature is not Signature.OWN and "memory" in cursor:
            memory = cursor["memory"] if isinstance(cursor["memory"], dict) else {}
            # Another user may have written anything there: all but the sentences is relayed again, and MLflow drops it.
            sentences = {key: memory[key] for key in _SENTENCES if list_of(is_text)(memory.get(key))}
            cursor["memory"] = {**sentences, "attempt": cursor.get("attempt", 1)}
        return cursor

    def _over(self, cursor: Record) -> bool:
        """Whether a cursor says that the job's attempt is in the run."""
        attempt = int(cursor.get("attempt", 1))
        return attempt > self._job.attempt or (attempt == self._job.attempt and bool(cursor.get("finished")))

    def finished(self) -> bool:
        """Whether a relay has finished the run, or gone on to a later attempt."""
        newest, cursor, _ = self._newest()
        return bool(newest) and self._over(cursor)

    def left_out(self) -> list[str]:
        """Sentences on what the share has the only copy of (``relay.Relay``): logs and outputs that could not be sent to the
        run, and those that were not to be sent and may still be wanted; empty if there are none."""
        return [*self._sentences("leftOut"), *self._sentences("onlyThere")]

    def missing(self) -> list[str]:
        """Sentences on what ranks have counted and nobody has read (``completeness``), once the run is finished."""
        return self._sentences("missing")

    def _sentences(self, key: str) -> list[str]:
        memory = self._newest()[1].get("memory") or {}
        return [str(sentence) for sentence in memory.get(key, [])]

    def view(self) -> LeaseView:
        """Look once at the lease: its holder, as far as one look shows."""
        newest, cursor, taken = self._newest()
        over = newest > 0 and self._over(cursor)
        if taken > newest and not over:
            newest, cursor = taken, {}  # it was only just taken, or its holder never says a word
        holder = cursor.get("holder") or {}
        if over:
            hold = LeaseState.FINISHED
        elif newest == 0 or _is_let_go(cursor) or proc.is_certainly_gone(holder):
            hold = LeaseState.FREE
        else:
            hold = LeaseState.HELD if proc.is_certainly_alive(holder) else LeaseState.UNKNOWN
        # One that died in the midst of its trouble says nothing any more.
        told = cursor.get("trouble") if hold is not LeaseState.FREE or cursor.get("released") else None
        return LeaseView(hold, newest, cursor.get("counter"), holder, str(told or ""), str(cursor.get("sending") or ""))

    def acquire(self, stop: Callable[[], bool] = lambda: False, able: Callable[[], bool] = lambda: False) -> bool:
        """Take the lease, waiting until its holder has let go or stood still for the grace time.

        Args:
            stop: whether to wait no longer.
            able: whether we can reach the store; asked once, and only if the holder says that it can't.

        Returns:
            False if the run is finished (``finished``), if its holder lives, so that nobody need wait behind it, or if ``stop``
            said so in the meantime.
        """
        watched: tuple[int, int | None] | None = None
        since = self._clock()
        better: bool | None = None
        while not stop():
            newest, cursor, taken = self._newest()
            if self._over(cursor) and cursor.get("finished"):
                return False
            if taken > newest:
                newest, cursor = taken, {}  # as one that has said no word yet
            if better is None and cursor.get("trouble") and not _is_let_go(cursor):
                better = able()
                since = self._clock()  # that may have taken minutes
                continue
            pushed = bool(better and cursor.get("trouble"))
            seen = (newest, cursor.get("counter"))
            if watched not in (None, seen) and not pushed:
                return False
            watched = seen
            stale = self._clock() - since > GRACE_SECONDS or proc.is_certainly_gone(cursor.get("holder") or {})
            # One that is finished for an earlier attempt is free.
            free = newest == 0 or stale or pushed or _is_let_go(cursor)
            if free and self._job.share.claim(self._job.paths.lease(newest + 1)):
                self.number = newest + 1
                last = self._last_cursor(newest)
                self.memory = last.get("memory") or {}
                # Its holder may have finished between our look and our claim.
                finished = bool(last.get("finished"))
                over = finished and self._over(last)
                self.attempt = int(last.get("attempt", 1)) + (finished and not over)
                self.save({}, over)
                return not over
            self._sleep(_look_seconds(self._job))
        return False

    def _last_cursor(self, newest: int) -> Record:
        """The cursor of the last holder that wrote one."""
        cursors = (self._cursor(number) for number in range(newest, max(0, newest - MOST_FORGED), -1))
        return next((cursor for cursor in cursors if cursor is not None), {})

    def check(self, exactly: bool = True) -> None:
        """Raise LeaseLostError if another has taken over.

        Args:
            exactly: False: a look of a while ago is good enough where each costs a request. What is relayed twice MLflow drops.
        """
        known = self._checked is not None and self._clock() - self._checked < HEARTBEAT_SECONDS
        if known and not exactly and self._job.index is not None:
            return
        if self._newest(self.number)[0] > self.number:
            raise LeaseLostError("another process follows this job now")
        self._checked = self._clock()

    def save(self, memory: Record, finished: bool = False) -> None:
        """Write the cursor and raise the counter."""
        with self._writing:
            self.memory = memory or self.memory
            self._finished = finished
            self._counter += 1
            record = {
                "counter": self._counter,
                "memory": self.memory,
                "attempt": self.attempt,
                "finished": finished,
                "holder": proc.identity(),
                **({"trouble": self.trouble} if self.trouble else {}),
                **({"sending": self.sending} if self.sending else {}),
                **({"released": True} if self._released else {}),
            }
            path = self._job.paths.cursor(self.number)
            self._job.share.write(path, protocol.encode([signing.sign(path, record)]))
            self._saved = self._clock()

    def is_stale(self) -> bool:
        """Whether we have taken it and could not say for the grace time that we live: it counts as free."""
        return self._saved is not None and self._clock() - self._saved > GRACE_SECONDS

    def release(self, why: str) -> None:
        """Release the lease before the end, with a reason for people: the next holder has it at once."""
        with self._writing:
            self._released, self.trouble = True, why
            self.save({})

    def reopen(self) -> None:
        """Take back that the run is finished, for one that still lacks its end: the next one goes on from what was known."""
        _, cursor, taken = self._newest()
        if cursor.get("finished") and self._over(cursor) and self._job.share.claim(self._job.paths.lease(taken + 1)):
            self.number, self.attempt = taken + 1, int(cursor.get("attempt", 1))
            self.memory = cursor.get("memory") or {}
            self.release("")

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Show for the time of the block that we live, from a thread: uploads may take longer than the grace time."""
        done = threading.Event()
        thread = threading.Thread(target=self._heartbeat, args=(done,), name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _heartbeat(self, done: threading.Event) -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            # The share may be away, or the user's home, which has his key.
            with contextlib.suppress(BatchAIError), self._writing:
                if self._finished or self._released or self._newest(self.number)[0] > self.number:
                    return
                self.save({})


def _look_seconds(job: Job) -> float:
    return LOOK_SECONDS if job.index is None else INDEX_LOOK_SECONDS


def _is_let_go(cursor: Record) -> bool:
    """Whether its holder has let go of it: at the end of an attempt, or before."""
    return bool(cursor.get("finished") or cursor.get("released"))


class LeaseMonitor:
    """Whether anybody relays a job: looks at its lease, at the pace at which a holder on another machine can be seen to live.

    One look tells nothing of such a holder (``Lease.view``): it lives if its counter moves, and is dead when that has stood
    still for the grace time, by our own clock.

    Args:
        job: the job; at another attempt it needs another monitor.
        on_their_way: pids of this machine's processes that follow the job, and may not have its lease yet: they have only
            begun, wait to see whether another lives, or can't write to the share just now.
        clock: seconds.

    Attributes:
        look_seconds: no more than one look in this time costs a request.
    """

    def __init__(
        self, job: Job, on_their_way: Callable[[], Collection[int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.job = job
        self._on_their_way = on_their_way
        self._lease = Lease(job)
        self._clock = clock
        self.look_seconds = _look_seconds(job)
        self._next = 0.0
        self._seen: LeaseView | None = None
        self._moves: tuple[int, int | None] | None = None
        self._lives = False
        self._since = 0.0

    def look(self) -> LeaseView:
        """Look at the lease: ``Lease.view``, but HELD or FREE in place of UNKNOWN in time, and HELD if a follower starts.

        Raises:
            ShareError: the share can't be read now.
        """
        now = self._clock()
        if self._seen is None or now >= self._next:
            view = self._lease.view()
            if self._seen is None or view.moves != self._moves:
                self._moves, self._lives, self._since = view.moves, self._seen is not None, now
            self._seen, self._next = self._judged(view, now), now + self.look_seconds
        return self._seen

    def _judged(self, view: LeaseView, now: float) -> LeaseView:
        if view.state is LeaseState.FINISHED:
            return view
        lives = view.state is LeaseState.HELD or (view.state is LeaseState.UNKNOWN and self._lives)
        # A stopped or hung process is alive but makes no progress: its lease counts as free.
        still = view.state is not LeaseState.FREE and now - self._since > GRACE_SECONDS
        if lives and not still and not view.trouble:
            return view._replace(state=LeaseState.HELD)
        if others := set(self._on_their_way()) - {view.holder.get("pid") if view.state is LeaseState.HELD else None}:
            return view._replace(state=LeaseState.HELD, holder={"pid": min(others), "host": socket.gethostname()}, trouble="")
        if still:
            return view._replace(state=LeaseState.FREE)
        return view._replace(state=LeaseState.HELD) if lives else view
