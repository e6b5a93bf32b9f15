"""The training interpreter of a node: the cluster's, or one built from ``python_env.yaml`` once per content."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from typing import Any, Callable

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.environment import for_builds
from mlflow_batchai.agent.environments import kept, wheels
from mlflow_batchai.agent.layout import NodeLayout, archive_path
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.plan import PythonEnvironment
from mlflow_batchai.agent.processes.tasks import Task

# How long an interpreter may take to say its version, from a slow disk on a busy node.
VERSION_SECONDS = 60.0

Run = Callable[[list[str], Mapping[str, str], str], Task]

# Why a program can't be started that isn't there, or isn't one any more; other errors say nothing of it.
_NO_PROGRAM = (errno.ENOENT, errno.ENOTDIR, errno.ENOEXEC, errno.EACCES)
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded|\bENOSPC\b|\bEDQUOT\b")


def interpreter(layout: NodeLayout, environment: Mapping[str, str]) -> str:
    """Absolute path of the cluster's ``python:`` on this node: a path, a path from a home (``~``), or a name on PATH."""
    found = find(layout.plan.python, environment)
    if found:
        return found
    raise Failure(
        protocol.NODE_SETUP_FAILED,
        f"there is no program {layout.plan.python} on {named(layout)}: install it there, or set python: in the"
        " cluster document to the interpreter that trains",
        node=layout.node,
    )


def build(
    layout: NodeLayout,
    environment: PythonEnvironment,
    run: Run,
    wait: Callable[[], None],
    say: Callable[[str], None],
    variables: Mapping[str, str],
) -> str:
    """The interpreter of the environment, building it if it isn't there.

    Built under a lock, so that agents which share a disk build it once; complete only when its marker is written last, so
    that a broken build is never used again. Nor is one whose interpreter has gone or become another: a node's Python that was
    upgraded leaves links to nowhere, or packages for another version.

    Args:
        run: runs one command to its end (its output goes to the preparation's log).

    Raises:
        Failure: no such Python on this node, or a command of the build failed, be it for want of space, or the interpreter
            of what was built can't be asked its version just now.
    """
    root = os.path.expanduser(environment.folder or os.path.join(layout.root, "envs"))
    folder = os.path.join(root, environment.hash)
    python = os.path.join(folder, "bin", "python")
    with kept.once(folder, wait, say, "the training environment", lambda: described(layout, python)) as needed:
        if needed:
            say("building the training environment")
            _build(layout, environment, _steps(layout, run, say, variables), folder, python)
    return python


def described(layout: NodeLayout, python: str) -> str:
    """An interpreter's version and real path, for a marker; an empty version: it isn't there.

    Two numbers of the version: packages are made for ``3.11``, and serve 3.11.7 and 3.11.9 alike.

    Raises:
        Failure: it is there, and doesn't say its version. What lies around it may be in use by another job, and a node
            without memory is no reason to make it anew.
    """
    try:
        return f"{_version_of(python)} {os.path.realpath(python)}"
    except _SilentError as error:
        raise Failure(
            protocol.ENVIRONMENT_FAILED if layout.plan.environment else protocol.NODE_SETUP_FAILED,
            f"{python} on {named(layout)} can't be asked its version: {error}; submit again, or mend it (what batchai"
            " made is made anew once its folder is removed)",
            node=layout.node,
        ) from error


def full_disk(layout: NodeLayout, doing: str) -> str:
    places = dict.fromkeys([layout.root, tempfile.gettempdir()])
    free = ", ".join(f"{place}: {shutil.disk_usage(place).free >> 20} MB" for place in places)
    return f"a disk of {named(layout)} was full while {doing}: make space there (free now: {free})"


def named(layout: NodeLayout) -> str:
    return f"{layout.node_id} ({socket.gethostname()})"


def _steps(layout: NodeLayout, run: Run, say: Callable[[str], None], variables: Mapping[str, str]) -> wheels.Steps:
    extra = dict(for_builds(os.environ), PIP_DISABLE_PIP_VERSION_CHECK="1")

    def attempt(argv: list[str], name: str) -> Task:
        task = run(argv, extra, name)
        if task.exit_code != 0 and any(_DISK_FULL.search(line) for line in task.tail):
            sentence = full_disk(layout, name)
            raise Failure(protocol.ENVIRONMENT_FAILED, sentence, node=layout.node, tail=list(task.tail))
        return task

    def must(argv: list[str], name: str) -> Task:
        task = attempt(argv, name)
        if task.exit_code != 0:
            raise Failure(
                protocol.ENVIRONMENT_FAILED,
                f"{name} for python_env.yaml on {layout.node_id} {task.verdict}",
                node=layout.node,
                exit_code=task.exit_code,
                tail=list(task.tail),
            )
        return task

    return wheels.Steps(attempt, must, say, dict(variables, **extra))


