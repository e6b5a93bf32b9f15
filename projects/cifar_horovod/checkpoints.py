"""Checkpoints of a run, on a share: the newest whole one is found again, and only the last two are kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

KEPT = 2
MARKER = re.compile(r"epoch-(\d+)\.json")


class Found(NamedTuple):
    """A whole checkpoint: its weights file, and how many epochs were trained when it was written."""

    weights: Path
    epochs_done: int


class Checkpoints:
    """The folder `checkpoints`: a pair an epoch, `epoch-0007.weights.h5` and `epoch-0007.json`, its digest.

    The small file is written last, and a checkpoint counts only if the digest is right, so a run that is cut
    off while it writes leaves the checkpoint before as the newest. Nothing is renamed: not every share can do
    that. One process (rank 0) writes. `settings` are what must be equal for a run to go on from a checkpoint.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.settings = settings
        self._ended = folder / "ended.json"

    def newest(self) -> Found | None:
        """The newest whole checkpoint of a run of these settings that did not end, or None."""
        if self._ended.exists():
            return None
        for number in sorted(self._numbers(), reverse=True):
            weights, marker = self._paths(number)
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                record = json.loads(marker.read_text("utf-8"))
                if record["settings"] == self.settings and record["sha256"] == _digest(weights):
                    return Found(weights, int(record["epochs_done"]))
        return None

    def begin_anew(self) -> None:
        """Drop what an earlier run left."""
        for number in self._numbers():
            self._drop(number)
        self._ended.unlink(missing_ok=True)

    def save(self, epochs_done: int, write: Callable[[Path], None]) -> Path:
        """Keep what `write` writes to the path it is given, as the checkpoint after `epochs_done` epochs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        weights, marker = self._paths(epochs_done)
        marker.unlink(missing_ok=True)
        with written_aside(weights, write) as local:
            digest = _digest(local)
        record = {"epochs_done": epochs_done, "sha256": digest, "settings": self.settings}
        marker.write_text(json.dumps(record) + "\n", "utf-8")
        for number in sorted(self._numbers())[:-KEPT]:
            self._drop(number)
        return weights

    def end(self) -> None:
        """Note that the run came to its end, so that the next one in this folder begins anew."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._ended.write_text("{}\n", "utf-8")

    def _numbers(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return [int(match[1]) for path in self.folder.iterdir() if (match := MARKER.fullmatch(path.name))]

    def _paths(self, number: int) -> tuple[Path, Path]:
        stem = f"epoch-{number:04d}"
        return self.folder / f"{stem}.weights.h5", self.folder / f"{stem}.json"

    def _drop(self, number: int) -> None:
        weights, marker = self._paths(number)
        marker.unlink(missing_ok=True)
        weights.unlink(missing_ok=True)


@contextmanager
def written_aside(target: Path, write: Callable[[Path], None]) -> Iterator[Path]:
    """Let `write` write a local file, copy it to `target` in one pass, and yield the local one.

    HDF5 seeks and locks while it writes, which network file systems do badly or not at all.
    """
    with tempfile.TemporaryDirectory(prefix="cifar-") as aside:
        local = Path(aside) / target.name
        write(local)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(local, target)
        yield local


@contextmanager
def read_aside(source: Path) -> Iterator[Path]:
    """A local copy of `source`, for HDF5 to open."""
    with tempfile.TemporaryDirectory(prefix="cifar-") as aside:
        local = Path(aside) / source.name
        shutil.copyfile(source, local)
        yield local


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
