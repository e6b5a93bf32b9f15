"""Container engines: find the node's, a table of their differences, and removal of left containers.

The record of a container stands on the node's disk, so that the next agent can remove it if this one is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mlflow_batchai.agent.environment import allowed, for_engines
from mlflow_batchai.agent.plan import Container
from mlflow_batchai.agent.protocol import is_marked

LOOK_SECONDS = 15.0
ASK_SECONDS = 60.0
REMOVE_SECONDS = 20.0
PAUSE_SECONDS = 0.2
# Not looked for by itself: the cluster document asks for it.
APPTAINER = "apptainer"


class Differences(NamedTuple):
    """Differences between docker, podman and Apptainer.

    Attributes:
        probe: what a working engine answers: docker's daemon, podman's configuration and storage.
        gpus: the options that give a container these GPUs, or ``all``.
        remove: the commands that end and remove the container whose name follows, tried one after the other.
        names: the command that shows the names of all containers.
        config: the option by which a login of our own is kept in a folder.
        config_is_first: whether that stands before the verb.
        by_daemon: whether a daemon runs containers, maybe with more rights than ours, and GPUs are known to it by UUID.
    """

    probe: list[str]
    gpus: Callable[[Sequence[str]], list[str]]
    remove: Sequence[Sequence[str]]
    names: Sequence[str] = ("ps", "--all", "--format={{.Names}}")
    config: str = ""
    config_is_first: bool = False
    by_daemon: bool = False


def csv_field(text: str) -> str:
    """A field as encoding/csv of Go reads it."""
    return '"{}"'.format(text.replace('"', '""')) if any(mark in text for mark in ',"\n') else text


_REMOVE = ("rm", "--force", "--volumes")
DIFFERENCES = {
    "docker": Differences(
        ["version"],
        lambda names: ["--gpus=" + ("all" if list(names) == ["all"] else csv_field("device=" + ",".join(names)))],
        # It may be going by itself just now; then, or if nobody has seen its end, engines say first that they can't.
        remove=(_REMOVE,) * 3,
        config="--config={folder}",
        config_is_first=True,
        by_daemon=True,
    ),
    "podman": Differences(
        ["info"],
        lambda names: [f"--device=nvidia.com/gpu={name}" for name in names],
        # It waits seconds for the end of a container whose monitor is dead, unless it is told not to (from version 4).
        remove=((*_REMOVE, "--time=0"), (*_REMOVE, "--time=0"), _REMOVE),
        config="--authfile={folder}/auth.json",
    ),
    APPTAINER: Differences(
        ["version"],
        lambda names: ["--nv"],
        # Without the limit it waits 10 s for a parent that the agent has not reaped yet.
        remove=(("instance", "stop", "--signal=KILL", "--timeout=1"),) * 2,
        names=("instance", "list"),
    ),
}


class Engine(NamedTuple):
    """A container engine that works.

    Attributes:
        program: absolute path of its client.
        kind: ``docker``, ``podman`` or ``apptainer``: whose options it takes (podman may be installed as docker, too).
    """

    program: str
    kind: str

    @property
    def differs(self) -> Differences:
        """Its row of the table."""
        return DIFFERENCES[self.kind]


def look(environment: Mapping[str, str], wanted: str = "") -> tuple[Engine | None, list[str]]:
    """The engine of this node, and why those that come before it don't work.

    Args:
        wanted: that of a plan's container; default: docker if its daemon answers, else podman.
    """
    reasons: list[str] = []
    for name in [wanted] if wanted else ["docker", "podman"]:
        differs = DIFFERENCES[name]
        program = shutil.which(name, path=environment.get("PATH", os.defpath))
        if program is None:
            reasons.append(f"{name} is not on PATH")
            continue
        code, said = ask([program, *differs.probe], own_environment(environment), seconds=LOOK_SECONDS)
        if code == 0:
            return Engine(program, "podman" if "podman" in said.lower() else name), reasons
        reasons.append(f"{name}: {last_line(said)}")
    return None, reasons


def engine(container: Container) -> Engine | None:
    """The engine by which this node runs a plan's container, or None."""
    return look(os.environ, container.engine)[0]