def _build(layout: NodeLayout, environment: PythonEnvironment, steps: wheels.Steps, folder: str, python: str) -> None:
    install = [python, "-m", "pip", "install", "--progress-bar", "off"]
    wanted = environment.python
    if environment.manager == "uv":
        program = shutil.which("uv", path=os.environ.get("PATH", os.defpath))
        if not program:
            raise Failure(
                protocol.ENVIRONMENT_FAILED,
                f"--env-manager uv: there is no uv on {layout.node_id}; install it there",
                node=layout.node,
            )
        version = ["--python", str(wanted)] if wanted else []
        steps.must([program, "venv", "--seed", *version, folder], "making the environment")
    else:
        steps.must([find_python(wanted, layout), "-m", "venv", folder], "making the environment")
    if environment.build_dependencies:
        steps.must([*install, *environment.build_dependencies], "installing what builds")
    others, horovod = split_horovod(environment.dependencies, layout.code)
    requirements = os.path.join(layout.temp, "requirements.txt")
    with open(requirements, "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in others)
    if others:
        began = time.monotonic()
        steps.must([sys.executable, archive_path(), "install", python, "-r", requirements], "installing the packages")
        steps.say(f"packages: {time.monotonic() - began:.0f} s")
    if horovod:
        wheels.install(layout, python, _framework(others), horovod, steps)


def _framework(requirements: list[str]) -> str:
    """The framework that Horovod is built for: TensorFlow, unless only PyTorch is asked for."""
    names = {match.group("name").lower() for match in map(wheels.REQUIREMENT.match, requirements) if match}
    return "torch" if "torch" in names and not any(name.startswith("tensorflow") for name in names) else "tensorflow"


def split_horovod(dependencies: Iterable[str], project: str) -> tuple[list[str], list[str]]:
    """Requirement lines without horovod's, and horovod's. Files named by ``-r`` are read and put in place.

    pip would compile Horovod's source against a framework that isn't there yet, and fail: we install our wheel instead.
    """
    others: list[str] = []
    horovod: list[str] = []
    for line in dependencies:
        text = line.strip()
        match = re.match(r"^(?:-r|--requirement)[=\s]\s*(?P<file>\S+)", text)
        if match:
            with open(os.path.join(project, match.group("file")), encoding="utf-8") as file:
                lines = [entry.strip() for entry in file]
            more, ours = split_horovod([entry for entry in lines if entry and not entry.startswith("#")], project)
            others += more
            horovod += ours
            continue
        name = wheels.REQUIREMENT.match(text)
        (horovod if name and name.group("name").lower() == "horovod" else others).append(text)
    return others, horovod


def find_python(version: Any, layout: NodeLayout) -> str:
    """An interpreter of the wanted version (``3.11`` or ``3.11.7``; None: any) to make an environment from.

    The cluster's ``python:`` comes first, then the agent's own, ``python3.11`` on PATH, then what pyenv and uv have installed.
    One that doesn't run is passed over, such as pyenv's shim of a version that isn't chosen.
    """
    own = find(layout.plan.python, os.environ) or sys.executable
    if not version:
        return own
    parts = str(version).split(".")
    short = ".".join(parts[:2])
    paths = [os.path.join(folder, "python" + short) for folder in os.environ.get("PATH", os.defpath).split(os.pathsep)]
    for candidate in dict.fromkeys([own, sys.executable, *paths, *_installed(short, str(version))]):
        with contextlib.suppress(_SilentError):
            if _version_of(candidate) == short:
                return candidate
    there = ", ".join(dict.fromkeys([own, sys.executable, *_installed("*", "")]))
    raise Failure(
        protocol.ENVIRONMENT_FAILED,
        f"python_env.yaml asks for Python {version} and there is no python{short} on {layout.node_id};"
        f" install it, or use --env-manager uv (there is {there})",
        node=layout.node,
    )


def _installed(short: str, version: str) -> list[str]:
    """Interpreters that pyenv and uv keep (``short``: ``3.11``, or ``*``), the wanted version first, then the newest."""
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    uv = os.environ.get("UV_PYTHON_INSTALL_DIR") or os.path.join(data, "uv", "python")
    found = glob.glob(f"{glob.escape(pyenv)}/versions/{short}.*/bin/python")
    found += glob.glob(f"{glob.escape(uv)}/cpython-{short}.*/bin/python{short}")

    def numbers(path: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", path.split("/")[-3])[:3]]

    return sorted(found, key=lambda path: (numbers(path) == numbers(f"{version}/bin/python"), numbers(path)), reverse=True)


def find(python: str | None, environment: Mapping[str, str]) -> str | None:
    """The absolute path of an interpreter as a cluster document names it (None: the agent's own), or None."""
    if not python:
        return sys.executable
    found = shutil.which(os.path.expanduser(python), path=environment.get("PATH", os.defpath))
    return os.path.abspath(found) if found else None


def is_wrapper(python: str) -> bool:
    """Whether an interpreter is somebody's script that sets things up and starts another one; pyenv's shims only start one."""
    with open(python, "rb") as file:
        return file.read(2) == b"#!" and os.path.basename(os.path.dirname(python)) != "shims"


class _SilentError(Exception):
    """An interpreter is there but does not say which one; the message is a few words on why."""


def _version_of(python: str) -> str:
    if python == sys.executable:
        return f"{sys.version_info[0]}.{sys.version_info[1]}"
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    argv = [python, "-I", "-S", "-c", code]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=VERSION_SECONDS, check=False)
    except OSError as error:
        if error.errno in _NO_PROGRAM:
            return ""
        raise _SilentError(error.strerror or str(error)) from error
    except subprocess.TimeoutExpired:
        raise _SilentError(f"it says nothing for {VERSION_SECONDS:.0f} s") from None
    said = done.stdout.decode("ascii", "replace").strip()
    if done.returncode != 0 or not said:
        last = (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["nothing"])[-1]
        how = f"is killed by signal {-done.returncode}" if done.returncode < 0 else f"exits with {done.returncode}"
        raise _SilentError(f"it {how} and says: {last[:200]}")
    return said
