"""The machine that is measured: its GPUs, an environment for jobs made of wheels, commands with a limit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Failure(Exception):
    """A part of the benchmark can't go on; one sentence, and the end of what the command said."""


class Done(NamedTuple):
    """A command that has ended: exit code, what it said on both streams, seconds."""

    code: int
    text: str
    seconds: float


def gpus() -> list[str]:
    """The names of this machine's GPUs, by nvidia-smi; empty without it."""
    return query("--query-gpu=name")


def memory_in_use() -> list[int]:
    """MiB in use on each GPU."""
    return [int(line) for line in query("--query-gpu=memory.used") if line.isdigit()]


def computing() -> list[str]:
    """The ids of the processes that compute on a GPU, as far as nvidia-smi can tell."""
    return query("--query-compute-apps=pid")


def query(what: str) -> list[str]:
    """The lines that nvidia-smi answers."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", what, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def run(command: list[str], environment: dict[str, str], log: Path, seconds: float) -> Done:
    """Run a command to its end, or end it and its children after so many seconds; what it says is kept in ``log``."""
    begun = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            code = process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # mlflow run cancels its job
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            code = 124
    return Done(code, log.read_text(encoding="utf-8", errors="replace"), time.monotonic() - begun)


def must(command: list[str], environment: dict[str, str], log: Path, seconds: float) -> Done:
    """As ``run``; raises Failure unless it ends with 0."""
    done = run(command, environment, log, seconds)
    if done.code != 0:
        why = "did not end in time" if done.code == 124 else f"ended with {done.code}"
        raise Failure(f"{' '.join(command[:4])} ... {why} after {done.seconds:.0f} s:\n{done.text[-3000:]}")
    return done


class Environment:
    """A virtual environment over an interpreter that has PyTorch, whose packages it sees."""

    def __init__(self, folder: Path, base: str, above: Path | None = None) -> None:
        self.folder = folder
        self.base = base
        self.python = str(folder / "bin" / "python")
        self._above = above

    @property
    def packages(self) -> Path:
        """Where its own packages lie."""
        return next(self.folder.glob("lib/python3*/site-packages"))

    def program(self, name: str) -> str:
        """A command that one of its packages brought, of this environment or of the one above it."""
        own = self.folder / "bin" / name
        return str(own if own.exists() or self._above is None else self._above / "bin" / name)

    def make(self, wheels: Path | None, logs: Path) -> None:
        """Make it, and install the wheels of a folder and this very package, without network."""
        if (self.folder / "made").exists():
            return
        plain = dict(os.environ)
        must([self.base, "-m", "venv", "--without-pip", "--clear", str(self.folder)], plain, logs / "venv.log", 120)
        seen = "import sysconfig; print(sysconfig.get_path('purelib'))"
        done = must([self.base, "-c", seen], plain, logs / "packages.log", 60)
        below = [done.text.split()[-1]]
        if self._above is not None:
            below.insert(0, str(next(self._above.glob("lib/python3*/site-packages"))))
        (self.packages / "below.pth").write_text("".join(f"{line}\n" for line in below))
        if self._above is None:
            if wheels is not None:
                self.install(sorted(str(path) for path in wheels.glob("*.whl")), logs)
            self.install([str(ROOT)], logs)
        (self.folder / "made").touch()

    def install(self, what: list[str], logs: Path) -> None:
        """Install wheels or folders as they are, beside what the interpreter below has."""
        options = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed", "--no-compile", "-q"]
        must([self.python, "-m", "pip", "install", *options, *what], dict(os.environ), logs / "pip.log", 240)

    def has(self, module: str) -> bool:
        """Whether it can import a module."""
        check = subprocess.run([self.python, "-c", f"import {module}"], capture_output=True, check=False)
        return check.returncode == 0
