"""Which files of an output directory go into the run's artifacts, as ``artifacts`` of batchai.yaml says."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mlflow_batchai.job.sent import Stamp
from mlflow_batchai.storage.ignore import parse

# What ``training.checkpoints`` calls its files, and what it notes of each in the small one.
_NAME = re.compile(r"((?:.*/)?epoch-\d{4,}(?:-batch-\d{6,})?)(\.[^/]+)")
_KEYS = frozenset({"epochs_done", "batches", "sha256", "settings", "state"})
_LONGEST_NOTE = 1 << 20


class Selected(NamedTuple):
    """The files of one output directory, divided.

    Attributes:
        wanted: those that go.
        checkpoints: how many checkpoints stay.
        excluded: how many files a pattern keeps from going.
    """

    wanted: dict[str, Stamp]
    checkpoints: int
    excluded: int


def select(
    files: Mapping[str, Stamp], read: Callable[[str], bytes], checkpoints: bool = False, exclude: Sequence[str] = ()
) -> Selected:
    """Divide files.

    Args:
        files: by their paths in the output directory.
        read: a small file's content; empty if it has gone.
        checkpoints: whether they go, too.
        exclude: patterns as in a ``.gitignore`` there.
    """
    rules = [rule for rule in map(parse, exclude) if rule is not None]

    def excluded(path: str) -> bool:
        """A folder that stays keeps all in it."""
        parts = path.split("/")
        for count in range(1, len(parts) + 1):
            whole, is_file = "/".join(parts[:count]), count == len(parts)
            spoken = [
                rule
                for rule in rules
                if not (rule.folders_only and is_file) and rule.regex.fullmatch(whole if rule.whole else parts[count - 1])
            ]
            if spoken and spoken[-1].leaves_out:
                return True
        return False

    left = {path: stamp for path, stamp in files.items() if not excluded(path)}
    pairs = [] if checkpoints else _checkpoints(left, read)
    held = {path for pair in pairs for path in pair}
    return Selected({path: stamp for path, stamp in left.items() if path not in held}, len(pairs), len(files) - len(left))


def _checkpoints(files: Mapping[str, Stamp], read: Callable[[str], bytes]) -> list[tuple[str, str]]:
    """(large file, small file) of each checkpoint. Where more than one file could be the large one, it counts as none."""
    suffixes: dict[str, list[str]] = defaultdict(list)
    for path in files:
        if match := _NAME.fullmatch(path):
            suffixes[match[1]].append(match[2])
    pairs = []
    for stem, found in suffixes.items():
        small = stem + ".json"
        if len(found) == 2 and ".json" in found and files[small].size <= _LONGEST_NOTE and _is_note(small, read):
            large = next(suffix for suffix in found if suffix != ".json")
            pairs.append((stem + large, small))
    return pairs


def _is_note(path: str, read: Callable[[str], bytes]) -> bool:
    try:
        note = json.loads(read(path))
    except (ValueError, RecursionError):
        return False
    return isinstance(note, dict) and note.keys() >= _KEYS
