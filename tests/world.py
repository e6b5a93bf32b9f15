"""A world for tests: its own client folder, its own MLflow store, real ``mlflow run`` processes, and nothing left at the end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from waiting import wait_for

from mlflow_batchai.tracking import runs

if TYPE_CHECKING:
    from netns import Machine

BIN = Path(sys.executable).parent


def make_store(path: Path) -> Path:
    """A migrated, empty sqlite store: making one takes seconds, copying it none."""
    code = f"from mlflow.tracking import MlflowClient; MlflowClient('sqlite:///{path}').search_experiments()"
    # MLflow's default artifact location is ./mlruns of where the store is made: each World makes its own (below).
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=path.parent)
    return path


def argv(process: psutil.Process) -> list[str]:
    """The arguments of a process; none of one that has just ended."""
    try:
        return list(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


class World:
    """One user's machine.

    Args:
        root: an empty folder for all of it, or one that is still to be made.
        template: what ``make_store`` made.

    Attributes:
        home: ``$BATCHAI_HOME``.
        uri: the tracking store.
        cwd: where commands are typed.
        machines: machines of their own (``netns.py``) that its jobs run on: all that runs there is the world's.
    """

    def __init__(self, root: Path, template: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.cwd = root / "here"
        self.cwd.mkdir(parents=True)
        shutil.copy(template, root / "mlflow.db")
        with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as store, store:
            store.execute("UPDATE experiments SET artifact_location = ?", (f"{root}/mlruns/0",))
        self.uri = f"sqlite:///{root}/mlflow.db"
        self.environment = {
            **os.environ,
            "BATCHAI_HOME": str(self.home),
            "MLFLOW_TRACKING_URI": self.uri,
            "CANARY": "of-the-submitter",
            "PYTHONUNBUFFERED": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
            self.environment.pop(name, None)
        self.machines: list[Machine] = []
        self._started: list[subprocess.Popen[str]] = []
        self._client: Any = None

    def project(
        self,
        train: str = "print('hello')",
        mlproject: str | None = None,
        batchai: str | None = None,
        name: str = "toy",
        **files: str,
    ) -> Path:
        """Write a project whose ``train.py`` is the given code."""
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(textwrap.dedent(train), encoding="utf-8")
        default = f"name: {name}\nentry_points:\n  main:\n    command: python train.py\n"
        (folder / "MLproject").write_text(default if mlproject is None else textwrap.dedent(mlproject), encoding="utf-8")
        if batchai is not None:
            (folder / "batchai.yaml").write_text(textwrap.dedent(batchai), encoding="utf-8")
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        return folder

    def command(self, *arguments: str | Path) -> list[str]:
        return [str(BIN / "mlflow"), "run", *(str(argument) for argument in arguments), "--backend", "batchai"]

    def run(self, *arguments: str | Path, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
        """``mlflow run ... --backend batchai``, to its end."""
        return self.call(self.command(*arguments), timeout=timeout, **environment)

    def call(self, argv: list[str], timeout: float = 180, **environment: str) -> subprocess.CompletedProcess[str]:
        """Any command, to its end; its group is killed if it takes too long."""
        process = self.start(argv, **environment)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"{argv} took longer than {timeout} s\n{out}\n{err}") from None
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def start(
        self, argv: list[str], stdout: Any = subprocess.PIPE, stderr: Any = subprocess.PIPE, **environment: str
    ) -> subprocess.Popen[str]:
        """Start a command; it is ended with the test."""
        process = subprocess.Popen(
            argv,
            cwd=self.cwd,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def refused(self, *arguments: str | Path) -> str:
        """What ``mlflow run`` prints when it fails: exit code 1, no traceback but a rank's own."""
        result = self.run(*arguments)
        assert not [line for line in result.stderr.splitlines() if 'File "' in line and "/nodes/" not in line], result.stderr
        assert result.returncode == 1, (result.returncode, result.stdout, result.stderr)
        return result.stderr

    def batchai(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command ``batchai``."""
        return self.call([str(BIN / "batchai"), *arguments])

    @property
    def client(self) -> Any:
        if self._client is None:
            from mlflow.tracking import MlflowClient

            self._client = MlflowClient(self.uri)
        return self._client

    def runs(self) -> list[Any]:
        """All runs, newest first."""
        return list(self.client.search_runs(["0"], order_by=["attributes.start_time DESC"]))

    @property
    def last(self) -> Any:
        """The newest run."""
        return self.runs()[0]

    def folder(self, run: Any = None) -> Path:
        """The job folder of a run."""
        tags = runs.tags_of(run or self.last)
        return Path(tags["batchai.share"].removeprefix("file://")) / tags["batchai.folder"]

    def points(self, key: str = "loss", run: Any = None) -> list[tuple[int, float]]:
        """(step, value) of each point that a run has of a metric."""
        history = self.client.get_metric_history((run or self.last).info.run_id, key)
        return [(point.step, point.value) for point in history]

    def log(self, name: str = "stdout.txt", run: Any = None) -> str:
        """A log file of a run's job folder."""
        return (self.folder(run) / "stdouterr" / name).read_text(encoding="utf-8")

    def artifact(self, path: str, run: Any = None) -> str:
        """An artifact's text."""
        return self.artifact_file(path, run).read_text(encoding="utf-8")

    def artifact_file(self, path: str, run: Any = None) -> Path:
        """An artifact, as a file."""
        return Path(self.client.download_artifacts((run or self.last).info.run_id, path))

    def plan(self, run: Any = None) -> dict[str, Any]:
        """The plan of a run's job."""
        found: dict[str, Any] = json.loads((self.folder(run) / "batchai" / "plan.json").read_text().splitlines()[0])
        return found

    def processes(self) -> list[psutil.Process]:
        """Every live process that belongs to this world: its paths stand in the argv or the environment, or its machine is ours.

        Nodes over SSH have their folders here, so agents and ranks, and what answers a client's connection, are among them.
        """
        found = [process for machine in self.machines for process in machine.processes()]
        for process in psutil.process_iter():
            try:
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process not in found and any(
                    str(self.root) in text for text in [*process.cmdline(), *process.environ().values()]
                ):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def job_processes(self) -> list[psutil.Process]:
        """Ranks and their children: what carries a job's mark."""
        found = []
        for process in self.processes():
            try:
                if "BATCHAI_JOB" in process.environ():
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def rank_1(self) -> psutil.Process | None:
        """Of a job that runs ``python train.py``."""
        for process in self.job_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.environ().get("BATCHAI_RANK") == "1" and process.cmdline()[:2] == ["python", "train.py"]:
                    return process
        return None

    def agents(self) -> list[psutil.Process]:
        """Agents, by node."""
        found = []
        for process in self.processes():
            line = argv(process)
            if "agent" in line and any(part.startswith("--node=") for part in line):
                found.append((next(part for part in line if part.startswith("--node=")), process))
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]

    def serving(self) -> set[int]:
        """Process ids of what answers clients on its nodes over SSH."""
        return {process.pid for process in self.processes() if argv(process)[-1:] == ["serve"]}

    def followers(self) -> list[psutil.Process]:
        """The processes that follow its jobs."""
        return [process for process in self.processes() if "mlflow_batchai.follower" in argv(process)]

    def lose_followers(self) -> int:
        """Kill them; how many there were."""
        found = self.followers()
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, 60)
        return len(found)

    def wait(self, condition: Callable[[], Any], seconds: float = 120, what: str = "") -> Any:
        """Wait for a condition that a real process brings about."""
        return wait_for(condition, seconds, what, pause=0.1)

    def wait_gone(self) -> None:
        """Wait until nothing of this world runs."""
        self.wait(lambda: not self.processes(), what="processes are left")

    def close(self) -> None:
        """End what is left."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for process in self.processes():
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
