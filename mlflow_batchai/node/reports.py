"""Reads what ranks report (``training/report.py``) from the node-local spool: whole lines, each once."""

import json
import os
from typing import Any, Dict, List, NamedTuple

from mlflow_batchai.node import protocol

# What is read of a file at a time; a line that is longer is no record. A report of 10,000 metrics is shorter.
PIECE = protocol.LONGEST_LINE
# As an agent writes it a number may have so many times the letters that it had (1e15).
GROWTH = 8


class Reported(NamedTuple):
    """One record, and how many bytes it was."""

    body: Dict[str, Any]
    size: int


class ReportReader:
    """Follows every ``report-*.jsonl`` file of a folder.

    Ranks append one JSON line a record; a line without its newline isn't whole yet and waits.

    Attributes:
        unread: how many lines were no JSON objects, or too long for one.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._offsets: Dict[str, int] = {}
        # Files of which the beginning of a line that is too long was passed over.
        self._inside: Dict[str, bool] = {}
        self.unread = 0

    def read(self) -> List[Reported]:
        """Records that have come since the last call, of each file a piece."""
        found: List[Reported] = []
        try:
            with os.scandir(self._folder) as entries:
                files = [(entry.name, entry.stat().st_size) for entry in entries if entry.name.startswith("report-")]
        except FileNotFoundError:  # no folder yet, or a rank removed its file just now
            return found
        for name, size in sorted(files):
            if size > self._offsets.get(name, 0):
                found += self._read(name)
        return found

    def _read(self, name: str) -> List[Reported]:
        offset = self._offsets.get(name, 0)
        try:
            with open(os.path.join(self._folder, name), "rb") as file:
                file.seek(offset)
                data = file.read(PIECE)
        except OSError:  # it has just gone, or is a folder: ranks may do there what they like
            return []
        cut = data.rfind(b"\n") + 1
        if not cut and len(data) == PIECE:
            self.unread += not self._inside.get(name)
            self._inside[name] = True
            cut = len(data)
            self._offsets[name] = offset + cut
            return []
        self._offsets[name] = offset + cut
        lines = data[:cut].split(b"\n")[:-1]
        if lines and self._inside.pop(name, False):
            del lines[0]  # the end of that line
        found = [self._parsed(line) for line in lines if line]
        return [record for record in found if record]

    def _parsed(self, line: bytes) -> Any:
        try:
            record = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and not _is_too_long(record, len(line)):
            return Reported(record, len(line))
        self.unread += 1
        return None


def _is_too_long(record: Dict[str, Any], size: int) -> bool:
    """Whether readers of a segment would take a report for damage."""
    return size > PIECE // GROWTH and len(protocol.encode([{"k": "report", "t": 0, "body": record}])) > PIECE
