"""Checkpoints in a folder, usually on a share: find the newest whole one, keep the last two.

    from mlflow_batchai.training.checkpoints import Checkpoints

    checkpoints = Checkpoints(os.environ["AZ_BATCHAI_OUTPUT_MODEL"] + "/checkpoints", suffix=".pt")
    found = checkpoints.newest()
    if found:
        state = load(found.path)
    for epoch in range(found.epochs_done if found else 0, epochs):
        ...
        if rank == 0:
            checkpoints.save(epoch + 1, lambda path: save(state, path))

For Keras there is ``callbacks.CheckpointCallback``, which does the rest as well. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Callable, NamedTuple

KEPT = 2
_STEM = re.compile(r"epoch-(\d+)(?:-batch-(\d+))?")
_CHUNK = 1024 * 1024


class CheckpointError(RuntimeError):
    """A checkpoint can't be used, or can't be checked; the message says what to do."""


class Found(NamedTuple):
    """A whole checkpoint: its file, where training stood when it was written, and what was noted with it."""

    path: str
    epochs_done: int
    batches: int
    state: Mapping[str, Any]


class Checkpoints:
    """The checkpoints in one folder: two files each, ``epoch-0007.weights.h5`` and ``epoch-0007.json``, its digest.

    The small file is written last, and a checkpoint counts only if the digest is right, so a process that is cut
    off while it writes leaves the one before as the newest. Nothing is renamed, as not every share can do that.
    One process (rank 0) writes. One that was made inside of an epoch is called ``epoch-0007-batch-000123``.

    Args:
        folder: made when the first checkpoint is saved.
        settings: anything JSON can hold; a checkpoint made under other settings is not found.
        suffix: of the large files.
        say: takes a sentence; the default prints it to standard error.
    """

    def __init__(
        self, folder: Any, settings: Any = None, suffix: str = ".weights.h5", say: Callable[[str], None] | None = None
    ) -> None:
        self.folder = os.fspath(folder)
        self.settings = json.loads(json.dumps(settings))
        self._suffix = suffix
        self._say = say or _print
        self._kept: list[str] = []  # those known to be whole, the newest last

    def newest(self) -> Found | None:
        """Return the newest whole checkpoint of these settings, or None; say which newer ones are not whole.

        Raises CheckpointError if none is left and one could not be read, OSError if the folder can't be listed.
        """
        unread = None
        for number in sorted(set(self._numbers()), reverse=True):
            stem = _stem(*number)
            try:
                found = self._load(number)
            except OSError as error:
                unread = unread or error
                self._say(f"checkpoint {stem} in {self.folder} can't be read ({error.strerror}); the one before it is taken.")
            except (ValueError, KeyError, TypeError):
                self._say(f"checkpoint {stem} in {self.folder} is not whole; the one before it is taken.")
            else:
                if found is not None:
                    self._kept = [stem]
                    return found
        if unread is not None:
            raise CheckpointError(
                f"No checkpoint in {self.folder} is whole, and one could not be read ({unread.strerror}): "
                "try again when the share answers, or remove them to begin anew."
            )
        return None

    def save(
        self, epochs_done: int, write: Callable[[str], object], batches: int = 0, state: Mapping[str, Any] | None = None
    ) -> str:
        """Keep what ``write`` writes to the path it is given, and return where; older ones but the last two go.

        Args:
            epochs_done: how many epochs were trained to their end.
            write: is given a file on the local disk, of the same suffix: formats that seek (HDF5, zip) do badly on shares.
            batches: how many batches of the next epoch were trained as well.
            state: what ``newest`` gives back with it; anything JSON can hold.

        Raises OSError if the share refuses; the checkpoints before are there then.
        """
        stem = _stem(epochs_done, batches)
        path, marker = self._paths(stem)
        os.makedirs(self.folder, exist_ok=True)
        self._kept = [kept for kept in self._kept if kept != stem]
        with contextlib.suppress(FileNotFoundError):
            os.unlink(marker)
        digest = write_aside(path, write)
        record = {
            "epochs_done": epochs_done,
            "batches": batches,
            "sha256": digest,
            "settings": self.settings,
            "state": dict(state or {}),
        }
        with open(marker, "w", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._kept = [*self._kept, stem][-KEPT:]
        for number in set(self._numbers()):
            if _stem(*number) not in self._kept:
                self._drop(_stem(*number))
        return path

    def clear(self) -> None:
        """Remove all checkpoints, so that the next training in this folder begins anew."""
        for number in set(self._numbers()):
            self._drop(_stem(*number))
        self._kept = []

    def _load(self, number: tuple[int, int]) -> Found | None:
        """Return a checkpoint, None if its settings are others; raise ValueError or another error if it is not whole."""
        path, marker = self._paths(_stem(*number))
        try:
            with open(marker, encoding="utf-8") as file:
                record = json.load(file)
            if record["settings"] != self.settings:
                return None
            if record["sha256"] != _digest(path):
                raise ValueError(path)
        except FileNotFoundError:
            raise ValueError(path) from None
        if (record["epochs_done"], record["batches"]) != number:
            raise ValueError(path)
        return Found(path, *number, state=dict(record["state"]))

    def _numbers(self) -> Iterator[tuple[int, int]]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return
        for name in names:
            for suffix in (".json", self._suffix):
                match = _STEM.fullmatch(name[: -len(suffix)]) if name.endswith(suffix) else None
                if match:
                    yield int(match[1]), int(match[2] or 0)

    def _paths(self, stem: str) -> tuple[str, str]:
        return os.path.join(self.folder, stem + self._suffix), os.path.join(self.folder, stem + ".json")

    def _drop(self, stem: str) -> None:
        for path in reversed(self._paths(stem)):  # without its digest it is none
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def write_aside(target: Any, write: Callable[[str], object]) -> str:
    """Let ``write`` write a file on the local disk, copy it to ``target`` in one pass, and return its SHA-256."""
    target = os.fspath(target)
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="batchai-") as aside:
        local = os.path.join(aside, os.path.basename(target))
        write(local)
        digest = hashlib.sha256()
        with open(local, "rb") as source, open(target, "wb") as copy:
            for chunk in iter(lambda: source.read(_CHUNK), b""):
                digest.update(chunk)
                copy.write(chunk)
            copy.flush()
            os.fsync(copy.fileno())
    return digest.hexdigest()


@contextlib.contextmanager
def read_aside(source: Any) -> Iterator[str]:
    """Give a copy of ``source`` on the local disk, for formats that seek."""
    source = os.fspath(source)
    with tempfile.TemporaryDirectory(prefix="batchai-") as aside:
        local = os.path.join(aside, os.path.basename(source))
        shutil.copyfile(source, local)
        yield local


def _stem(epochs_done: int, batches: int) -> str:
    return f"epoch-{epochs_done:04d}" + (f"-batch-{batches:06d}" if batches else "")


def _digest(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(_CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


def _print(sentence: str) -> None:
    print("mlflow-batchai: " + sentence, file=sys.stderr, flush=True)
