"""A rank's file: what its disk can't take waits, what is removed is written again, and all is counted in its head."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlflow_batchai.agent.transport.reports import Count, ReportReader
from mlflow_batchai.training import report
from mlflow_batchai.training.report import Spool

ROOT = Path(__file__).parents[2]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(str(tmp_path / "spool"), 3)
    yield made
    made.forget()


@pytest.fixture
def reader(tmp_path: Path) -> ReportReader:
    return ReportReader(str(tmp_path / "spool"))


def metric(step: int, **values: float) -> dict[str, object]:
    return {"type": "metric", "rank": 3, "step": step, "values": values or {"loss": 1.0}}


def steps(reader: ReportReader) -> list[int]:
    """Those that have come, of all files."""
    found = [report.body["step"] for report in reader.read() if report.body["type"] == "metric"]
    return found + (steps(reader) if reader.moved else [])


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the disk has room for 9 bytes of what is appended; what is there can be written over."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data if not at else data[:9], at))


def test_what_it_hands_in_is_counted(own: Spool, reader: ReportReader) -> None:
    own.append(metric(0, loss=1.0, accuracy=0.5))
    own.append({"type": "tag", "rank": 3, "values": {"a": "b"}})
    own.append(metric(1))
    assert [report.rank for report in reader.read()] == [3, 3, 3]
    assert reader.counts() == {3: Count(3, 3)}


def test_a_full_disk_is_waited_for(own: Spool, reader: ReportReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "AGAIN_SECONDS", 0.05)
    own.append(metric(0))
    with monkeypatch.context() as patched:
        full(patched)
        own.append(metric(1))
        own.append(metric(2))
        time.sleep(0.2)
        assert steps(reader) == [0]
        assert reader.counts() == {3: Count(3, 3)}
    until = time.monotonic() + 5
    found: list[int] = []
    while len(found) < 2 and time.monotonic() < until:  # nothing more is appended
        found += steps(reader)
        time.sleep(0.02)
    own.append(metric(3))
    assert (found, steps(reader), reader.unread) == ([1, 2], [3], 0)


def test_what_does_not_fit_into_memory_is_dropped_and_counted_by_key(
    own: Spool, reader: ReportReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "MOST_BYTES", 2000)
    own.append(metric(0))
    with monkeypatch.context() as patched:
        full(patched)
        for step in range(1, 60):
            own.append(metric(step, loss=1.0, accuracy=0.5))
    own.append(metric(60))
    found = [report.body for report in reader.read()]
    kept = [body["step"] for body in found if body["type"] == "metric"]
    (lost,) = (body for body in found if body["type"] == "lost")
    assert kept[0] == 0 and kept[-1] == 60 and kept[1:] == list(range(kept[1], 61))
    assert lost["values"] == {"loss": 61 - len(kept), "accuracy": 61 - len(kept)}
    assert reader.counts() == {3: Count(61, 120)}


def test_a_folder_that_is_removed_costs_nothing(own: Spool, reader: ReportReader, tmp_path: Path) -> None:
    own.append(metric(0))
    assert steps(reader) == [0]
    own.append(metric(1))
    shutil.rmtree(tmp_path / "spool")
    own.append(metric(2))
    own.append(metric(3))
    assert steps(reader) == [1, 2, 3]
    assert reader.counts() == {3: Count(4, 4)}


def test_nor_if_nobody_has_read_it_before(own: Spool, reader: ReportReader, tmp_path: Path) -> None:
    for step in range(5):
        own.append(metric(step))
    shutil.rmtree(tmp_path / "spool")
    own.append(metric(5))
    assert steps(reader) == [0, 1, 2, 3, 4, 5]
    assert reader.counts() == {3: Count(6, 6)}


def test_a_disk_that_takes_nothing_from_the_start(own: Spool, reader: ReportReader, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda fd, data, at: 0)
        own.append(metric(0))
        assert steps(reader) == []
        assert (reader.counts(), reader.uncounted()) == ({}, [3])
    own.append(metric(1))
    assert steps(reader) == [0, 1]
    assert reader.uncounted() == []


def test_a_process_that_ends_waits_a_while_for_its_disk(tmp_path: Path) -> None:
    code = """
import os, sys, threading, time
from mlflow_batchai.training.report import Spool
write, until = os.pwrite, time.monotonic() + 1.5
os.pwrite = lambda fd, data, at: write(fd, data, at) if time.monotonic() > until else 0
own = Spool(sys.argv[1], 0)
own.append({"type": "metric", "values": {"loss": 1.0}})
"""
    folder = tmp_path / "spool"
    subprocess.run([sys.executable, "-c", code, folder], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=20)
    (file,) = folder.iterdir()
    assert [json.loads(line)["type"] for line in file.read_text().splitlines()] == ["count", "metric"]


def test_a_child_leaves_what_waits_to_its_parent(own: Spool, reader: ReportReader, monkeypatch: pytest.MonkeyPatch) -> None:
    own.append(metric(0))
    with monkeypatch.context() as patched:
        full(patched)
        own.append(metric(1))
        child = os.fork()
        if not child:
            patched.undo()
            own.forget()
            os._exit(0)
        os.waitpid(child, 0)
    own.append(metric(2))
    assert steps(reader) == [0, 1, 2]


def test_of_many_processes_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: ReportReader) -> None:
    monkeypatch.setattr("mlflow_batchai.agent.transport.reports.MOST_OPEN", 4)
    made = [Spool(str(tmp_path / "spool"), 3) for _ in range(12)]
    for step, each in enumerate(made):
        each.append(metric(step))
        assert steps(reader) == [step]
    assert sum(file.is_open for file in reader._files.values()) <= 5
    made[0].append(metric(12))
    assert steps(reader) == [12]
    assert reader.counts() == {3: Count(13, 13)}
    for each in made:
        each.forget()


def test_all_of_a_long_file_that_is_removed_and_written_anew(
    own: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one is read to its end first; pieces of the new one that are known are passed over."""
    monkeypatch.setattr("mlflow_batchai.agent.transport.reports.PIECE", 4000)
    reader = ReportReader(str(tmp_path / "spool"))
    for step in range(300):
        own.append(metric(step))
    found = [report.body["step"] for report in reader.read()]
    assert 0 < len(found) < 300
    shutil.rmtree(tmp_path / "spool")
    own.append(metric(300))
    assert found + steps(reader) == list(range(301))


def test_a_signal_handler_reports_whatever_it_interrupts(
    own: Spool, reader: ReportReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: own.append(metric(99)))
    try:
        write = os.pwrite

        def interrupted(fd: int, data: bytes, at: int) -> int:
            monkeypatch.setattr(os, "pwrite", write)
            os.kill(os.getpid(), signal.SIGUSR1)
            return write(fd, data, at)

        monkeypatch.setattr(os, "pwrite", interrupted)
        own.append(metric(0))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sorted(steps(reader)) == [0, 99]
    assert reader.counts() == {3: Count(2, 2)}


def test_a_record_that_json_cannot_say_is_not_counted(own: Spool, reader: ReportReader) -> None:
    own.append(metric(0))
    with pytest.raises(TypeError):
        own.append({"type": "tag", "values": {"a": object()}})
    assert steps(reader) == [0]
    assert reader.counts() == {3: Count(1, 1)}
