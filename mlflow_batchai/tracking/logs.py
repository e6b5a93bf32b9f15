"""Upload an attempt's log files into the run's artifacts while they grow."""

from __future__ import annotations

import contextlib
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING

from mlflow_batchai.errors import ShareNotFoundError
from mlflow_batchai.job import streams
from mlflow_batchai.job.completeness import MISSING
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.sent import Stamp
from mlflow_batchai.storage import Share
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.tracking.artifacts import Folder, at_once, files_below, log_file

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

BLOCK = 16 << 20
LOGS = "logs"


class Logs:
    """An attempt's log files on their way to the run's artifacts, under ``logs`` as in the job folder's ``stdouterr``.

    Where the share is not a directory of this machine, each byte is fetched once: log files only grow.
    """

    def __init__(self, client: MlflowClient, job: Job) -> None:
        self._client = client
        self._job = job
        self._sent: dict[str, int] = {}
        self._stamps: dict[str, Stamp] = {}
        self._copies: Path | None = None

    def send(self, complete: bool = False) -> list[str]:
        """Send the files that have grown since the last call, whole, as artifacts are sent; one listing a folder tells which.

        Args:
            complete: nothing more will be written to them.

        Returns:
            Sentences on what was left out.
        """
        share, path = self._job.share, self._job.paths.stdouterr
        artifact = LOGS + self._job.paths.log_folder.removeprefix("stdouterr")
        if isinstance(share, DirectoryShare):
            folder = Folder(self._client, self._job, share, path, artifact)
            files = folder.look()
            # What a file server's client says of a file may be a minute old: at the end all are opened.
            grown_here = {name: stamp for name, stamp in files.items() if complete or stamp != self._stamps.get(name)}
            for name in folder.send(grown_here):
                self._stamps[name] = files[name]
            return folder.notes
        files, astray = files_below(share, path)
        notes = [f"{artifact}: {note}" for note in astray]
        grown = {name: stamp.size for name, stamp in files.items() if complete or stamp.size != self._sent.get(name)}
        if not grown:
            return notes
        copies = self._folder()
        fetched = at_once(share, lambda name: _follow(share, f"{path}/{name}", copies / name, grown[name], complete), grown)
        for name, length in zip(grown, fetched, strict=True):
            sends = length != self._sent.get(name)
            if sends and (why := log_file(self._client, self._job, copies / name, f"{artifact}/{name}")):
                notes.append(f"{artifact}: not sent: {name} ({why})")
            else:
                self._sent[name] = length
        return notes

    def mend(self, expected: Mapping[str, tuple[int, int]]) -> list[str]:
        """Send what was written of files that are shorter on the share than their agents know; after ``send``.

        Args:
            expected: of each file how many bytes and lines its agent has given it.

        Returns:
            Sentences on lines that are missing all the same.
        """
        sizes = {name: stamp.size for name, stamp in self._stamps.items()}
        sizes |= {name: _written_bytes(self._folder() / name) for name in self._sent}
        share, path = self._job.share, self._job.paths.stdouterr
        shorter = {name: lines for name, (size, lines) in expected.items() if sizes.get(name, 0) < size}
        # What a file server's client says of a length may be a minute old.
        there = {name: _lines_of(share, f"{path}/{name}") for name in shorter}
        short = {name: lines for name, lines in shorter.items() if there[name] < lines}
        if not short:
            return []
        missing = []
        artifact = LOGS + self._job.paths.log_folder.removeprefix("stdouterr")
        with TemporaryDirectory(prefix="batchai-") as scratch:
            written = streams.write_anew(self._job, short, Path(scratch))
            for name, lines in short.items():
                again = written.get(name, 0)
                if again > there[name] and (
                    why := log_file(self._client, self._job, Path(scratch) / name, f"{artifact}/{name}")
                ):
                    missing.append(f"{MISSING}{artifact}/{name} ({why})")
                elif max(there[name], again) < lines:
                    missing.append(f"{MISSING}{lines - max(there[name], again)} of {lines} lines of {artifact}/{name}")
        return missing

    def _folder(self) -> Path:
        if self._copies is None:
            self._copies = Path(mkdtemp(prefix="batchai-logs-"))
            weakref.finalize(self, shutil.rmtree, self._copies, ignore_errors=True)
        return self._copies


def _written_bytes(copy: Path) -> int:
    """The length of a file without what it was made longer for and that never came."""
    size = copy.stat().st_size
    with copy.open("rb") as file:
        file.seek(max(0, size - BLOCK))
        end = file.read()
    return size - len(end) + len(end.rstrip(b"\0"))


def _lines_of(share: Share, path: str) -> int:
    """The whole lines of a file; 0 if it isn't there."""
    lines = start = 0
    with contextlib.suppress(ShareNotFoundError):
        while data := share.read(path, start, BLOCK):
            lines += data.count(b"\n")
            start += len(data)
    return lines


def _follow(share: Share, path: str, copy: Path, size: int, complete: bool) -> int:
    """Append what a file has more than its copy here; the copy's length.

    A file that was made longer ends in NULs until it is written there: they wait for the next time, unless nothing will come.
    """
    have = copy.stat().st_size if copy.exists() else 0
    if have > size:
        # Not a log that grows: another file took its place.
        have = 0
    copy.parent.mkdir(parents=True, exist_ok=True)
    with copy.open("r+b" if have else "wb") as file:
        file.seek(have)
        while have < size:
            data = share.read(path, have, min(BLOCK, size - have))
            kept = data if complete else data.rstrip(b"\0")
            file.write(kept)
            have += len(kept)
            if len(kept) < len(data) or not data:
                break
    return have
