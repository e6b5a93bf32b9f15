"""The agent's share thread: all that is read from or written to the share while ranks run.

Ranks and the agent's main thread never wait for the share. Records leave in closed segments, half a second after the first
unsent one; output is kept in memory while the share stalls, up to a bound past which the oldest log text is dropped and
counted, but never a metric. Node 0 reads its peers' segments and joins everyone's output into ``stdout.txt``.
"""

import collections
import os
import threading
import time
from typing import IO, Any, Deque, Dict, List, Optional, Tuple

from mlflow_batchai.node import protocol
from mlflow_batchai.node.layout import NodeLayout
from mlflow_batchai.node.protocol import Record
from mlflow_batchai.node.tasks import readable

TICK_SECONDS = 0.25
FLUSH_SECONDS = 0.5
BEAT_SECONDS = 5.0
MAX_PENDING_BYTES = 16 << 20
MAX_SEGMENT_BYTES = 1 << 20
EXECUTION = "execution"


class Follower:
    """Reads one writer's segments in order, each once."""

    def __init__(self, writer: str) -> None:
        self.writer = writer
        self.sequence = 0
        self.last_seen = time.monotonic()

    def read(self, layout: NodeLayout) -> List[Record]:
        """Records of the segments that have been closed since the last call."""
        found: List[Record] = []
        while True:
            path = layout.on_share(layout.paths.segment(self.writer, self.sequence))
            try:
                with open(path, "rb") as file:
                    found.extend(protocol.decode(file.read()))
            except (FileNotFoundError, protocol.TornFileError):
                return found
            self.sequence += 1
            self.last_seen = time.monotonic()


