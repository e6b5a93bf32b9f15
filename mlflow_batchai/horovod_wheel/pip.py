"""Run the target interpreter's pip: its output goes to a log, and short progress to the user."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .interpreter import HorovodBuildError, Interpreter

_OLDEST_SETUPTOOLS = 68  # older ones don't work on Python 3.12

_PERCENT = re.compile(r"\s*\[\s*(\d+)%\]")
_ERROR = re.compile(r"\berror\b|\bfatal\b|undefined reference|no space left|cannot find|killed", re.IGNORECASE)
_NOISE = re.compile(
    r"-Werror|\berror\.(cc|h|py)\b|^\s*(copying|adding|creating) |\bfound$"
    r"|subprocess-exited-with-error|This error originates|with status 'error'|^\s*ERROR: Failed (building|to build) ",
    re.IGNORECASE,
)


class Pip(NamedTuple):
    """``command`` starts pip; ``environment`` is its whole environment; ``log`` is appended to."""

    command: list[str]
    environment: dict[str, str]
    log: Path
    progress: Callable[[str], None]

    def run(self, what: str, *arguments: str) -> None:
        """Run pip; ``what`` is the subject of the sentence if it fails ("Fetching Horovod").

        Raises:
            HorovodBuildError: pip failed; with the log's path and its last lines that speak of errors.
        """
        with self.log.open("a", encoding="utf-8") as sink, contextlib.ExitStack() as stack:
            # A signal that ends us waits until we know what we have started.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
            try:
                process = stack.enter_context(
                    subprocess.Popen(
                        [*self.command, "--no-input", "--disable-pip-version-check", *arguments],
                        env=self.environment,
                        cwd="/",  # a module in the current folder must not shadow pip's
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        encoding="utf-8",
                        errors="replace",
                        start_new_session=True,
                        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
                    )
                )
                # Compilers outlive pip otherwise.
                stack.push(lambda kind, *_: os.killpg(process.pid, signal.SIGKILL) if kind else None)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            assert process.stdout
            # ``write`` gives a number, which is true.
            for text in progress_texts(line for line in process.stdout if sink.write(line)):
                self.progress(text)
        if process.returncode:
            lines = error_lines(self.log.read_text(encoding="utf-8", errors="replace"))
            raise HorovodBuildError(
                "\n  ".join([f"{what} failed; the whole log is {self.log}, and this is what it says of errors:", *lines])
            )


def pip_command(interpreter: Interpreter) -> list[str]:
    """Command that runs pip for that interpreter: its own pip, or ours, if that can act for another (22.3).

    Raises:
        HorovodBuildError: neither is there.
    """
    if interpreter.tools["pip"]:
        return [interpreter.path, "-m", "pip"]
    ours = [sys.executable, "-m", "pip", "--python", interpreter.path]
    if subprocess.run([*ours, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        raise HorovodBuildError(
            f"Building Horovod needs pip, which {interpreter.path} lacks: run "
            f"`{interpreter.path} -m ensurepip`, or for Debian's own Python `apt-get install python3-pip`."
        )
    return ours


def missing_tools(interpreter: Interpreter) -> list[str]:
    """Requirements (for pip) that Horovod's setup.py has and the interpreter lacks."""
    names = ["wheel", "cloudpickle", "psutil", "PyYAML", "packaging"]
    if interpreter.framework == "torch":
        names += ["cffi", "pycparser"]  # the second by way of the first
    missing = [name for name in names if interpreter.tools[name] is None]
    setuptools = interpreter.tools["setuptools"]
    if setuptools is None or int(setuptools.split(".")[0]) < _OLDEST_SETUPTOOLS:
        missing.insert(0, f"setuptools>={_OLDEST_SETUPTOOLS}")
    return missing


def progress_texts(lines: Iterable[str]) -> Iterator[str]:
    """Progress lines from a log of ``pip wheel -v``: none twice, no falling percentage (make -j mixes them)."""
    highest, last = -1, ""
    for line in lines:
        percent = _PERCENT.match(line)
        if percent and int(percent[1]) > highest:
            highest = int(percent[1])
            text = f"compiling {highest} %"
        elif "Running CMake in" in line:
            text = "configuring"
        elif line.strip().startswith("installing to build/bdist"):
            text = "packing the wheel"
        else:
            continue
        if text != last:
            yield text
        last = text


def error_lines(log: str, count: int = 15) -> list[str]:
    """The last ``count`` lines that speak of an error; if none does, the last ``count`` lines."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    wanted: set[int] = set()
    for number, line in enumerate(lines):
        if _ERROR.search(line) and not _NOISE.search(line):
            # CMake says what is wrong in the lines after its own.
            wanted.update(range(number, number + (3 if line.startswith("CMake Error") else 1)))
    chosen = [line for number, line in enumerate(lines) if number in wanted] or lines
    return [line[:300] for line in chosen[-count:]]
