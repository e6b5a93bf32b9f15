"""Output of tasks comes as whole lines, whatever they do with their pipes, and nothing that they leave open holds us up."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.processes import tasks
from mlflow_batchai.agent.processes.tasks import LONGEST_LINE, LineBuffer, Task, readable
from mlflow_batchai.agent.runtime import Runtime

TEXT = "für 🚂\r\n\n€\nend".encode()


class Kept:
    """Stands for the shipper: keeps what the runtime gives it."""

    busy = False
    crowded = False

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def record(self, kind: str, urgent: bool = False, **fields: Any) -> None:
        self.records.append({"k": kind, **fields})

    def report(self, body: dict[str, Any], size: int, rank: int | None) -> None:
        self.record("report", body=body)


@pytest.fixture
def runtime(make_layout: Callable[..., NodeLayout]) -> Runtime:
    layout = make_layout()
    Path(layout.code).mkdir(parents=True)
    Path(layout.spool).mkdir(parents=True)
    return Runtime(layout, Kept(), {})  # type: ignore[arg-type]


@pytest.fixture
def said() -> dict[str, bytes]:
    return {"out": b"", "err": b""}


def start(runtime: Runtime, said: dict[str, bytes], command: str, rank: int | None = 0) -> Task:
    def keep(task: Task, stream: str, data: bytes) -> None:
        assert data.endswith(b"\n")
        said[stream] += data

    task = Task("rank 0", rank, keep)
    runtime.start(task, ["bash", "-c", command], {"PATH": os.environ["PATH"]})
    return task


@pytest.mark.parametrize("size", range(1, len(TEXT) + 1))
def test_lines_stay_whole_however_they_come(size: int) -> None:
    buffer, pieces = LineBuffer(), []
    for begin in range(0, len(TEXT), size):
        pieces.append(buffer.feed(TEXT[begin : begin + size]))
        pieces[-1].decode()  # never half a character
        assert not pieces[-1] or pieces[-1].endswith(b"\n")
    assert b"".join(pieces) + buffer.close() == TEXT + b"\n"
    assert buffer.close() == b""


@pytest.mark.parametrize("size", [1000, 1 << 20])
@pytest.mark.parametrize("shift", range(4))
def test_long_lines_come_in_pieces(size: int, shift: int) -> None:
    data = b"a" * shift + "🚂".encode() * (1 << 19)
    buffer, pieces = LineBuffer(), []
    for begin in range(0, len(data), size):
        pieces.append(buffer.feed(data[begin : begin + size]))
        assert len(buffer._rest) <= LONGEST_LINE
    pieces.append(buffer.close())
    lines = b"".join(pieces).split(b"\n")
    assert b"".join(lines) == data
    for line in lines:
        assert len(line) <= LONGEST_LINE
        line.decode()
    binary = b"\x80" * (LONGEST_LINE * 2)
    assert (buffer.feed(binary) + buffer.close()).replace(b"\n", b"") == binary


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n", "plain\n"),
        ("1/3\r2/3\r3/3\nnext\n", "3/3\nnext\n"),
        ("dos\r\nlines\r\n", "dos\nlines\n"),
        ("a\rb\r\r\n", "b\n"),
        ("\r\n\r\n", "\n\n"),
        ("a\r", "a"),
        ("", ""),
    ],
)
def test_readable(text: str, shown: str) -> None:
    assert readable(text) == shown


@pytest.mark.parametrize(
    ("command", "code", "number", "sentence"),
    [
        ("true", 0, None, "exited with code 0"),
        ("exit 7", 7, None, "exited with code 7"),
        ("exit 255", 255, None, "exited with code 255"),
        ("kill -KILL $$", 137, 9, "was killed by SIGKILL (exit code 137)"),
        ("bash -c 'kill -SEGV $$'; exit $?", 139, None, "was killed by SIGSEGV (exit code 139)"),
        ("kill -34 $$", 162, 34, "was killed by SIGRTMIN (exit code 162)"),
        ("kill -40 $$", 168, 40, "was killed by signal 40 (exit code 168)"),
        ("no-such-program", 127, None, "exited with code 127"),
    ],
)
def test_how_a_task_ended(
    runtime: Runtime, said: dict[str, bytes], command: str, code: int, number: int | None, sentence: str
) -> None:
    task = start(runtime, said, command)
    assert task.exit_code is None
    runtime.run_to_end(task)
    assert (task.exit_code, task.signal, task.verdict) == (code, number, sentence)
    assert runtime.rank_results()[0]["exitCode"] == code


def test_output_and_tail(runtime: Runtime, said: dict[str, bytes]) -> None:
    task = start(runtime, said, "for i in $(seq 40); do echo $i; done; printf '1\\r2\\rbad \\377 end' >&2")
    runtime.run_to_end(task)
    assert said["out"] == b"".join(b"%d\n" % i for i in range(1, 41))
    assert said["err"] == b"1\r2\rbad \xff end\n"
    assert len(task.tail) == tasks.TAIL_LINES
    assert "bad \\xff end" in task.tail
    assert task.descriptors == []


def test_a_pipe_that_a_grandchild_holds_does_not_hold_us(runtime: Runtime, said: dict[str, bytes]) -> None:
    task = start(runtime, said, "setsid bash -c 'printf half; exec sleep 600' & echo $!; sleep 0.1; printf over")
    while task.status is None:
        runtime.pump()
    begun = time.monotonic()
    runtime.drain([task], 0.2)
    assert time.monotonic() - begun < 60
    first, _, rest = said["out"].partition(b"\n")
    assert rest == b"halfover\n"
    # It is read on, so that the grandchild never stands still at a full pipe.
    assert task.descriptors
    os.kill(int(first), signal.SIGKILL)
    until = time.monotonic() + 60
    while task.descriptors and time.monotonic() < until:
        runtime.pump(0.05)
    assert not task.descriptors


def test_a_rank_that_closes_its_output_runs_on(runtime: Runtime, said: dict[str, bytes]) -> None:
    task = start(runtime, said, "echo last; exec >&- 2>&-; sleep 1; exit 4")
    begun = time.thread_time()
    runtime.run_to_end(task)
    assert (task.exit_code, said["out"]) == (4, b"last\n")
    assert time.thread_time() - begun < 0.4, "closed pipes must not make us spin"


def test_much_output_quickly(runtime: Runtime) -> None:
    """100 MB: nothing is lost, memory doesn't grow with it, and the rank isn't held back to a trickle."""
    size = [0]

    def count(task: Task, stream: str, data: bytes) -> None:
        size[0] += len(data)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    task = Task("rank 0", 0, count)
    begun = time.monotonic()
    runtime.start(
        task, ["bash", "-c", "yes 'a line of ordinary length, more or less' | head -c 100000000"], {"PATH": os.environ["PATH"]}
    )
    runtime.run_to_end(task)
    assert abs(size[0] - 100_000_000) <= 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000
    assert time.monotonic() - begun < 25  # by pieces of 64 kB, one a round, it would be 30


def test_who_writes_more_than_the_share_takes_waits(runtime: Runtime, said: dict[str, bytes]) -> None:
    kept: Any = runtime.shipper
    kept.busy = True
    task = start(runtime, said, "head -c 1000000 /dev/zero | tr '\\0' '\\n'")
    for _ in range(10):
        runtime.pump(0.02)
    assert (said["out"], task.status) == (b"", None)
    kept.busy = False
    runtime.run_to_end(task)
    assert len(said["out"]) == 1_000_000


def test_reports_are_shipped_to_the_last(runtime: Runtime, said: dict[str, bytes]) -> None:
    spool = runtime.layout.spool
    task = start(
        runtime, said, f'exec >&- 2>&-; echo \'{{"type": "model", "path": "/a", "meta": {{}}}}\' >> {spool}/report-0-1.jsonl'
    )
    while task.status is None:
        runtime.pump()
    with open(f"{spool}/report-0-1.jsonl", "a") as file:
        file.write('{"type": "metric"}\n{"type": "half')
    assert not runtime.tasks
    assert runtime.end_everything(cut_short=False) == set()
    bodies = [record["body"] for record in runtime.shipper.records]  # type: ignore[attr-defined]
    model = {"type": "model", "path": "/a", "meta": {}}
    assert bodies == [model, {"type": "metric"}]
    assert runtime.reported_models == [model]