class Shipper(threading.Thread):
    """Moves records and output between this agent and the share.

    Args:
        layout: the job on this node.
        peers: nodes whose segments this agent reads (node 0: all others; others: node 0).
    """

    def __init__(self, layout: NodeLayout, peers: List[int]) -> None:
        super().__init__(name="share", daemon=True)
        self._layout = layout
        self._writer = protocol.agent_writer(layout.node)
        self._followers = {node: Follower(protocol.agent_writer(node)) for node in peers}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._records: List[Record] = []
        self._logs: Deque[Record] = collections.deque()
        self._log_bytes = 0
        self._outgoing: List[Record] = []
        self._taken_logs: List[Record] = []
        self._dropped = 0
        self._urgent = False
        self._first_unsent: Optional[float] = None
        self._sequence = 0
        self._beat = 0
        self._last_written = 0.0
        self._inbox: Deque[Tuple[int, Record]] = collections.deque()
        self._requests: Dict[str, Record] = {}
        self._files: Dict[str, IO[bytes]] = {}
        self._closing = False
        self.verdict: Optional[Record] = None
        self.error: Optional[OSError] = None

    # Called by the main thread.

    def record(self, kind: str, urgent: bool = False, **fields: Any) -> None:
        """Send a record; an urgent one leaves at once."""
        with self._lock:
            self._records.append(dict(fields, k=kind, t=protocol.now_ms()))
            self._mark_unsent(urgent)

    def note(self, line: str) -> None:
        """A line for this node's execution log."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.log(None, EXECUTION, ("%s %s\n" % (stamp, line)).encode("utf-8", "backslashreplace"))

    def log(self, rank: Optional[int], stream: str, lines: bytes) -> None:
        """Send whole lines of a rank (None: job preparation)."""
        with self._lock:
            last = self._logs[-1] if self._logs else None
            if last and last["r"] == rank and last["s"] == stream and len(last["b"]) < MAX_SEGMENT_BYTES // 4:
                last["b"] += lines
            else:
                self._logs.append({"r": rank, "s": stream, "b": lines, "t": protocol.now_ms()})
            self._log_bytes += len(lines)
            while self._log_bytes > MAX_PENDING_BYTES:
                oldest = self._logs.popleft()
                self._log_bytes -= len(oldest["b"])
                self._dropped += oldest["b"].count(b"\n")
            self._mark_unsent(False)

    def _mark_unsent(self, urgent: bool) -> None:
        if self._first_unsent is None:
            self._first_unsent = time.monotonic()
        if urgent:
            self._urgent = True
            self._wake.set()

    def received(self) -> List[Tuple[int, Record]]:
        """(node, record) that peers have sent since the last call, logs excepted."""
        with self._lock:
            found = list(self._inbox)
            self._inbox.clear()
        return found

    def requests(self) -> List[Record]:
        """Cancel requests seen so far (node 0 only)."""
        with self._lock:
            return list(self._requests.values())

    def silent_seconds(self, node: int) -> float:
        """How long a peer's last segment is ago, by our own clock."""
        return time.monotonic() - self._followers[node].last_seen

    def heard(self, node: int) -> int:
        """How many of a peer's segments were read."""
        return self._followers[node].sequence

    @property
    def sequence(self) -> int:
        """Number of segments written; after ``finish`` it is final."""
        return self._sequence

    def finish(self, timeout: float) -> bool:
        """Send all that is left and stop; False if the share didn't take it in time."""
        self._closing = True
        self._wake.set()
        self.join(timeout)
        return not self.is_alive()

    # The share thread.

    def run(self) -> None:
        while True:
            self._wake.wait(TICK_SECONDS)
            self._wake.clear()
            closing = self._closing
            try:
                self._write(closing)
                self._read()
                self.error = None
            except OSError as error:
                self.error = error
                time.sleep(TICK_SECONDS)
                continue
            if closing:
                for file in self._files.values():
                    file.close()
                return

    def _take(self, everything: bool) -> Tuple[List[Record], List[Record]]:
        now = time.monotonic()
        with self._lock:
            due = self._first_unsent is not None and now - self._first_unsent >= FLUSH_SECONDS
            if not (due or self._urgent or (everything and self._first_unsent is not None)):
                return [], []
            records, self._records = self._records, []
            logs: List[Record] = []
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
            self._first_unsent = now - FLUSH_SECONDS if self._logs else None
        return records, logs

    def _write(self, everything: bool) -> None:
        while True:
            # What was taken stays in _outgoing until the share has it: an error in between loses nothing.
            if not self._outgoing and not self._taken_logs:
                records, self._taken_logs = self._take(everything)
                self._outgoing = records + [self._log_record(entry) for entry in self._taken_logs if entry["s"] != EXECUTION]
            if not self._outgoing and not self._taken_logs:
                break
            if self._outgoing:
                self._send(self._outgoing)
            self._outgoing, logs, self._taken_logs = [], self._taken_logs, []
            for entry in logs:
                self._append_log(entry)
        if time.monotonic() - self._last_written > BEAT_SECONDS:
            self._beat += 1
            self._send([{"k": "beat", "n": self._beat, "t": protocol.now_ms()}])
        for file in self._files.values():
            file.flush()

    def _send(self, records: List[Record]) -> None:
        path = self._layout.on_share(self._layout.paths.segment(self._writer, self._sequence))
        protocol.write_closed(path, records)
        self._sequence += 1
        self._last_written = time.monotonic()

    @staticmethod
    def _log_record(entry: Record) -> Record:
        text = readable(entry["b"].decode("utf-8", "backslashreplace"))
        return {"k": "log", "t": entry["t"], "r": entry["r"], "s": entry["s"], "x": text}

    def _append_log(self, entry: Record) -> None:
        plan, node = self._layout.plan, self._layout.node
        if entry["s"] == EXECUTION:
            self._append(self._layout.log_name(EXECUTION), entry["b"])
        elif entry["r"] is None:
            self._append(self._layout.log_name("std%s-job_prep" % entry["s"]), entry["b"])
        else:
            if plan["ranks"] > 1 or node != 0:
                self._append("std%s-%d.txt" % (entry["s"], entry["r"]), entry["b"])
            if node == 0:
                self._join(self._log_record(entry))

    def _append(self, name: str, data: bytes) -> None:
        try:
            file = self._files.get(name)
            if file is None:
                os.makedirs(self._layout.stdouterr, exist_ok=True)
                file = self._files[name] = open(os.path.join(self._layout.stdouterr, name), "ab")  # noqa: SIM115
            file.write(data)
        except OSError as error:
            # The text is in the segments already; a log file that can't grow must not stop the job.
            self.error = error

    def _join(self, record: Record) -> None:
        """Node 0 joins the ranks' output; with more than one rank each line says whose it is."""
        if record["r"] is None:
            return
        text = record["x"]
        if self._layout.plan["ranks"] > 1:
            prefix = "[%d] " % record["r"]
            text = "".join(prefix + line + "\n" for line in text.split("\n")[:-1])
        self._append("std%s.txt" % record["s"], text.encode("utf-8", "backslashreplace"))

    def _read(self) -> None:
        layout = self._layout
        for node, follower in self._followers.items():
            for record in follower.read(layout):
                if record["k"] == "log":
                    if layout.node == 0:
                        self._join(record)
                else:
                    with self._lock:
                        self._inbox.append((node, record))
        if self.verdict is None:
            self.verdict = protocol.read_closed(layout.on_share(layout.paths.verdict_file))
        if layout.node == 0:
            folder = layout.on_share(layout.paths.requests)
            try:
                names = os.listdir(folder)
            except FileNotFoundError:
                return
            for name in names:
                if name not in self._requests:
                    request = protocol.read_closed(os.path.join(folder, name))
                    if request is not None:
                        with self._lock:
                            self._requests[name] = request
