"""Folders that are made once and kept for later jobs: training environments, results of job preparations."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from typing import Callable

from mlflow_batchai.agent.mounts import mountpoints
from mlflow_batchai.agent.reservation import locks

# Its first line is the stamp; the second tells one making from the next in the same place.
MARKER = ".complete"
# What the maker of a folder keeps locked, and what those who use one do. Both files stay: removing one would split its lock.
MAKING, USING = ".lock", ".used"
# How old the marker of something that is used may become before all of it is touched.
YOUNG_SECONDS = 86400.0


@contextlib.contextmanager
def once(
    folder: str, wait: Callable[[], None], say: Callable[[str], None], what: str, stamp: Callable[[], str]
) -> Iterator[bool]:
    """Make a folder's content once for all jobs on this disk: yields whether it is to be made, in an empty place.

    Under a lock, so that the second of two agents waits for the first one; complete only when its marker is written, after the
    body has ended well. What a body that failed has left is removed at once, of one that was killed by the next. From here on
    until this process ends the folder is in use: ``remove`` leaves it.

    Args:
        stamp: what the content depends on besides the folder's name, in one line: it is made anew when that has changed.
    """
    marker = os.path.join(folder, MARKER)
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    _use(folder, wait)
    if _is_made(marker, stamp):
        _keep_young(folder, marker)
        yield False
        return
    with open(folder + MAKING, "w") as lock:
        if not locks.try_lock(lock.fileno()):
            say(f"waiting for another job's agent that makes {what}")
            while not locks.try_lock(lock.fileno()):
                wait()
        if _is_made(marker, stamp):
            yield False
            return
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        try:
            yield True
            with open(marker, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write(f"{stamp()}\n{uuid.uuid4().hex}\n")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _use(folder: str, wait: Callable[[], None]) -> None:
    """Lock a folder against its removal for as long as this process lives: its interpreter is started again and again."""
    descriptor = os.open(folder + USING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            wait()


def is_in_use(folder: str) -> bool:
    with contextlib.ExitStack() as stack:
        return not _alone(folder, stack)


def remove(folder: str, is_wanted: Callable[[], bool]) -> bool:
    """Remove a folder, unless an agent makes it or uses it; an agent that comes meanwhile waits, and makes it anew.

    Args:
        is_wanted: asked when no agent can begin to use it any more: whether it is to go nevertheless.

    Returns:
        Whether it is gone.
    """
    with contextlib.ExitStack() as stack:
        if not _alone(folder, stack) or not is_wanted():
            return False
        # First: what is removed half-way is made anew.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, MARKER))
        mountpoints.remove_tree(folder)
        return not os.path.lexists(folder)


def _alone(folder: str, stack: contextlib.ExitStack) -> bool:
    """Keep all agents away from a folder until the stack is closed; False if one is there."""
    for name in (USING, MAKING):
        file = stack.enter_context(open(folder + name, "a"))  # noqa: SIM115 (closed by the stack)
        if not locks.try_lock(file.fileno()):
            return False
    return True


def making(folder: str) -> str:
    """Identify which making of a folder this is: another text for each, empty where none was written."""
    try:
        with open(os.path.join(folder, MARKER), encoding="utf-8", errors="surrogateescape") as file:
            return file.read().partition("\n")[2].strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _is_made(marker: str, stamp: Callable[[], str]) -> bool:
    try:
        with open(marker, encoding="utf-8", errors="surrogateescape") as file:
            return file.readline() == stamp() + "\n"
    except (FileNotFoundError, NotADirectoryError):
        return False


def _keep_young(folder: str, marker: str) -> None:
    """Have nothing of a folder that is in use look unused: systemd removes what wasn't touched for 30 days from /var/tmp.

    That is done once a day. Only the time of access is set: Python compiles a module again when its file's other time changes.
    """
    now = time.time()
    if now - os.stat(marker).st_mtime < YOUNG_SECONDS:
        return
    for parent, folders, names in os.walk(folder):
        for name in [".", *folders, *names]:
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                os.utime(path, ns=(int(now * 1e9), os.lstat(path).st_mtime_ns), follow_symlinks=False)
    # Last: an agent that is ended in between leaves the rest to the next one.
    with contextlib.suppress(OSError):
        os.utime(marker)
