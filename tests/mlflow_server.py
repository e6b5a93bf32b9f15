"""A real MLflow server: one worker, sqlite; it can be stopped, killed and started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from sshd import free_port
from waiting import wait_for


class MlflowServer:
    """``mlflow server`` on one port, with a database and artifacts of its own that outlive its process."""

    def __init__(self, root: Path, template: Path) -> None:
        self._root = root
        shutil.copy(template, root / "server.db")
        with contextlib.closing(sqlite3.connect(root / "server.db")) as store, store:
            store.execute("UPDATE experiments SET artifact_location = 'mlflow-artifacts:/0'")
        # No client's own end may have the port when it is started again.
        self.port = free_port(["127.0.0.1"])
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = ["server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        stores = ["--backend-store-uri", f"sqlite:///{self._root}/server.db", "--artifacts-destination", str(self._root / "a")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", *command, *stores],
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            cwd=self._root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_for(self._healthy, 240, "MLflow's server", pause=0.1)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """It dies, and all that it has started."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """It is killed, and started again after the block: at the same address, with what it had stored."""
        self.kill()
        try:
            yield
        finally:
            self.start()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """For the time of the block it takes connections, and answers none."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)
