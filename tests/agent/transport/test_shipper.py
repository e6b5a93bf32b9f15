"""The share thread: records are never lost or doubled when the share stalls, log lines are dropped and counted, nobody waits."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_for

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.runtime import Runtime
from mlflow_batchai.agent.share import base, mounted, mountfiles, sharefiles
from mlflow_batchai.agent.share.base import Attempt
from mlflow_batchai.agent.share.sharefiles import SegmentReader, SegmentReaders
from mlflow_batchai.agent.transport import shipper
from mlflow_batchai.agent.transport.shipper import Shipper


class Thread:
    """A shipper on a directory, what it wrote, and a way to make the share fail."""

    def __init__(self, layout: NodeLayout, peers: list[int]) -> None:
        self.layout = layout
        self.shipper = Shipper(layout, peers)
        self.events = self.on_share(layout.paths.events)
        self.aside = self.events.with_name("aside")

    def on_share(self, path: str) -> Path:
        return Path(self.layout.control.where(path))

    def segments(self) -> list[list[dict[str, Any]]]:
        found = []
        for file in sorted(self.events.glob("*/*.jsonl")):
            with contextlib.suppress(protocol.TornFileError):  # it is just being written
                found.append(protocol.decode(file.read_bytes()))
        return found

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [record for segment in self.segments() for record in segment if kind in (None, record["k"])]

    def text(self, name: str) -> str:
        return self.written(name).decode()

    def written(self, name: str) -> bytes:
        """A log file."""
        path = self.on_share(self.layout.paths.stdouterr) / name
        return path.read_bytes() if path.exists() else b""

    def fail(self) -> None:
        """A file where the folder was: every write fails, as root too."""
        if self.events.exists():
            self.events.rename(self.aside)
        self.events.parent.mkdir(parents=True, exist_ok=True)
        self.events.write_text("")

    def recover(self) -> None:
        self.events.unlink()
        if self.aside.exists():
            self.aside.rename(self.events)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attempt, "tick_seconds", 0.02)
    monkeypatch.setattr(mounted, "FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(mounted, "HEARTBEAT_SECONDS", 60.0)


Maker = Callable[..., Thread]


@pytest.fixture
def make(make_layout: Callable[..., NodeLayout]) -> Iterator[Callable[..., Thread]]:
    made: list[Thread] = []

    def make_one(
        node: int = 0, peers: tuple[int, ...] = (), failing: bool = False, start: bool = True, **changes: Any
    ) -> Thread:
        thread = Thread(make_layout(node, **changes), list(peers))
        made.append(thread)
        if failing:
            thread.fail()
        if start:
            thread.shipper.start()
        return thread

    yield make_one
    for thread in made:
        if thread.shipper.is_alive():
            if thread.events.is_file():
                thread.recover()
            assert thread.shipper.finish(60)


def metric(thread: Thread, step: int) -> None:
    thread.shipper.record("report", body={"type": "metric", "step": step})


def steps(thread: Thread) -> list[int]:
    return [record["body"]["step"] for record in thread.records("report")]


def test_one_that_could_not_finish_goes_on(make: Maker) -> None:
    """An agent that goes to sleep while its share hangs may be told to end instead."""
    thread = make(failing=True)
    metric(thread, 0)
    assert not thread.shipper.finish(0.2)
    assert thread.shipper.go_on()
    thread.recover()
    wait_for(lambda: steps(thread) == [0])
    metric(thread, 1)
    assert thread.shipper.finish(30)
    assert steps(thread) == [0, 1]
    assert not thread.shipper.go_on()


def test_what_comes_between_two_ends_is_sent(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = make()
    hangs, goes_on = threading.Event(), threading.Event()
    read, ending = thread.shipper.inbox.read, threading.Event()

    def hanging(heeds: bool) -> None:
        read(heeds)
        if ending.is_set() and not hangs.is_set():
            hangs.set()
            goes_on.wait(30)

    monkeypatch.setattr(thread.shipper.inbox, "read", hanging)
    wait_for(thread.shipper.is_alive)
    ending.set()
    assert not thread.shipper.finish(0.2) and hangs.wait(30) and thread.shipper.go_on()
    metric(thread, 1)
    assert not thread.shipper.finish(0.2)
    goes_on.set()
    assert thread.shipper.finish(30) and steps(thread) == [1]


def test_records_and_lines_arrive(make: Maker) -> None:
    thread = make()
    metric(thread, 1)
    thread.shipper.log(0, "out", "für\n1/2\r2/2\n".encode())
    thread.shipper.log(None, "out", b"prepared\n")
    thread.shipper.note("a note")
    assert thread.shipper.finish(60)
    assert steps(thread) == [1]
    logs = [(record["r"], record["s"], record["x"]) for record in thread.records("log")]
    assert logs == [(0, "out", "für\n2/2\n"), (None, "out", "prepared\n")]
    assert thread.written("stdout.txt") == "für\n1/2\r2/2\n".encode(), "one rank's is what it wrote, byte for byte"
    assert thread.text("stdout-job_prep.txt") == "prepared\n"
    assert thread.text("execution.log").endswith("Z a note\n")
    assert thread.shipper.sequence == len(list(thread.events.glob("*/*.jsonl")))


def test_several_ranks_have_their_own_files(make: Maker) -> None:
    thread = make(ranks=2, nodeCount=1)
    thread.shipper.log(0, "out", b"a\nb\n")
    thread.shipper.log(1, "out", b"1/2\r2/2\n\xff\n")
    thread.shipper.log(1, "err", b"e\n")
    assert thread.shipper.finish(60)
    assert thread.text("stdout.txt") == "[0] a\n[0] b\n[1] 2/2\n[1] \\xff\n"
    assert (thread.written("stdout-0.txt"), thread.written("stdout-1.txt")) == (b"a\nb\n", b"1/2\r2/2\n\xff\n")
    assert (thread.text("stderr.txt"), thread.text("stderr-1.txt")) == ("[1] e\n", "e\n")


def test_urgent_records_leave_at_once(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attempt, "tick_seconds", 300.0)
    monkeypatch.setattr(mounted, "FLUSH_SECONDS", 300.0)
    thread = make()
    metric(thread, 1)
    thread.shipper.record("failed", urgent=True, message="x")
    wait_for(lambda: thread.records("failed"))
    assert [record["k"] for record in thread.records()] == ["report", "failed"]  # in order


def test_a_stalled_share_loses_and_doubles_nothing(make: Maker) -> None:
    thread = make(failing=True)
    for step in range(20):
        metric(thread, step)
        thread.shipper.log(0, "out", b"line %d\n" % step)
        time.sleep(0.01)
    wait_for(lambda: thread.shipper.error)
    thread.recover()
    wait_for(lambda: len(steps(thread)) == 20)
    thread.fail()
    for step in range(20, 40):
        metric(thread, step)
        thread.shipper.log(0, "out", b"line %d\n" % step)
    wait_for(lambda: thread.shipper.error)
    thread.recover()
    assert thread.shipper.finish(60)
    assert steps(thread) == list(range(40))
    assert thread.text("stdout.txt") == "".join(f"line {step}\n" for step in range(40))
    assert "".join(record["x"] for record in thread.records("log")) == thread.text("stdout.txt")
    assert thread.records("dropped") == []


def test_log_lines_are_dropped_and_counted_and_metrics_never(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper, "MAX_PENDING_BYTES", 100_000)
    monkeypatch.setattr(shipper, "MAX_SEGMENT_BYTES", 10_000)
    thread = make(failing=True)
    for number in range(10_000):
        thread.shipper.log(0, "out", b"line %06d %s\n" % (number, b"x" * 40))
        if number % 10 == 0:
            metric(thread, number)
    thread.shipper.log(0, "out", b"the last\n")  # the main thread never waits for the share, which only comes back now
    thread.recover()
    assert thread.shipper.finish(60)
    assert steps(thread) == list(range(0, 10_000, 10))
    shipped = "".join(record["x"] for record in thread.records("log")).splitlines()
    assert shipped[-1] == "the last"
    assert len(shipped) + sum(record["lines"] for record in thread.records("dropped")) == 10_001
    assert thread.text("stdout.txt").splitlines() == shipped


def test_a_segment_that_was_tried_comes_again_the_same(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write may fail after it has arrived: whoever has read that segment must not miss what it holds the second time."""
    monkeypatch.setattr(mounted, "HEARTBEAT_SECONDS", 0.05)
    written: dict[str, list[bytes]] = {}
    real = mountfiles.write_closed

    def write(root: str, path: str, records: list[dict[str, Any]], within: str) -> int:
        written.setdefault(path, []).append(protocol.encode(records))
        if len(written[path]) == 1:
            raise OSError("the answer got lost")
        return real(root, path, records, within)

    monkeypatch.setattr(mountfiles, "write_closed", write)
    thread = make()
    wait_for(lambda: written)
    metric(thread, 1)
    wait_for(lambda: steps(thread) == [1])
    assert all(len(set(tries)) == 1 for tries in written.values())


