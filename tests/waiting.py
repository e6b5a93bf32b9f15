"""Waiting for what real processes bring about."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def wait_for(
    condition: Callable[[], Any], seconds: float = 60.0, what: str | Callable[[], str] = "", pause: float = 0.02
) -> Any:
    """The first true value of a condition.

    Args:
        seconds: after which AssertionError is raised. A busy machine may be slow and a limit costs a test that passes nothing:
            name one only where it has to be longer.
        what: what is waited for, or a function that says it.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        value = condition()
        if value:
            return value
        time.sleep(pause)
    raise AssertionError(f"not within {seconds} s: {(what() if callable(what) else what) or condition}")


def freeze(pid: int) -> None:
    """Stop a process, and return when each of its threads has: one that runs goes on for a moment after the signal."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: all(_state(path) in "TtZ" for path in Path(f"/proc/{pid}/task").glob("*/stat")), what=f"{pid} stops")


def _state(stat: Path) -> str:
    """One letter: T is stopped (proc_pid_stat(5)); Z for a thread that has ended."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
