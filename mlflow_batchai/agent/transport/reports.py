"""Read the reports of ranks (``training/report.py``) from the node-local spool: whole lines, each once, counted.

Files are kept open: what a rank writes is read though somebody has removed its file or the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from typing import Any, NamedTuple

from mlflow_batchai.agent import protocol, records, safeopen

# What is read of a file at a time; a line that is longer is no record. A report of 10,000 metrics is shorter.
PIECE = protocol.LONGEST_LINE
# As an agent writes it a number may have so many times the letters that it had (1e15).
GROWTH = 8
# The type of a file's head, which counts what its process has handed in; and of what says what it had to drop.
HEAD, LOST = "count", "lost"
LONGEST_HEAD = 256
# Scripts may start a process that reports for every step.
MOST_OPEN = 128
_HEAD: records.Shape = {"records": records.is_count, "points": records.is_count}


class Reported(NamedTuple):
    """One record, of which rank it is (None: its file doesn't say), and how many bytes it was."""

    body: dict[str, Any]
    rank: int | None
    size: int


class Count(NamedTuple):
    """So many records, and points in them."""

    records: int
    points: int


def points_of(body: dict[str, Any]) -> int:
    values = body.get("values")
    return len(values) if body.get("type") == "metric" and isinstance(values, dict) else 0


class ReportReader:
    """Follows every ``report-<rank>-*.jsonl`` file of a folder.

    Ranks append one JSON line a record; a line without its newline isn't whole yet and waits. A file that was written anew has
    lines of the one before again, with the same numbers (``n``).

    Attributes:
        unread: how many lines were no JSON objects, or too long for one.
        moved: whether the last look came further in any file.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        # By name and inode.
        self._files: dict[tuple[str, int], _File] = {}
        # Of each name the highest number that was read.
        self._numbers: dict[str, int] = {}
        self.unread = 0
        self.moved = False

    def read(self) -> list[Reported]:
        """Records that have come since the last call, of each file a piece."""
        self._look()
        found: list[Reported] = []
        # A file that was written anew comes after the one before it.
        behind: set[str] = set()
        for file in self._files.values():
            if file.name in behind:
                continue
            before = file.offset
            for line in file.lines():
                body = self._parsed(line)
                if body is not None and self._is_new(file.name, body):
                    found.append(Reported(body, file.rank, len(line)))
            self.unread += file.too_long
            file.too_long = 0
            if file.offset > before:
                behind.add(file.name)
        self.moved = bool(behind)
        return found

    def counts(self) -> dict[int, Count]:
        """Counts of each rank's processes: what they have handed in by now."""
        names: dict[str, tuple[int, Count]] = {}
        for key, file in self._files.items():
            if not file.is_open:
                self._reopen(key, file)
            head = file.head()
            if file.rank is not None and head is not None:
                before = names.get(file.name, (0, Count(0, 0)))[1]
                names[file.name] = file.rank, max(before, head)
        found: dict[int, Count] = {}
        for rank, count in names.values():
            so_far = found.get(rank, Count(0, 0))
            found[rank] = Count(so_far.records + count.records, so_far.points + count.points)
        return found

    def uncounted(self) -> list[int]:
        """Ranks of which a file could be made and nothing written into it."""
        return sorted({file.rank for file in self._files.values() if file.rank is not None and file.is_empty})

    def _look(self) -> None:
        try:
            with os.scandir(self._folder) as entries:
                named = [entry for entry in entries if entry.name.startswith("report-")]
                there = {(entry.name, entry.inode()): entry.stat(follow_symlinks=False).st_size for entry in named}
        except OSError:  # no folder yet, or none any more; or a rank removed its file just now
            return
        for key, size in sorted(there.items()):
            known = self._files.get(key)
            if known is None or (not known.is_open and size > known.offset):
                self._reopen(key, known)
        opened = [one for one in self._files.values() if one.is_open]
        for old in opened[:-MOST_OPEN]:
            if old.is_read:
                old.close()

    def _reopen(self, key: tuple[str, int], known: _File | None) -> None:
        """Open a file, if it still lies there: ranks may do there what they like."""
        with contextlib.suppress(OSError), safeopen.open_file(self._folder, key[0]) as file:
            if os.fstat(file.fileno()).st_ino != key[1]:
                return
            descriptor = os.dup(file.fileno())
            if known is None:
                self._files[key] = _File(key[0], descriptor)
            else:
                known.reopen(descriptor)

    def _is_new(self, name: str, body: dict[str, Any]) -> bool:
        number = body.pop("n", None)
        if not records.is_count(number) or number is None:
            return True
        if number <= self._numbers.get(name, 0):
            return False
        self._numbers[name] = number
        return True

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        try:
            record = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and not _is_too_long(record, len(line)):
            return None if record.get("type") == HEAD else record
        self.unread += 1
        return None


class _File:
    """One file of the spool.

    Attributes:
        offset: up to where it was read.
        too_long: how many lines were too long since somebody has set it to 0.
    """

    def __init__(self, name: str, descriptor: int) -> None:
        rank = name.split("-")[1]
        self.name = name
        self.rank = int(rank) if rank.isdecimal() else None
        self.too_long = 0
        self.offset = 0
        self._head: Count | None = None
        self.reopen(descriptor)
        # Whether the beginning of a line that is too long was passed over.
        self._inside = False

    def lines(self) -> list[bytes]:
        try:
            data = b"" if self.is_read else os.pread(self._descriptor, PIECE, self.offset)
        except OSError:  # a disk that fails
            return []
        cut = data.rfind(b"\n") + 1
        if not cut and len(data) == PIECE:
            self.too_long += not self._inside
            self._inside = True
            self.offset += len(data)
            return []
        self.offset += cut
        lines = data[:cut].split(b"\n")[:-1]
        if lines and self._inside:
            self._inside = False
            del lines[0]  # the end of that line
        return [line for line in lines if line]

    def head(self) -> Count | None:
        """The count in the file's head, if it has one."""
        if not self.is_open:
            return self._head
        try:
            line, newline, _ = os.pread(self._descriptor, LONGEST_HEAD, 0).partition(b"\n")
            head = json.loads(line.decode("ascii"))
        except (OSError, ValueError, RecursionError):
            return None
        return Count(head["records"], head["points"]) if newline and records.has(head, _HEAD) else None

    @property
    def is_open(self) -> bool:
        return self._closing.alive

    @property
    def is_read(self) -> bool:
        return not self.is_open or os.fstat(self._descriptor).st_size <= self.offset

    @property
    def is_empty(self) -> bool:
        """Whether nothing could be written into it."""
        return self.is_open and os.fstat(self._descriptor).st_size == 0

    def reopen(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        """Close it; what its head counts stays known."""
        self._head = self.head()
        self._closing()


def _is_too_long(record: dict[str, Any], size: int) -> bool:
    """Whether readers of a segment would take a report for damage."""
    return size > PIECE // GROWTH and len(protocol.encode([{"k": "report", "t": 0, "body": record}])) > PIECE