def test_a_log_file_that_can_t_grow_stops_nothing(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper, "LOG_FILE_SECONDS", 0.2)
    thread = make(start=False)
    folder = thread.on_share(thread.layout.paths.stdouterr)
    folder.write_text("in the way")
    thread.shipper.start()
    thread.shipper.log(0, "out", b"hello\n")
    wait_for(lambda: thread.records("log"))
    thread.layout.control.write_closed(thread.layout.paths.request("1"), [{"who": "ann", "why": ""}])
    assert wait_for(thread.shipper.inbox.requests) == [{"who": "ann", "why": ""}]
    folder.unlink()
    wait_for(lambda: thread.text("stdout.txt") == "hello\n")
    (folder / "stderr.txt").mkdir()
    thread.shipper.log(0, "err", b"lost\n")
    thread.shipper.log(0, "out", b"kept\n")
    assert thread.shipper.finish(60)
    assert thread.text("stdout.txt") == "hello\nkept\n"
    assert [record["x"] for record in thread.records("log")] == ["hello\n", "lost\n", "kept\n"]


def test_a_full_share_still_tells_of_a_cancel_and_a_verdict(make: Maker) -> None:
    thread = make(failing=True)
    metric(thread, 1)
    paths = thread.layout.paths
    thread.layout.control.write_closed(paths.request("1"), [{"who": "ann"}])
    (thread.on_share(paths.requests) / "2.json").write_bytes(b"half a fi")
    (thread.on_share(paths.requests) / "3.partial").mkdir()
    thread.layout.control.write_closed(paths.verdict_file, [{"executionState": "failed"}])
    assert wait_for(thread.shipper.inbox.requests) == [{"who": "ann"}]
    assert wait_for(lambda: thread.shipper.inbox.verdict) == {"executionState": "failed"}
    assert not thread.shipper.finish(0.2)
    thread.recover()
    assert thread.shipper.finish(60)
    assert steps(thread) == [1]


