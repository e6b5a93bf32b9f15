"""Locks of files, among them those that hold a node; the kernel releases them however their holders end."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator


def lock_path(root: str) -> str:
    """The file whose lock means that a job has the node."""
    return os.path.join(root, "lock")


def open_node_lock(root: str) -> int:
    """The node's own lock, as a file descriptor that ranks inherit: free only when the last of them is gone."""
    descriptor = _open(lock_path(root))
    os.set_inheritable(descriptor, True)
    return descriptor


def open_agent_lock(root: str) -> int:
    """The lock of the one agent that may take the node, as a file descriptor that nobody inherits.

    Its holder knows that what still holds the node's lock was left by an agent that is gone, and may be ended. The queue alone
    doesn't say so: one that was deleted begins anew.
    """
    return _open(os.path.join(root, "agent.lock"))


def _open(path: str) -> int:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def try_lock(descriptor: int) -> bool:
    """Take a lock if nobody has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def held(path: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of a file, which is made and stays: removing it would split the lock.

    Args:
        waiting: called if somebody else has it, before it is waited for.
    """
    descriptor = _open(path)
    try:
        if not try_lock(descriptor):
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