def missing(container: Container) -> str | None:
    """Why this node can't run a plan's container, as a sentence without the node's name, or None."""
    works, reasons = look(os.environ, container.engine)
    if works:
        return None
    if container.engine:
        return (
            f"Apptainer does not work ({'; '.join(reasons)}), and the cluster document says containers: apptainer: install it,"
            " or put its folder on the PATH of the node's users"
        )
    return (
        f"no container engine works ({'; '.join(reasons)}), and the job runs in the image {container.image}: install"
        " docker or podman there, or set containers: ignore in the cluster document to run such jobs without their container"
    )


def own_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the engine's client."""
    return dict(allowed(environment), **for_engines(environment))


def ask(
    argv: list[str], environment: Mapping[str, str], stdin: bytes = b"", seconds: float = ASK_SECONDS
) -> tuple[int | None, str]:
    """Run an engine's client to its end.

    Returns:
        Its exit code (None: it was killed after ``seconds``, or can't be started), and its output; unless it succeeded also
        what it said of errors.
    """
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(argv, env=dict(environment), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    except OSError as error:
        return None, f"{argv[0]} can't be run: {error.strerror}"
    try:
        out, err = process.communicate(stdin, timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()
        return None, f"{os.path.basename(argv[0])} {argv[1]} did not answer within {seconds:.0f} s"
    return process.returncode, (out + (err if process.returncode else b"")).decode("utf-8", "replace")


def registry(image: str) -> str:
    """The registry that an image's name begins with, as Docker reads it; empty: it names none."""
    first, slash, _ = image.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else ""


def last_line(text: str) -> str:
    """The last line that says something, at most 300 characters of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


# Which container a node has for a job.


def remember(root: str, engine: Engine, name: str, mark: str, login: str, client: Mapping[str, str]) -> None:
    """Write down a container that is about to be made.

    Args:
        login: the folder in which the registry's password is while the image is pulled.
        client: the environment of the engine's client.
    """
    # Where the daemon is, and its storage: who removes the container may have been started elsewhere.
    environment = for_engines(client)
    record = {"engine": list(engine), "name": name, "mark": mark, "environment": environment, "login": login}
    path = _path(root)
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(path + ".new", path)


def has_one(root: str, mark: str) -> bool:
    """Whether the node may have a container of that job."""
    record = _read(root)
    return record is not None and is_marked(record["mark"], mark)


def sweep(root: str, mark: str | None = None) -> str | None:
    """Remove what a job has left of its container, and its registry's password; nothing to do is fine.

    Args:
        mark: only that job's; None: whichever it was (its agent is dead, and we have the node).

    Returns:
        Why it is still there, as a sentence, or None.
    """
    record = _read(root)
    if record is None or (mark is not None and not is_marked(record["mark"], mark)):
        return None
    shutil.rmtree(record["login"], ignore_errors=True)
    why = _remove(Engine(*record["engine"]), record["name"], {**own_environment(os.environ), **record["environment"]})
    if why is None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_path(root))
    return why


def _remove(engine: Engine, name: str, environment: Mapping[str, str]) -> str | None:
    """Remove a container, ending all that runs in it; one that isn't there is fine."""
    said = ""
    for command in engine.differs.remove:
        code, said = ask([engine.program, *command, name], environment, seconds=REMOVE_SECONDS)
        if code is None:
            break
        code, left = ask([engine.program, *engine.differs.names], environment, seconds=REMOVE_SECONDS)
        if code == 0 and name not in left.split():
            return None
        time.sleep(PAUSE_SECONDS)
    return f"the container {name} could not be removed: {last_line(said)}"


def _path(root: str) -> str:
    return os.path.join(os.path.expanduser(root), "container.json")


def _read(root: str) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError), open(_path(root), encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
        return found
    return None
