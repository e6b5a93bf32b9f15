"""Run a command on this machine, with one result type."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mlflow_batchai.errors import ClusterError


class Result(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def run(argv: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float = 60.0) -> Result:
    """Run a command to its end; no shell reads it.

    Raises:
        ClusterError: it can't be started, or takes longer than ``timeout`` seconds.
    """
    try:
        done = subprocess.run(
            list(argv),
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            encoding="utf-8",
            errors="backslashreplace",
            check=False,
        )
    except OSError as error:
        raise ClusterError(f"{argv[0]} can't be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{argv[0]} took longer than {timeout:.0f} s") from error
    return Result(done.returncode, done.stdout, done.stderr)


def spawn(argv: Sequence[str], environment: Mapping[str, str], log: Path, told: bytes = b"") -> int:
    """Start a command that outlives us: its own session, its output to a file, nothing inherited.

    Args:
        told: what it reads on its standard input, up to the end; nobody else can.

    Returns:
        Its process id.

    Raises:
        ClusterError: it can't be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        os.fchmod(file.fileno(), 0o600)
        try:
            process = subprocess.Popen(
                list(argv),
                env=dict(environment),
                cwd="/",
                stdin=subprocess.PIPE if told else subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                close_fds=True,
            )
        except OSError as error:
            raise ClusterError(f"{argv[0]} can't be started: {error.strerror}") from error
    if process.stdin:
        # One that has ended already says why in its log.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(told)
    # Nobody waits for it here: it is meant to go on without us.
    process.returncode = 0
    return process.pid
