"""The training environment on a node: ``python_env.yaml`` built once per content hash, with our Horovod wheel in it."""

import fcntl
import os
import re
import shutil
import sys
from typing import Any, Callable, List, Mapping, Tuple

from mlflow_batchai.node import protocol
from mlflow_batchai.node.environment import for_builds
from mlflow_batchai.node.layout import NodeLayout, archive_path
from mlflow_batchai.node.outcome import Failure
from mlflow_batchai.node.tasks import Task

Run = Callable[[List[str], Mapping[str, str], str], Task]

HOROVOD_VERSION = "0.28.1"
_NAME = re.compile(r"^\s*(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(\[[^\]]*\])?\s*(?P<version>[^;#]*)")


def build(layout: NodeLayout, environment: Mapping[str, Any], run: Run, wait: Callable[[], None]) -> str:
    """The interpreter of the environment, building it if it isn't there.

    Built under a lock, so that agents which share a disk build it once; complete only when its marker is written last, so
    that a broken build is never used again.

    Args:
        environment: ``{"manager": "virtualenv" | "uv", "python": "3.11" or None, "dependencies": [...], "hash": ...}``, and
            ``folder`` where environments are kept elsewhere than under the node's root.
        run: runs one command to its end (its output goes to the preparation's log).
        wait: waits a moment while another agent builds; it raises if the job is to end.

    Raises:
        Failure: no such Python on this node, or a command of the build failed.
    """
    root = environment.get("folder") or os.path.join(layout.root, "envs")
    folder = os.path.join(root, environment["hash"])
    python = os.path.join(folder, "bin", "python")
    marker = os.path.join(folder, ".complete")
    if os.path.exists(marker):
        return python
    os.makedirs(root, exist_ok=True)
    with open(folder + ".lock", "w") as lock:
        while not _try_lock(lock.fileno()):
            wait()
        if os.path.exists(marker):
            return python
        shutil.rmtree(folder, ignore_errors=True)
        _build(layout, environment, run, folder, python)
        with open(marker, "w") as file:
            file.write("built\n")
    return python


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _build(layout: NodeLayout, environment: Mapping[str, Any], run: Run, folder: str, python: str) -> None:
    def step(argv: List[str], name: str) -> Task:
        task = run(argv, dict(for_builds(os.environ), PIP_DISABLE_PIP_VERSION_CHECK="1"), name)
        if task.exit_code != 0:
            raise Failure(
                protocol.ENVIRONMENT_FAILED,
                "%s for python_env.yaml on %s %s" % (name, layout.node_id, task.verdict),
                node=layout.node,
                exit_code=task.exit_code,
                tail=list(task.tail),
            )
        return task

    uv = environment["manager"] == "uv"
    wanted = environment.get("python")
    if uv:
        program = shutil.which("uv", path=os.environ.get("PATH", os.defpath))
        if not program:
            raise Failure(
                protocol.ENVIRONMENT_FAILED,
                "--env-manager uv: there is no uv on %s; install it there" % layout.node_id,
                node=layout.node,
            )
        step(
            [program, "venv", "--seed", *(["--python", str(wanted)] if wanted else []), folder],
            "making the environment",
        )
    else:
        step([find_python(wanted, layout), "-m", "venv", folder], "making the environment")
    if environment["buildDependencies"]:
        step(
            [python, "-m", "pip", "install", "--progress-bar", "off", *environment["buildDependencies"]],
            "installing what builds",
        )
    others, horovod = split_horovod(environment["dependencies"], layout.code)
    requirements = os.path.join(layout.temp, "requirements.txt")
    with open(requirements, "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in others)
    if others:
        step(
            [python, "-m", "pip", "install", "--progress-bar", "off", "-r", requirements],
            "installing the packages",
        )
    if horovod:
        _check_version(horovod, layout)
        wheel = os.path.join(layout.temp, "wheel")
        os.makedirs(wheel, exist_ok=True)
        step(
            [
                sys.executable,
                archive_path(),
                "horovod-build",
                "--python",
                python,
                "--framework",
                _framework(others),
                "--out",
                wheel,
            ],
            "building the Horovod wheel",
        )
        names = [os.path.join(wheel, name) for name in os.listdir(wheel) if name.endswith(".whl")]
        step([python, "-m", "pip", "install", "--progress-bar", "off", *names], "installing Horovod")


def _framework(requirements: List[str]) -> str:
    """What Horovod is built for: TensorFlow, unless only PyTorch is asked for."""
    names = {match.group("name").lower() for match in map(_NAME.match, requirements) if match}
    return "torch" if "torch" in names and not any(name.startswith("tensorflow") for name in names) else "tensorflow"


def split_horovod(dependencies: List[str], project: str) -> Tuple[List[str], List[str]]:
    """Requirement lines without horovod's, and horovod's. Files named by ``-r`` are read and put in place.

    pip would compile Horovod's source against a framework that isn't there yet, and fail: we install our wheel instead.
    """
    others: List[str] = []
    horovod: List[str] = []
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
        name = _NAME.match(text)
        (horovod if name and name.group("name").lower() == "horovod" else others).append(text)
    return others, horovod


def _check_version(requirements: List[str], layout: NodeLayout) -> None:
    for line in requirements:
        match = _NAME.match(line)
        version = match.group("version").strip() if match else ""
        if version.startswith("==") and version[2:].strip() not in (HOROVOD_VERSION, "0.28.*", "0.*"):
            raise Failure(
                protocol.ENVIRONMENT_FAILED,
                "python_env.yaml asks for '%s'; only horovod==%s can be built for today's frameworks" % (line, HOROVOD_VERSION),
                node=layout.node,
            )


def find_python(version: Any, layout: NodeLayout) -> str:
    """An interpreter of the wanted version (``3.11`` or ``3.11.7``; None: the agent's own).

    Raises:
        Failure: there is none on this node.
    """
    if not version:
        return sys.executable
    parts = str(version).split(".")
    short = ".".join(parts[:2])
    if short == "%d.%d" % sys.version_info[:2]:
        return sys.executable
    found = shutil.which("python" + short)
    if found:
        return found
    raise Failure(
        protocol.ENVIRONMENT_FAILED,
        "python_env.yaml asks for Python %s and there is no python%s on %s; install it, or use --env-manager uv"
        % (version, short, layout.node_id),
        node=layout.node,
    )