def test_a_reader_takes_each_segment_once_in_order(make_layout: Callable[..., NodeLayout]) -> None:
    layout, reader = make_layout(), SegmentReader("agent-1")

    def write(sequence: int, cut: int = 0) -> None:
        path = Path(layout.control.where(layout.paths.segment("agent-1", sequence)))
        path.parent.mkdir(parents=True, exist_ok=True)
        data = protocol.encode([{"k": "beat", "n": sequence}])
        path.write_bytes(data[: len(data) - cut])

    def read() -> list[int]:
        return [record["n"] for record in reader.read(layout.attempt)]

    assert read() == []
    write(0)
    write(1, cut=1)
    write(2)
    assert read() == [0]
    write(1)
    assert (read(), read(), reader.sequence) == ([1, 2], [], 3)


def test_silence_is_what_was_looked_at(make_layout: Callable[..., NodeLayout], monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in which our own share stalled, or between two rare looks, is not a peer's silence."""
    moment = [1000.0]
    monkeypatch.setattr(sharefiles.time, "monotonic", lambda: moment[0])
    monkeypatch.setattr(mounted, "HEARTBEAT_SECONDS", 5.0)
    layout, reader = make_layout(), SegmentReader("agent-1")
    for pause, heeds, silent in (
        (2.0, True, 2.0),
        (0.0, True, 2.0),
        (600.0, True, 7.0),  # blocked in a system call all that time
        (4.0, False, 7.0),  # the share takes nothing from us: others can't say anything either
    ):
        moment[0] += pause
        assert reader.read(layout.attempt, heeds=heeds) == []
        assert reader.silent == silent
    layout.control.write_closed(layout.paths.segment("agent-1", 0), [{"k": "beat"}])
    reader.read(layout.attempt)
    assert reader.silent == 0.0
    moment[0] += 3.0
    rare: Any = SimpleNamespace(looked=moment[0], longest_silence=24.0, segment=lambda *_: None, heartbeats=lambda _: 1)
    reader.read(rare)
    assert (reader.silent, reader.heartbeats, reader.sequence) == (0.0, 1, 1), "a heartbeat apart from segments is one too"


class Talkers:
    """Writers who never come to an end, on a share that takes a while for each look; one of them can't be read."""

    looked = 1000.0
    longest_silence = 24.0

    def __init__(self, unreadable: str = "", seconds: float = 0.01) -> None:
        self.unreadable = unreadable
        self.seconds = seconds
        self.hurried = 0
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def hasty(self) -> None:
        self.hurried += 1

    def segment(self, writer: str, sequence: int) -> list[dict[str, Any]]:
        self.now += self.seconds
        if writer == self.unreadable:
            raise OSError("it is away")
        return [{"k": "n", "n": sequence}]

    def heartbeats(self, writer: str) -> int:
        return 0


@pytest.mark.parametrize("at_once", [1, 4])
def test_what_others_said_is_not_lost_with_one_who_cant_be_read(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(sharefiles, "ROUNDS_SECONDS", 0.0)
    followers = {node: SegmentReader(f"agent-{node}") for node in range(6)}
    heard: dict[int, list[int]] = {node: [] for node in followers}
    attempt = Talkers(unreadable="agent-3")
    with contextlib.closing(SegmentReaders(followers, attempt, at_once)) as rounds:  # type: ignore[arg-type]
        for trial in range(3):
            attempt.unreadable = "agent-3" if trial < 2 else ""
            with contextlib.nullcontext() if trial == 2 else pytest.raises(OSError, match="away"):
                rounds.read(lambda node, records: heard[node].extend(record["n"] for record in records))
    assert heard[0] == [0, 1, 2]
    for node, follower in followers.items():
        assert heard[node] == list(range(follower.sequence))


def test_reports_leave_in_pieces_and_wait_on_the_disk_while_the_share_stalls(make: Maker) -> None:
    thread = make(failing=True)
    taken = 0
    while not thread.shipper.crowded:
        thread.shipper.report({"type": "metric", "step": taken, "pad": "x" * 1000}, 1050)
        taken += 1
    assert taken * 1050 < base.MAX_PENDING_BYTES
    thread.recover()
    wait_for(lambda: not thread.shipper.crowded)
    assert thread.shipper.finish(60)
    assert steps(thread) == list(range(taken))
    sizes = [file.stat().st_size for file in thread.events.glob("*/*.jsonl")]
    assert max(sizes) < 2 * shipper.MAX_REPORT_BYTES


@pytest.mark.parametrize(("loss", "rest"), [(1.0, math.inf), (600.0, 1.0)])
def test_reports_that_nobody_takes_any_more_hold_up_no_end(make: Maker, loss: float, rest: float) -> None:
    thread = make(start=False, lossSeconds=loss)
    spool = Path(thread.layout.spool)
    spool.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"type": "metric", "pad": "x" * 1000}) + "\n"
    (spool / "report-0-1.jsonl").write_text(line * 6000)
    thread.fail()
    thread.shipper.start()
    runtime = Runtime(thread.layout, thread.shipper, {})
    begun = time.monotonic()
    assert runtime.end_everything(cut_short=False, rest=lambda: begun + rest - time.monotonic()) == set()
    assert thread.shipper.crowded
    assert time.monotonic() - begun < 10
    thread.recover()
    assert thread.shipper.finish(60)


