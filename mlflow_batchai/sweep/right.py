"""Who starts the jobs of a sweep: one process at a time, so that none is started twice.

On one machine a lock on a file of the client's folder says so, which is free as soon as its process is gone. Between machines a
tag of the sweep's run does: it names the process, and another machine's goes on only when it is away, or told to take over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from mlflow_batchai.config import home
from mlflow_batchai.errors import JobError
from mlflow_batchai.node import processes
from mlflow_batchai.sweep.sweeps import TAG_DRIVER

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

# What two machines that take it at once need to see each other's tag; the later one has it.
SETTLE_SECONDS = 1.0


def mark() -> str:
    """What the tag says of this process."""
    return json.dumps(processes.identity())


class Right:
    """The right to start a sweep's jobs and to end its run.

    Args:
        take_over: whether a process of another machine is taken to be gone.

    Attributes:
        held: whether we have it.
        who: who else has it, for people; empty: not known.
    """

    def __init__(self, mlflow: MlflowClient, run_id: str, take_over: bool = False) -> None:
        self._mlflow = mlflow
        self._run_id = run_id
        self._take_over = take_over
        self._file: IO[str] | None = None
        self._mark = mark()
        self.held = False
        self.who = ""

    def driver(self, parent: Run) -> bool:
        """Whether the sweep's run names another process, which isn't gone for certain; ``who`` says which."""
        tag = parent.data.tags.get(TAG_DRIVER, "")
        other = _identity(tag)
        self.who = f"process {other.get('pid', '?')} on {other.get('host') or 'another machine'}" if tag else ""
        return bool(tag) and tag != self._mark and not processes.is_certainly_gone(other)

    def take(self, parent: Run) -> bool:
        """Take it if it is free; False if another process has it.

        Args:
            parent: the sweep's run as it is now.

        Raises:
            JobError: the client's folder can't be written.
        """
        tag = parent.data.tags.get(TAG_DRIVER, "")
        if self.held:
            if tag in ("", self._mark):
                return True
            self._let_go()  # another machine has taken over
        driven = self.driver(parent) and not self._take_over
        if not self._lock():
            return False
        try:
            self.held = not driven and self._put(tag)
        finally:
            if not self.held:
                self._let_go()
        self._take_over = self._take_over and not self.held
        return self.held

    def _put(self, tag: str) -> bool:
        """Have the tag name us; False if another machine was later."""
        if tag == self._mark:
            return True
        self._mlflow.set_tag(self._run_id, TAG_DRIVER, self._mark)
        time.sleep(SETTLE_SECONDS)
        return bool(self._mlflow.get_run(self._run_id).data.tags.get(TAG_DRIVER) == self._mark)

    def release(self) -> None:
        """Let go of it, so that any machine may go on."""
        if self.held:
            # If the store is away, this machine's lock is free all the same.
            with contextlib.suppress(Exception):
                self._mlflow.delete_tag(self._run_id, TAG_DRIVER)
            self._let_go()

    def _let_go(self) -> None:
        self.held = False
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lock(self) -> bool:
        path = home() / "sweeps" / f"{self._run_id}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # It stays: a lock that was removed is not the one that others look at.
            file = path.open("a")
        except OSError as error:
            raise JobError(f"{path} can't be written: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._file = file
        return True


def _identity(tag: str) -> Mapping[str, Any]:
    try:
        found = json.loads(tag or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
