"""Start processes that outlive the one that starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlflow_batchai.config import home
from mlflow_batchai.errors import ClusterError
from mlflow_batchai.storage import credentials
from mlflow_batchai.tracking.runs import Tracking


def environment_for(tracking: Tracking) -> dict[str, str]:
    """Environment of a process that uses the same store, folder and storage accounts as this one."""
    # The store's address goes by MLflow's own variable: a database's holds a password, and `ps` shows everyone our arguments.
    return {**os.environ, **tracking.environment, **credentials.exported(), "BATCHAI_HOME": str(home())}


def spawn(arguments: Sequence[str], environment: Mapping[str, str], log: Path, stdin: socket.socket | None = None) -> int:
    """Start a Python that outlives this process; its process id. Raises ``ClusterError``."""
    # -P: files of the user's folder must not be imported in place of libraries.
    return detach([sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), *arguments], environment, log, stdin)


def detach(argv: Sequence[str], environment: Mapping[str, str], log: Path, stdin: socket.socket | None = None) -> int:
    """Start a command that outlives us: its own session, its output to a file, nothing inherited; its process id.

    Args:
        stdin: its standard input; None: there is none.

    Raises:
        ClusterError: it can't be started.
    """
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with log.open("ab") as file:
        os.fchmod(file.fileno(), 0o600)
        try:
            process = subprocess.Popen(
                list(argv),
                env=dict(environment),
                cwd="/",
                stdin=stdin.fileno() if stdin else subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(f"{argv[0]} can't be started: {error.strerror}") from error
    # Nothing waits for its end, but a program that runs for long must not collect the dead.
    threading.Thread(target=process.wait, name="reaper", daemon=True).start()
    return process.pid
