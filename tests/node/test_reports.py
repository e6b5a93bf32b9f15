"""What ranks report is read from the spool: whole lines, each once, and nothing that they write there can stop us."""

from __future__ import annotations

import json
from pathlib import Path

from mlflow_batchai.node.reports import ReportReader


def test_whole_lines_once(tmp_path: Path) -> None:
    reader = ReportReader(str(tmp_path / "spool"))
    assert reader.read() == []
    folder = tmp_path / "spool"
    folder.mkdir()
    line = json.dumps({"x": "für"}, ensure_ascii=False).encode()
    file = folder / "report-0-1.jsonl"
    for cut in range(len(line) + 1):
        file.write_bytes(line[:cut])
        assert reader.read() == []
    file.write_bytes(line + b'\n{"y": 1')
    assert reader.read() == [{"x": "für"}]
    assert reader.read() == []
    file.write_bytes(line + b'\n{"y": 1}\n')
    (folder / "report-1-2.jsonl").write_bytes(b'{"z": 1}\n')
    (folder / "other.jsonl").write_bytes(b'{"no": 1}\n')
    assert reader.read() == [{"y": 1}, {"z": 1}]


def test_rubbish_is_passed_over(tmp_path: Path) -> None:
    good = b'{"a": 1}\n'
    (tmp_path / "report-0-1.jsonl").write_bytes(good + b"\n[1]\nnull\n{broken\n\xff\xfe\n" + b'{"t": "\xff"}\n' + good)
    assert ReportReader(str(tmp_path)).read() == [{"a": 1}, {"t": "\ufffd"}, {"a": 1}]


def test_a_file_that_went_away_is_passed_over(tmp_path: Path) -> None:
    reader = ReportReader(str(tmp_path))
    (tmp_path / "report-0-1.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "report-0-2.jsonl").write_bytes(b'{"a": 1}\n')
    assert reader.read() == []  # this look came to nothing
    (tmp_path / "report-0-1.jsonl").unlink()
    assert reader.read() == [{"a": 1}]
