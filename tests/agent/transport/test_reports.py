"""Reports of ranks are read from the spool: whole lines, each once, and nothing that ranks write can stop us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai.agent.transport import reports
from mlflow_batchai.agent.transport.reports import ReportReader


def read(reader: ReportReader) -> list[dict[str, Any]]:
    return [report.body for report in reader.read()]


def test_whole_lines_once(tmp_path: Path) -> None:
    reader = ReportReader(str(tmp_path / "spool"))
    assert read(reader) == []
    folder = tmp_path / "spool"
    folder.mkdir()
    line = json.dumps({"x": "für"}, ensure_ascii=False).encode()
    file = folder / "report-0-1.jsonl"
    for cut in range(len(line) + 1):
        file.write_bytes(line[:cut])
        assert read(reader) == []
    file.write_bytes(line + b'\n{"y": 1')
    assert read(reader) == [{"x": "für"}]
    assert read(reader) == []
    file.write_bytes(line + b'\n{"y": 1}\n')
    (folder / "report-1-2.jsonl").write_bytes(b'{"z": 1}\n')
    (folder / "other.jsonl").write_bytes(b'{"no": 1}\n')
    assert read(reader) == [{"y": 1}, {"z": 1}]


def test_rubbish_is_passed_over(tmp_path: Path) -> None:
    good = b'{"a": 1}\n'
    (tmp_path / "report-0-1.jsonl").write_bytes(good + b"\n[1]\nnull\n{broken\n\xff\xfe\n" + b'{"t": "\xff"}\n' + good)
    (tmp_path / "report-0-2.jsonl").mkdir()
    reader = ReportReader(str(tmp_path))
    assert read(reader) == [{"a": 1}, {"t": "\ufffd"}, {"a": 1}]
    assert reader.unread == 4


def test_of_a_long_file_a_piece_at_a_time_and_no_line_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "PIECE", 1000)
    lines = [
        json.dumps({"number": number, "x": "x" * length}) for number, length in enumerate([10, 80, 500, 5000, 20, 900, 1, 70])
    ]
    (tmp_path / "report-0-1.jsonl").write_text("\n".join(lines) + "\n")
    reader = ReportReader(str(tmp_path))
    found: list[int] = []
    for _ in range(40):
        pieces = reader.read()
        assert sum(piece.size for piece in pieces) <= 1000
        found += [piece.body["number"] for piece in pieces]
    assert found == [0, 1, 2, 4, 5, 6, 7]
    assert reader.unread == 1


def test_a_file_that_went_away_is_passed_over(tmp_path: Path) -> None:
    reader = ReportReader(str(tmp_path))
    (tmp_path / "report-0-1.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "report-0-2.jsonl").write_bytes(b'{"a": 1}\n')
    assert read(reader) == [{"a": 1}]
    (tmp_path / "report-0-1.jsonl").unlink()
    assert read(reader) == []
