"""Reads what ranks report (``training/report.py``) from the node-local spool: whole lines, each once."""

import json
import os
from typing import Any, Dict, List


class ReportReader:
    """Follows every ``report-*.jsonl`` file of a folder.

    Ranks append one JSON line a record; a line without its newline isn't whole yet and waits.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._offsets: Dict[str, int] = {}

    def read(self) -> List[Dict[str, Any]]:
        """Records that have come since the last call; lines that aren't JSON objects are passed over."""
        found: List[Dict[str, Any]] = []
        try:
            with os.scandir(self._folder) as entries:
                files = [(entry.name, entry.stat().st_size) for entry in entries if entry.name.startswith("report-")]
        except FileNotFoundError:  # no folder yet, or a rank removed its file just now
            return found
        for name, size in sorted(files):
            offset = self._offsets.get(name, 0)
            if size <= offset:
                continue
            try:
                with open(os.path.join(self._folder, name), "rb") as file:
                    file.seek(offset)
                    data = file.read()
            except FileNotFoundError:
                continue
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[name] = offset + len(whole)
            for line in whole.splitlines():
                try:
                    record = json.loads(line.decode("utf-8", "replace"))
                except ValueError:
                    continue
                if isinstance(record, dict):
                    found.append(record)
        return found
