"""Runs the target interpreter's pip, with all it says in a log and the gist told as progress."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, TextIO

from .errors import HorovodBuildError
from .interpreter import Interpreter
from .progress import error_lines, progress_texts

_OLDEST_SETUPTOOLS = 68  # older ones don't work on Python 3.12


class Pip(NamedTuple):
    """``command`` starts pip; ``environment`` is its whole environment; ``log`` is appended to."""

    command: List[str]
    environment: Dict[str, str]
    log: Path
    progress: Callable[[str], None]

    def run(self, what: str, *arguments: str) -> None:
        """Run pip; ``what`` is the subject of the sentence if it fails ("Fetching Horovod").

        Raises:
            HorovodBuildError: pip failed; with the log's path and its last lines that speak of errors.
        """
        command = [*self.command, "--no-input", "--disable-pip-version-check", *arguments]
        with self.log.open("a", encoding="utf-8") as sink, _process(command, self.environment) as process:
            assert process.stdout is not None
            for text in progress_texts(_copied(process.stdout, sink)):
                self.progress(text)
            code = process.wait()
        if code:
            lines = error_lines(self.log.read_text(encoding="utf-8", errors="replace"))
            raise HorovodBuildError(
                "{} failed; the whole log is {}, and this is what it says of errors:\n{}".format(
                    what, self.log, "\n".join("  " + line for line in lines)
                )
            )


def pip_command(interpreter: Interpreter) -> List[str]:
    """What runs pip for that interpreter: its own pip, or ours, if that can act for another (22.3).

    Raises:
        HorovodBuildError: neither is there.
    """
    if interpreter.tools["pip"]:
        return [interpreter.path, "-m", "pip"]
    ours = [sys.executable, "-m", "pip", "--python", interpreter.path]
    answer = subprocess.run([*ours, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if answer.returncode:
        raise HorovodBuildError(
            f"Building Horovod needs pip, which {interpreter.path} lacks: run "
            f"`{interpreter.path} -m ensurepip`, or for Debian's own Python `apt-get install python3-pip`."
        )
    return ours


def missing_tools(interpreter: Interpreter) -> List[str]:
    """Requirements (for pip) that Horovod's setup.py has and the interpreter lacks."""
    names = ["setuptools", "wheel", "cloudpickle", "psutil", "PyYAML", "packaging"]
    if interpreter.framework == "torch":
        names += ["cffi", "pycparser"]  # the second by way of the first
    missing = []
    for name in names:
        version = interpreter.tools[name]
        if name == "setuptools" and (version is None or int(version.split(".")[0]) < _OLDEST_SETUPTOOLS):
            missing.append(f"setuptools>={_OLDEST_SETUPTOOLS}")
        elif version is None:
            missing.append(name)
    return missing


def refuse_missing(requirements: List[str], interpreter: Interpreter) -> None:
    """Raise HorovodBuildError if there are any: a build from a file fetches nothing."""
    if requirements:
        raise HorovodBuildError(
            "Building from a source file fetches nothing, and {} lacks {}: install what is missing first, from wheel files if "
            "there is no network (`{} -m pip install {}`).".format(
                interpreter.path, ", ".join(requirements), interpreter.path, " ".join(map(shlex.quote, requirements))
            )
        )


@contextlib.contextmanager
def _process(command: List[str], environment: Dict[str, str]) -> "Iterator[subprocess.Popen[str]]":
    """A process group of its own, killed whole if we leave early: compilers outlive pip otherwise."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd="/",  # a module in the current folder must not shadow pip's
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    with process:
        try:
            yield process
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def _copied(lines: Iterable[str], sink: TextIO) -> Iterator[str]:
    for line in lines:
        sink.write(line)
        yield line
