"""The agent's share thread: it does all reading from and writing to the share while ranks run.

Ranks and the agent's main thread never wait for the share. Records leave in closed segments, a moment after the first
unsent one; output is kept in memory while the share stalls, up to a bound past which the oldest log text is dropped and
counted, but never a metric. What comes in between is read into ``inbox``.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.agent.share.base import MAX_PENDING_BYTES, NotMountedError
from mlflow_batchai.agent.share.sharefiles import ShareErrors
from mlflow_batchai.agent.transport.inbox import Inbox
from mlflow_batchai.agent.transport.logfiles import EXECUTION, LogFiles, log_record

# While the share takes nothing: of more the oldest are given up.
MOST = 4096
MOST_AT_ONCE = 256

# How often it is looked whether the share still has what it took in the last minutes, and how much is kept for that: a server
# that crashes may lose what it has acknowledged (nfs(5): async), and somebody may remove a file.
CHECK_SECONDS, RECENT_SECONDS = 5.0, 120.0
MOST_KEPT, MOST_KEPT_BYTES = 2000, 8 << 20
# Of output in one segment, and in one record: as JSON each byte may be six.
MAX_SEGMENT_BYTES, MAX_LOG_BYTES = 768 << 10, protocol.LONGEST_LINE // 8
# Of reports in one segment: as objects they take twenty times as much, here and where they are read.
MAX_REPORT_BYTES = 1 << 18
SEGMENTS_A_TURN = 8
# A share that took something within this many seconds is not stalled.
HEALTHY_SECONDS = 1.0
# One that took nothing for so long, and didn't refuse it either, hangs.
HANGING_SECONDS = 5.0
# How long an agent that ends waits for log files that can't be written (their text is in the segments already).
LOG_FILE_SECONDS = 5.0
# How often what others wait for is said again.
AGAIN_SECONDS = 15.0


class Unhurried:
    """Records that nobody waits for: they leave with others, and alone only after a while. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: collections.deque[Record] = collections.deque(maxlen=MOST)
        self._since: float | None = None

    def add(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self._records.append(dict(fields, k=kind, t=protocol.now_ms()))
            if self._since is None:
                self._since = time.monotonic()

    def take(self, after: float = 0.0) -> list[Record]:
        """The oldest ones, if the oldest has waited for so many seconds; they are the caller's now."""
        with self._lock:
            if self._since is None or time.monotonic() - self._since < after:
                return []
            taken = [self._records.popleft() for _ in range(min(len(self._records), MOST_AT_ONCE))]
            if not self._records:
                self._since = None
            return taken


class Sent(NamedTuple):
    """An event file of so many bytes that the share has taken at that time (``time.monotonic``)."""

    sequence: int
    records: list[Record]
    size: int
    at: float


class Resend:
    """Event files that the share has taken, kept for a while: what it has lost is written again.

    Args:
        sizes: given a sequence, the bytes of each of the agent's event files from that one on.
    """

    def __init__(self, sizes: Callable[[int], dict[int, int]], send: Callable[[int, list[Record]], object]) -> None:
        self._sizes = sizes
        self._send = send
        self._sent: collections.deque[Sent] = collections.deque()
        self._bytes = 0
        self._checked = time.monotonic()
        self._is_over = False

    def add(self, sequence: int, records: list[Record], size: int) -> None:
        """Keep one; the oldest are given up."""
        self._sent.append(Sent(sequence, records, size, time.monotonic()))
        self._bytes += size
        while self._bytes > MOST_KEPT_BYTES or len(self._sent) > MOST_KEPT:
            self._bytes -= self._sent.popleft().size

    def check(self, last: bool) -> None:
        """Write again what is gone of the last minutes, if it is time to; of all that is kept, once, when nothing more comes.

        Raises:
            OSError: the share can't be looked at, or doesn't take it: it is looked for once more.
        """
        now = time.monotonic()
        if self._is_over or (now - self._checked < CHECK_SECONDS and not last):
            return
        kept = [sent for sent in self._sent if last or now - sent.at < RECENT_SECONDS]
        there = self._sizes(kept[0].sequence) if kept else {}
        for sent in kept:
            if there.get(sent.sequence) != sent.size:
                self._send(sent.sequence, sent.records)
        self._checked, self._is_over = now, last


class Shipper(threading.Thread):
    """Moves records and output between this agent and the share.

    Args:
        peers: nodes whose segments this agent reads (node 0: all others; others: node 0).
        before: what ``sent`` said of the shipper that this one goes on for.

    Attributes:
        sequence: number of segments written; after ``finish`` it is final.
        error: why the share can't be used now, or None.
        broken: what ended this thread before its time (a bug), or None.
    """

    def __init__(self, layout: NodeLayout, peers: list[int], before: Mapping[str, Any] | None = None) -> None:
        super().__init__(name="share", daemon=True)
        self._layout = layout
        self._writer = protocol.agent_writer(layout.node)
        self._files = LogFiles(layout)
        self.inbox = Inbox(layout, peers, self._files.join)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._records: list[Record] = []
        self._reports: collections.deque[tuple[Record, int]] = collections.deque()
        self._report_bytes = 0
        self._standing: Record | None = None
        self._said = 0.0
        self._logs: collections.deque[Record] = collections.deque()
        self._log_bytes = 0
        self._outgoing: list[Record] = []
        self._taken_logs: list[Record] = []
        self._samples = Unhurried()
        self._dropped = 0
        self._urgent = False
        self._first_unsent: float | None = None
        self.sequence = 0
        if before:
            self.sequence = before["segments"]
            self._files.totals.update(before["logs"])
        attempt = layout.attempt
        self._resend = (
            Resend(functools.partial(attempt.sizes, self._writer), functools.partial(attempt.send, self._writer))
            if attempt.tells_sizes
            else None
        )
        self._heartbeats = 0
        self._last_written = 0.0
        self._closing = self._closed = False
        self._closing_since: float | None = None
        self._abandoned = False
        self._errors = ShareErrors(layout.plan.loss_seconds / 2)
        self.error: OSError | None = None
        self.broken: Exception | None = None

    # Called by the main thread.

    def record(self, kind: str, urgent: bool = False, **fields: Any) -> None:
        """Send a record; an urgent one leaves at once."""
        with self._lock:
            self._records.append(dict(fields, k=kind, t=protocol.now_ms()))
            self._mark_unsent(urgent)

    def report(self, body: Record, size: int, rank: int | None = None) -> None:
        """Send what a rank has reported; ``size``: bytes that it was in the rank's own file."""
        with self._lock:
            self._reports.append(({"k": "report", "t": protocol.now_ms(), "r": rank, "body": body}, size))
            self._report_bytes += size
            self._mark_unsent(False)

    def sample(self, **fields: Any) -> None:
        """Send what the node's meters say, with the next segment that there is, or in place of a heartbeat."""
        self._samples.add("system", **fields)

    @property
    def crowded(self) -> bool:
        """Whether so many reports wait that more should stay where they are, on the node's disk."""
        return self._report_bytes > MAX_PENDING_BYTES // 4

    def keep_saying(self, kind: str, **fields: Any) -> None:
        """Send an urgent record now, and again from time to time instead of the one before: others wait for it, and the share
        may lose the segment that has it."""
        with self._lock:
            self._standing = dict(fields, k=kind)
        self.record(kind, urgent=True, **fields)
        self._said = time.monotonic()

    def stop_saying(self) -> None:
        with self._lock:
            self._standing = None

    def look(self) -> None:
        """Read at once what others have said."""
        self._wake.set()

    def note(self, line: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.log(None, EXECUTION, f"{stamp} {line}\n".encode("utf-8", "backslashreplace"))

    def log(self, rank: int | None, stream: str, lines: bytes) -> None:
        """Send whole lines of a rank (None: job preparation)."""
        with self._lock:
            last = self._logs[-1] if self._logs else None
            if last and last["r"] == rank and last["s"] == stream and len(last["b"]) + len(lines) <= MAX_LOG_BYTES:
                last["b"] += lines
            else:
                self._logs.append({"r": rank, "s": stream, "b": lines, "t": protocol.now_ms()})
            self._log_bytes += len(lines)
            while self._log_bytes > MAX_PENDING_BYTES:
                oldest = self._logs.popleft()
                self._log_bytes -= len(oldest["b"])
                self._dropped += oldest["b"].count(b"\n")
            self._mark_unsent(False)
            if self._log_bytes >= MAX_SEGMENT_BYTES:
                self._wake.set()

    def _mark_unsent(self, urgent: bool) -> None:
        if self._first_unsent is None:
            self._first_unsent = time.monotonic()
        if urgent:
            self._urgent = True
            self._wake.set()

    @property
    def trouble(self) -> str | None:
        """Why the job has to end since the share fails: a sentence, or None."""
        return self._errors.told()

    def abandon(self) -> None:
        """Write and read nothing more: what is left of the share's room is for the job's last word."""
        self._abandoned = True
        self._wake.set()

    @property
    def busy(self) -> bool:
        """Whether much output waits although the share accepts writes: writers of that much may wait, as for any disk."""
        healthy = self.error is None and time.monotonic() - self._last_written < HEALTHY_SECONDS
        return healthy and self._log_bytes > MAX_PENDING_BYTES // 2

    @property
    def hangs(self) -> bool:
        """Whether the share neither takes what there is to write nor refuses it; one that isn't mounted does neither."""
        silent = self.error is None and time.monotonic() - self._last_written > HANGING_SECONDS
        return self.is_alive() and (silent or isinstance(self.error, NotMountedError))

    @property
    def log_totals(self) -> dict[str, list[int]]:
        return {name: list(sizes) for name, sizes in list(self._files.totals.items())}

    def sent(self) -> dict[str, Any]:
        """What another shipper needs to go on, once this one has finished."""
        return {"segments": self.sequence, "logs": self.log_totals}

    @property
    def unsent_lines(self) -> int:
        """Number of lines in no segment; not 0 after ``finish`` if the share was given up before."""
        with self._lock:
            waiting = [*self._logs, *self._taken_logs]
            lines: int = sum(entry["b"].count(b"\n") for entry in waiting)
            return self._dropped + lines

    def finish(self, timeout: float) -> bool:
        """Send all that is left and stop; False if the share didn't take it in time, it was given up, or the thread had
        broken."""
        self._closing = True
        self._wake.set()
        self.join(timeout)
        return not self.is_alive() and self.broken is None and not self._abandoned

    def go_on(self) -> bool:
        """Take back a ``finish`` that the share gave no time; False if it has ended since."""
        with self._lock:
            self._closing, self._closing_since = False, None
            return not self._closed

    def run(self) -> None:
        try:
            self._layout.attempt.hasty()
            with contextlib.closing(self.inbox):
                self._run()
        except Exception as error:
            # A bug. The main thread sees it at its next check: without this thread it would wait for ever.
            self.broken = error

    def _run(self) -> None:
        while True:
            self._wake.wait(self._layout.attempt.tick_seconds)
            self._wake.clear()
            if self._abandoned:
                return
            with self._lock:
                if self._closing and self._closing_since is None:
                    self._closing_since = time.monotonic()
                closing_since = self._closing_since
            # Each for itself: a share that is full still tells of a cancel request; a log file that can't grow stops nothing.
            unsent = self._attempt(functools.partial(self._write, everything=closing_since is not None))
            if self._resend is not None and not unsent:
                unsent = self._attempt(functools.partial(self._resend.check, last=closing_since is not None))
            # Where the share takes nothing from us, others can't say anything either.
            unread = self._attempt(functools.partial(self.inbox.read, heeds=unsent is None))
            self._errors.saw(unsent or unread)
            unwritten = self._attempt(self._flush)
            patience = None if closing_since is None else closing_since + LOG_FILE_SECONDS - time.monotonic()
            if patience is not None and not unsent and (not unwritten or patience < 0):
                with self._lock:
                    self._closed = self._closing_since == closing_since  # else there may be more since then
                if self._closed:
                    self._files.close()
                    return
            self.error = unsent or unread or unwritten
            if self.error:
                time.sleep(self._layout.attempt.tick_seconds)

    @staticmethod
    def _attempt(step: Callable[[], None]) -> OSError | None:
        try:
            step()
        except OSError as error:
            return error
        return None

    def _take(self, everything: bool) -> tuple[list[Record], list[Record]]:
        now = time.monotonic()
        with self._lock:
            if self._standing and now - self._said > AGAIN_SECONDS:
                self._said = now
                self._records.append(dict(self._standing, t=protocol.now_ms()))
                self._mark_unsent(False)
            pause = self._layout.attempt.flush_seconds
            due = self._first_unsent is not None and now - self._first_unsent >= pause
            due = due or self._urgent or self._log_bytes >= MAX_SEGMENT_BYTES or self._report_bytes >= MAX_REPORT_BYTES
            if not (due or (everything and self._first_unsent is not None)):
                return [], []
            records, self._records = self._records, []
            size = 0
            while self._reports and size < MAX_REPORT_BYTES:
                report, length = self._reports.popleft()
                size += length
                records.append(report)
            self._report_bytes -= size
            logs: list[Record] = []
            size = 0
            while self._logs and size < MAX_SEGMENT_BYTES:
                entry = self._logs.popleft()
                size += len(entry["b"])
                logs.append(entry)
            self._log_bytes -= size
            if self._dropped:
                records.append({"k": "dropped", "lines": self._dropped, "t": protocol.now_ms()})
                self._dropped = 0
            self._urgent = False
            self._first_unsent = now - pause if self._logs or self._reports else None
        return records, logs

    def _write(self, everything: bool) -> None:
        for _ in itertools.count() if everything else range(SEGMENTS_A_TURN):
            # What was taken stays in _outgoing until the share has it: an error in between loses nothing.
            if not self._outgoing and not self._taken_logs:
                records, self._taken_logs = self._take(everything)
                self._outgoing = records + [log_record(entry) for entry in self._taken_logs]
                if self._outgoing:
                    self._outgoing += self._samples.take()
            if not self._outgoing and not self._taken_logs:
                quiet = time.monotonic() - self._last_written > self._layout.attempt.heartbeat_seconds
                if quiet or everything:
                    self._outgoing = self._samples.take(0.0 if everything else self._layout.attempt.linger_seconds)
                if not self._outgoing and not (quiet and self._send_heartbeat()):
                    return
            if self._outgoing:
                self._send(self._outgoing)
            self._outgoing, logs, self._taken_logs = [], self._taken_logs, []
            for entry in logs:
                self._files.add(entry)
            self._attempt(self._flush)
        # Ranks that write faster than the share takes it must not keep us from reading.
        self._wake.set()

    def _send_heartbeat(self) -> bool:
        """Show that we live; whether that takes a segment, which is in ``_outgoing`` then: it must come again as it was."""
        self._heartbeats += 1
        if self._layout.attempt.heartbeat(self._writer, self._heartbeats):
            self._last_written = time.monotonic()
            return False
        self._outgoing = [{"k": "beat", "n": self._heartbeats, "t": protocol.now_ms()}]
        return True

    def _send(self, records: list[Record]) -> None:
        size = self._layout.attempt.send(self._writer, self.sequence, records)
        self._last_written = time.monotonic()
        if self._resend is not None:
            self._resend.add(self.sequence, records, size)
        self.sequence += 1

    def _flush(self) -> None:
        self._files.flush(last=self._closing)
