"""A process that the agent has started (a rank, a preparation, a helper), with its output as whole lines."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO, Callable

from mlflow_batchai.agent.permissions import PRIVATE
from mlflow_batchai.agent.processes import proc

# A line longer than this is passed on in pieces.
LONGEST_LINE = 65536
TAIL_LINES = 30
# The exit code of a task that a SIGTERM has ended.
TERMINATED = 128 + signal.SIGTERM
# A pipe holds 64 KiB: a read that brings this much found it (nearly) full.
FULL_READ = 32768
Output = Callable[["Task", str, bytes], None]


def readable(text: str) -> str:
    """Text as a terminal would show it in the end: of a redrawn progress bar, the last state."""
    if "\r" not in text:
        return text
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


class LineBuffer:
    """Bytes in, whole lines out; a multibyte character cut between two reads is put together again."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        data = self._rest + data
        cut = data.rfind(b"\n") + 1
        whole, rest = data[:cut], data[cut:]
        while len(rest) > LONGEST_LINE:
            # After a whole state of a progress bar, so that half a number is never the last; else not inside of a character.
            cut = rest.rfind(b"\r", 0, LONGEST_LINE) + 1 or LONGEST_LINE
            while cut > LONGEST_LINE - 4 and rest[cut] & 0xC0 == 0x80:
                cut -= 1
            whole, rest = whole + rest[:cut] + b"\n", rest[cut:]
        self._rest = rest
        return whole

    def close(self) -> bytes:
        """Return the unfinished last line, ended with a newline."""
        rest, self._rest = self._rest, b""
        return rest + b"\n" if rest else b""


class Task:
    """A process in its own session, its output read without blocking.

    Attributes:
        status: wait status once it was reaped, else None.
        tail: its last lines, of both streams, as text.
    """

    def __init__(self, name: str, rank: int | None, output: Output) -> None:
        self.name = name
        self.rank = rank
        self.status: int | None = None
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self.started = time.monotonic()
        self.ended: float | None = None
        self._output = output
        self._buffers: dict[str, LineBuffer] = {"out": LineBuffer(), "err": LineBuffer()}
        self._streams: dict[int, tuple[str, IO[bytes]]] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        argv: Sequence[str],
        cwd: str,
        environment: Mapping[str, str],
        keep: Sequence[int] = (),
        stdin: bool = False,
        umask: int = PRIVATE,
    ) -> None:
        """Start it; ``stdin``: whether it gets a pipe as standard input (closed when the agent goes) instead of nothing."""
        self._process = subprocess.Popen(
            list(argv),
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=tuple(keep),
            preexec_fn=proc.as_child(umask),
        )
        assert self._process.stdout and self._process.stderr
        for stream, name in ((self._process.stdout, "out"), (self._process.stderr, "err")):
            os.set_blocking(stream.fileno(), False)
            self._streams[stream.fileno()] = (name, stream)

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    @property
    def descriptors(self) -> list[int]:
        """Pipes that may still bring output."""
        return list(self._streams)

    def read(self, descriptor: int) -> int:
        """Take what a readable pipe holds, at most 64 KiB a call so that no rank starves the others, and no line is longer than
        may be sent; the number of bytes."""
        try:
            data = os.read(descriptor, LONGEST_LINE)
        except BlockingIOError:
            return 0
        stream, pipe = self._streams[descriptor]
        self._emit(stream, self._buffers[stream].feed(data) if data else self._buffers[stream].close())
        if not data:
            del self._streams[descriptor]
            pipe.close()
        return len(data)

    def flush(self) -> None:
        """Pass on the unfinished last line too. Pipes that a process still holds open stay open and are read on: a background
        process of the task must neither be stopped by SIGPIPE nor wait for ever at a full pipe."""
        for descriptor in list(self._streams):
            self.read(descriptor)
        for stream, buffer in self._buffers.items():
            self._emit(stream, buffer.close())

    def _emit(self, stream: str, lines: bytes) -> None:
        if lines:
            text = readable(lines[-16384:].decode("utf-8", "backslashreplace"))
            self.tail.extend(text.splitlines()[-TAIL_LINES:])
            self._output(self, stream, lines)

    def reaped(self, status: int) -> None:
        assert self._process
        self.status = status
        self.ended = time.monotonic()
        if self._process.stdin:
            self._process.stdin.close()
        self._process.returncode = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    @property
    def signal(self) -> int | None:
        return os.WTERMSIG(self.status) if self.status is not None and os.WIFSIGNALED(self.status) else None

    @property
    def exit_code(self) -> int | None:
        """Its exit code as a shell says it (128 + n for a signal), or None while it runs."""
        if self.status is None:
            return None
        return 128 + os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else os.WEXITSTATUS(self.status)

    @property
    def verdict(self) -> str:
        """Describe how it ended: ``exited with code 1`` or ``was killed by SIGKILL (exit code 137)``."""
        number = self.signal
        if number is None and self.exit_code is not None and 128 < self.exit_code < 128 + 65:
            # bash says a killed command this way
            number = self.exit_code - 128
        if number is None:
            return f"exited with code {self.exit_code}"
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return f"was killed by {name} (exit code {self.exit_code})"


def waiting(members: set[int]) -> set[int]:
    """Of what runs in a container the first process of each command, if something runs below it and SIGTERM would end it."""
    above = {pid: proc.parent(pid) for pid in members}
    parents = set(above.values())
    return {pid for pid, parent in above.items() if parent not in members and pid in parents and not _catches_sigterm(pid)}


def hold(pids: set[int]) -> None:
    """Keep them from going on with their next command."""
    proc.send(pids, signal.SIGSTOP)


def release(pids: set[int]) -> None:
    """Let them go on, to SIGTERM and nothing else."""
    proc.send(pids, signal.SIGTERM)
    proc.send(pids, signal.SIGCONT)


def _catches_sigterm(pid: int) -> bool:
    lines = proc.kernel_text(f"/proc/{pid}/status").splitlines()
    masks = [line.split()[1] for line in lines if line.startswith(("SigCgt:", "SigIgn:"))]
    return any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in masks)
