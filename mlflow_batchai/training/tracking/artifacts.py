"""Store a script's artifacts in a folder of the job on the share; the relay sends them on."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import time
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import verify_artifact_path
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from mlflow_batchai.training.constants import TRACKING_URI
from mlflow_batchai.training.tracking import job
from mlflow_batchai.training.tracking.job import RefusedError

BLOCK = 1 << 20
# For so long a share may be away; the agent ends the job then.
AWAY_SECONDS = 900.0


class JobArtifacts(LocalArtifactRepository):
    """The artifacts at an address of the scheme: the run's (``batchai://job/run``) or a logged model's (``.../models/ID``).

    They are listed and read where they are written. A file is told of once it is closed, with its size and hash.
    """

    def __init__(self, artifact_uri: str) -> None:
        self._run = job.opened()
        # MLflow puts names into addresses as they are, whatever they would mean there.
        self._inside = artifact_uri[len(TRACKING_URI) :].strip("/")
        # Models are rank 0's only: they are one thing, made of its calls.
        self._heard = self._run.heard and (self._run.rank == 0 or not self._inside.startswith("models"))
        super().__init__(artifact_uri)
        # A path as it is: what MLflow takes for one it would decode once more.
        self._artifact_dir = os.path.join(self._run.artifacts, *self._inside.split("/"))

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        verify_artifact_path(artifact_path)
        folder = os.path.normpath(artifact_path) if artifact_path else ""
        name = os.path.basename(local_file)
        if not self._heard:
            return
        target = os.path.join(self.artifact_dir, folder, name)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samefile(local_file, target):
                return
        _make_folders(os.path.dirname(target), self._run.bits, os.path.dirname(self._run.artifacts))
        size, digest = _copy(local_file, target, self._run.bits)
        path = os.path.relpath(target, self._run.artifacts).replace(os.sep, "/")
        self._run.say("artifact", ts=int(time.time() * 1000), path=path, size=size, sha256=digest)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        for parent, folders, names in os.walk(local_dir):
            folders.sort()
            inside = os.path.relpath(parent, local_dir)
            folder = os.path.normpath(os.path.join(artifact_path or "", inside))
            for name in sorted(names):
                self.log_artifact(os.path.join(parent, name), None if folder == "." else folder)

    def download_artifacts(self, artifact_path: str, dst_path: str | None = None) -> str:
        """Copy artifacts that lie here; there are none of ranks whose calls don't count."""
        try:
            return str(LocalArtifactRepository.download_artifacts(self, artifact_path, dst_path))
        except MlflowException as error:
            if self._heard:
                raise
            sentence = f"what rank {self._run.rank} logs by MLflow is not kept, so it can't be read"
            raise RefusedError(f"{sentence}: do that on rank 0 ({error.message})") from error

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        """Refuse: artifacts may have been sent on already."""
        raise RefusedError("artifacts can't be deleted from a node: do it where the tracking server is, with MLflow's client")


def _make_folders(folder: str, bits: int, job: str) -> None:
    """Make a folder and its parents, but not the job's: while that isn't there the share isn't mounted, which is waited for.

    Who relays the job may be another user, and reads while we run.
    """
    until = time.monotonic() + AWAY_SECONDS
    while not os.path.isdir(folder) and folder == job:
        if time.monotonic() > until:
            raise FileNotFoundError(errno.ENOENT, "the job's folder is gone, or its share is not mounted any more", job)
        time.sleep(0.2)
    if os.path.isdir(folder):
        return
    _make_folders(os.path.dirname(folder), bits, job)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _open_up(descriptor, bits)
    finally:
        os.close(descriptor)


def _open_up(descriptor: int, bits: int) -> None:
    """Give a file or folder of ours those bits of its mode, where the share knows modes."""
    status = os.fstat(descriptor)
    # One with more names may be another user's.
    if bits & ~status.st_mode and (stat.S_ISDIR(status.st_mode) or status.st_nlink == 1):
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) | bits)


def _copy(source: str, target: str, bits: int) -> tuple[int, Any]:
    """(size, SHA-256) of a file that was copied under its final name: some mounts lose what is renamed."""
    digest, size = hashlib.sha256(), 0
    try:
        with open(source, "rb") as file, open(target, "wb") as copy:
            _open_up(copy.fileno(), bits & 0o066)
            for block in iter(lambda: file.read(BLOCK), b""):
                copy.write(block)
                digest.update(block)
                size += len(block)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(target)
        raise
    return size, digest.hexdigest()