def test_a_plan_that_was_damaged_is_not_a_folder_that_is_gone(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounted, "HEARTBEAT_SECONDS", 0.05)
    thread = make(peers=(1,), start=False)
    plan = thread.on_share(thread.layout.paths.plan)
    plan.parent.mkdir(parents=True, exist_ok=True)
    plan.write_text('{"job": "x", "no')
    thread.shipper.start()
    wait_for(lambda: len(thread.records("beat")) > 3)
    assert thread.shipper.error is None
    plan.unlink()
    wait_for(lambda: isinstance(thread.shipper.error, FileNotFoundError))


def test_what_others_wait_for_is_said_again_until_it_was_heard(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper, "AGAIN_SECONDS", 0.1)
    thread = make()
    thread.shipper.keep_saying("ready", node=0)
    wait_for(lambda: len(thread.records("ready")) >= 3)
    thread.shipper.stop_saying()
    thread.shipper.record("started", urgent=True)
    wait_for(lambda: thread.records("started"))
    count = len(thread.records("ready"))
    time.sleep(0.3)
    assert thread.shipper.finish(60)
    assert len(thread.records("ready")) <= count + 1


def test_what_the_share_has_lost_is_sent_again(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is gone, and one that was cut, while the job goes on and at its end; what is older than is kept stays lost."""
    monkeypatch.setattr(shipper, "CHECK_SECONDS", 0.2)
    thread = make()
    for step in range(4):
        metric(thread, step)
        wait_for(lambda step=step: steps(thread) == list(range(step + 1)))
    first, second, *_, third, fourth = sorted(thread.events.glob("*/*.jsonl"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-9])
    wait_for(lambda: steps(thread) == [0, 1, 2, 3])
    monkeypatch.setattr(shipper, "CHECK_SECONDS", 1000.0)
    third.unlink()
    fourth.unlink()
    assert thread.shipper.finish(60)
    assert steps(thread) == [0, 1, 2, 3]


def test_lines_that_the_share_never_took_are_counted(make: Maker) -> None:
    thread = make()
    thread.shipper.log(0, "out", b"one\n")
    wait_for(lambda: thread.text("stdout.txt") == "one\n")
    thread.fail()
    thread.shipper.log(0, "out", b"line\n" * 30)
    assert not thread.shipper.finish(0.5)
    thread.shipper.abandon()
    thread.shipper.join(60)
    assert thread.shipper.log_totals["stdout.txt"] == [4, 1]
    assert thread.shipper.unsent_lines == 30
    thread.recover()


@pytest.fixture
def ship(make: Maker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Thread]:
    """Starts a shipper with a heartbeat and a linger of so many seconds."""

    def start(heartbeat: float, linger: float) -> Thread:
        monkeypatch.setattr(mounted, "HEARTBEAT_SECONDS", heartbeat)
        thread = make(start=False)
        thread.layout.attempt.linger_seconds = linger
        thread.shipper.start()
        return thread

    return start


def kinds(thread: Thread) -> list[list[str]]:
    """The kinds of records in each segment."""
    return [[record["k"] for record in segment] for segment in thread.segments()]


def test_it_rides_along(ship: Callable[..., Thread]) -> None:
    thread = ship(600.0, 600.0)
    wait_for(lambda: thread.shipper.sequence == 1)  # its first heartbeat
    thread.shipper.sample(n=0)
    thread.shipper.sample(n=1)
    thread.shipper.record("started", urgent=True)
    wait_for(lambda: thread.shipper.sequence == 2)
    thread.shipper.sample(n=2)
    assert thread.shipper.finish(60)
    assert kinds(thread) == [["beat"], ["started", "system", "system"], ["system"]]


def test_it_leaves_in_place_of_a_heartbeat(ship: Callable[..., Thread]) -> None:
    thread = ship(0.1, 0.0)
    wait_for(lambda: thread.shipper.sequence >= 1)
    thread.shipper.sample(n=0)
    wait_for(lambda: ["system"] in kinds(thread))
