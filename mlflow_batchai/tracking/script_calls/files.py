"""Files on the share that scripts have logged: select those to send, and fetch each to this machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mlflow_batchai.agent import records
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.errors import ShareNotFoundError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.storage import spelling
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.storage.within import as_file
from mlflow_batchai.tracking import runs, stores
from mlflow_batchai.tracking.artifacts import LONGEST_NAME, bounds_of

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

SHAPE: records.Shape = {"path": records.is_text, "size": records.is_count, "sha256": records.is_text}
# Of how many files it is remembered what was sent; of more, some may be sent twice.
MOST_SENT = 10_000
# So many files wait for their turn: more have those before them sent at once, and beyond the second number none is taken.
CROWD, MOST_WAITING = 1_000, 10_000
MOST_NAMES_SHOWN = 20


class NotThereError(Exception):
    """A file isn't there, or not as its record says; the message is a sentence."""


@contextlib.contextmanager
def local(job: Job, path: str, size: int | None) -> Iterator[Path]:
    """A file below the job's ``artifacts`` as one of this machine, under its own name.

    Args:
        size: that its record says; None: whatever it has.

    Raises:
        NotThereError: it isn't there yet, or no more, has another size, or is a link out of the share.
        ShareError: the share can't be read.
    """
    share, inside = job.share, f"{job.paths.artifacts}/{path}"
    if isinstance(share, DirectoryShare):
        bounds = bounds_of(job, share, inside)
        opened = bounds.open(inside)
        if opened is None:
            raise NotThereError("it is gone, or a link out of the share")
        with opened:
            if size is not None and os.fstat(opened.fileno()).st_size != size:
                raise NotThereError("it has changed")
            with as_file(opened, inside.rpartition("/")[2]) as file:
                yield file
        return
    rclone = job.plan.volumes[0].by_rclone
    with TemporaryDirectory(prefix="batchai-") as scratch:
        target = Path(scratch, path.rpartition("/")[2])
        try:
            share.download(spelling.on_share(inside) if rclone else inside, target)
        except ShareNotFoundError:
            raise NotThereError("it is gone") from None
        if size is not None and target.stat().st_size != size:
            raise NotThereError("it has changed")
        yield target


def is_path(path: str) -> bool:
    """Whether a rank's word for a path names a file below a folder, and one that this machine could have."""
    return all(
        part not in ("", ".", "..") and "\0" not in part and len(part.encode("utf-8", "replace")) <= LONGEST_NAME
        for part in path.split("/")
    )


class RunFiles:
    """The run's artifacts: each is sent when it is new or another one than before."""

    def __init__(self, client: MlflowClient, job: Job, memory: Mapping[str, Any]) -> None:
        self._client = client
        self._job = job
        self._run_id = job.plan.run_id
        # Path -> [size, content]; by hashes: path -> content.
        self._waiting: dict[str, list[Any]] = {path: list(entry) for path, entry in memory.get("waiting", {}).items()}
        self._sent: dict[str, str] = dict(memory.get("sent", {}))
        self._left_out = int(memory.get("leftOut", 0))
        # Sentences on files that the store will never take.
        self._refused: list[str] = list(memory.get("refused", []))

    def remember(self) -> dict[str, Any]:
        """The memory for a later process, as JSON."""
        waiting = {path: list(entry) for path, entry in self._waiting.items()}
        return {
            "waiting": waiting,
            "sent": dict(self._sent),
            "leftOut": self._left_out,
            "refused": list(self._refused),
        }

    @property
    def crowded(self) -> bool:
        """Whether many files wait."""
        return len(self._waiting) >= CROWD

    def take(self, path: str, body: Record) -> None:
        """A file was closed."""
        content = body["sha256"][:16]
        self._waiting.pop(path, None)
        if self._sent.get(_hashed(path)) == content:
            return
        # It may be sent as it was before while it is written anew.
        self._sent.pop(_hashed(path), None)
        if len(self._waiting) >= MOST_WAITING:
            self._left_out += 1
        else:
            self._waiting[path] = [body["size"], content]

    def send(self, seconds: float | None = None) -> list[str]:
        """Send what waits, oldest first; what is not as its record says waits on.

        Args:
            seconds: begin no file after so many; None: nothing more will be written, send all, and return sentences on what
                could not be sent.

        Raises:
            Exception: the store or the share is away: call it again.
        """
        begun = time.monotonic()
        missing = []
        for path, (size, content) in list(self._waiting.items()):
            if seconds is not None and time.monotonic() - begun > seconds:
                break
            try:
                with local(self._job, f"run/{path}", size if seconds is not None else None) as file:
                    self._client.log_artifact(self._run_id, str(file), path.rpartition("/")[0] or None)
            except NotThereError as error:
                if seconds is None:
                    missing.append(f"{path} ({error})")
                    del self._waiting[path]
                continue
            except Exception as error:
                if not stores.refuses_a_file(error):
                    raise
                self._refuse(path, error)
                del self._waiting[path]
                continue
            self._sent[_hashed(path)] = content
            del self._waiting[path]
            while len(self._sent) > MOST_SENT:
                del self._sent[next(iter(self._sent))]
        return self._sentences(missing) if seconds is None else []

    def _refuse(self, path: str, error: Exception) -> None:
        if len(self._refused) < MOST_NAMES_SHOWN:
            self._refused.append(f"{' '.join(runs.plain(path).split())} ({stores.sentence(error)})")
        else:
            self._left_out += 1

    def _sentences(self, missing: list[str]) -> list[str]:
        """A sentence on all that could not be sent, once."""
        missing = self._refused + missing
        self._refused = []
        more = len(missing[MOST_NAMES_SHOWN:]) + self._left_out
        self._left_out = 0
        names = [*missing[:MOST_NAMES_SHOWN], *([f"{more} more"] if more else [])]
        return [f"artifacts not sent: {', '.join(names)}"] if names else []


def _hashed(path: str) -> str:
    return hashlib.sha256(path.encode("utf-8", "surrogatepass")).hexdigest()[:16]
