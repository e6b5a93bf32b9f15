"""The lock that lets one process at a time start a sweep's jobs and end its run."""

from __future__ import annotations

import contextlib
import fcntl
import json
from typing import IO, TYPE_CHECKING

from mlflow_batchai.agent.processes import proc
from mlflow_batchai.config import home
from mlflow_batchai.errors import JobError
from mlflow_batchai.sweep.sweeps import TAG_LEADER

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient


def this_process() -> str:
    """The value of the tag that names this process the leader."""
    return json.dumps(proc.identity())


class LeaderLock:
    """On one machine a locked file, free as soon as its process has ended; between machines a tag of the parent run.

    Args:
        take_over: take the lock from a process of another machine.

    Attributes:
        held: whether this process leads, as of the last ``acquire``.
        leader: the process that the tag named then, for messages; empty: none.
    """

    def __init__(self, mlflow: MlflowClient, run_id: str, take_over: bool = False) -> None:
        self._mlflow = mlflow
        self._run_id = run_id
        self._take_over = take_over
        self._tag = this_process()
        self._file: IO[str] | None = None
        self.held = False
        self.leader = ""

    def acquire(self, parent: Run) -> bool:
        """Lead if no other process does; called at each look at the parent run.

        The first call writes the tag. The next one succeeds if the tag is still there: of two machines the later writer leads.
        """
        self.held = False
        if (self.has_other_leader(parent) and not self._take_over) or not self._lock_file():
            self._unlock_file()
        elif parent.data.tags.get(TAG_LEADER) == self._tag:
            self.held, self._take_over = True, False
        else:
            self._mlflow.set_tag(self._run_id, TAG_LEADER, self._tag)
        return self.held

    def has_other_leader(self, parent: Run) -> bool:
        """Whether the tag names another process, which may still run."""
        tag = parent.data.tags.get(TAG_LEADER, "")
        try:
            process = dict(json.loads(tag or "{}"))
        except (ValueError, TypeError):
            process = {}  # anybody can write a tag
        self.leader = f"process {process.get('pid', '?')} on {process.get('host') or 'another machine'}" if tag else ""
        return tag not in ("", self._tag) and not proc.is_certainly_gone(process)

    def release(self) -> None:
        """Let any process lead, at once."""
        if self.held:
            # While the store is away only processes of this machine can go on.
            with contextlib.suppress(Exception):
                self._mlflow.delete_tag(self._run_id, TAG_LEADER)
        self._unlock_file()

    def _lock_file(self) -> bool:
        if self._file is not None:
            return True
        path = home() / "sweeps" / f"{self._run_id}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The file is never removed: the next process must lock the same one.
            self._file = path.open("a")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._unlock_file()
        except OSError as error:
            self._unlock_file()
            raise JobError(f"{path} can't be written: {error.strerror}") from error
        return self._file is not None

    def _unlock_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
