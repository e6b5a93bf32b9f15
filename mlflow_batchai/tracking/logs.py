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
from mlflow_batchai.tracking.artifacts import Folder, log_file

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
        self._artifact = LOGS + job.paths.log_folder.removeprefix("stdouterr")
        self._stamps: dict[str, Stamp] = {}
        self._copies: Path | None = None
        if not isinstance(job.share, DirectoryShare):
            self._copies = Path(mkdtemp(prefix="batchai-logs-"))
            weakref.finalize(self, shutil.rmtree, self._copies, ignore_errors=True)

    def send(self, complete: bool = False) -> list[str]:
        """Send the files that have grown since the last call, whole, as artifacts are sent; one listing a folder tells which.

        Args:
            complete: nothing more will be written to them.

        Returns:
            Sentences on what was left out.
        """
        job = self._job
        folder = Folder(self._client, job, job.share, job.paths.stdouterr, self._artifact, copies=self._copies)
        files = folder.look()
        # What a file server's client says of a file may be a minute old: at the end all are opened.
        grown = {name: stamp for name, stamp in files.items() if complete or stamp != self._stamps.get(name)}
        for name in folder.send(grown):
            self._stamps[name] = files[name]
        return folder.notes

    def mend(self, expected: Mapping[str, tuple[int, int]]) -> list[str]:
        """Send what was written of files that are shorter on the share than their agents know; after ``send``.

        Args:
            expected: of each file how many bytes and lines its agent has given it.

        Returns:
            Sentences on lines that are missing all the same.
        """
        share, path = self._job.share, self._job.paths.stdouterr
        # Where files grow by requests they may be made longer, and what comes there be never written.
        unknown = not isinstance(share, DirectoryShare)
        sizes = {name: stamp.size for name, stamp in self._stamps.items()}
        shorter = {name: lines for name, (size, lines) in expected.items() if unknown or sizes.get(name, 0) < size}
        # What a file server's client says of a length may be a minute old.
        there = {name: _lines_of(share, f"{path}/{name}") for name in shorter}
        short = {name: lines for name, lines in shorter.items() if there[name] < lines}
        if not short:
            return []
        missing = []
        artifact = self._artifact
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


def _lines_of(share: Share, path: str) -> int:
    """The whole lines of a file; 0 if it isn't there."""
    lines = start = 0
    with contextlib.suppress(ShareNotFoundError):
        while data := share.read(path, start, BLOCK):
            lines += data.count(b"\n")
            start += len(data)
    return lines
