"""Which container engine this node has, and asking it things that have to be answered soon."""

import os
import shutil
import signal
import subprocess
from typing import Dict, List, Mapping, NamedTuple, Optional, Tuple

from mlflow_batchai.agent.environment import allowed, for_engines
from mlflow_batchai.agent.plan import Container

LOOK_SECONDS = 15.0
ASK_SECONDS = 60.0

# A running daemon is what answers the first; the second reads podman's configuration and opens its storage.
_PROBES = {"docker": ["version"], "podman": ["info"]}


class Engine(NamedTuple):
    """A container engine that works.

    Attributes:
        program: absolute path of its client.
        kind: ``docker`` or ``podman``: whose options it takes (podman may be installed as docker, too).
    """

    program: str
    kind: str


class Found(NamedTuple):
    """What a node has.

    Attributes:
        engine: the one that works, or None.
        reasons: why each of those that were tried before it doesn't.
        broken: whether one of those is installed.
    """

    engine: Optional[Engine]
    reasons: List[str]
    broken: bool


def engine(environment: Optional[Mapping[str, str]] = None) -> Optional[Engine]:
    """The engine of this node: docker if its daemon answers, else podman, else None.

    Args:
        environment: the node's; default: this process's.
    """
    return look(os.environ if environment is None else environment).engine


def trouble(container: Optional[Container]) -> Optional[str]:
    """Why this node can't run a plan's ``container`` (None: no container), as a sentence without the node's name, or None."""
    if not container:
        return None
    found = look(os.environ)
    if found.engine:
        return None
    return (
        "no container engine works (%s), and the job runs in the image %s: install docker or podman there, or set containers:"
        " ignore in the cluster document to run such jobs without their container" % ("; ".join(found.reasons), container.image)
    )


def look(environment: Mapping[str, str]) -> Found:
    """The engine of this node, and why those that come before it don't work."""
    reasons, broken = [], False
    for name, arguments in _PROBES.items():
        program = shutil.which(name, path=environment.get("PATH", os.defpath))
        if program is None:
            reasons.append("%s is not on PATH" % name)
            continue
        code, said = ask([program, *arguments], own_environment(environment), seconds=LOOK_SECONDS)
        if code == 0:
            return Found(Engine(program, "podman" if "podman" in said.lower() else name), reasons, broken)
        broken = True
        reasons.append("%s: %s" % (name, last_line(said)))
    return Found(None, reasons, broken)


def own_environment(environment: Mapping[str, str]) -> Dict[str, str]:
    """The environment of the engine's client."""
    return dict(allowed(environment), **for_engines(environment))


def ask(
    argv: List[str], environment: Mapping[str, str], stdin: bytes = b"", seconds: float = ASK_SECONDS
) -> Tuple[Optional[int], str]:
    """Run an engine's client to its end.

    Returns:
        Its exit code (None: it was killed after ``seconds``, or can't be started), and its output; unless it succeeded also
        what it said of errors.
    """
    try:
        process = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return None, "%s can't be run: %s" % (argv[0], error.strerror)
    try:
        out, err = process.communicate(stdin, timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe:
                pipe.close()
        return None, "%s %s did not answer within %.0f s" % (os.path.basename(argv[0]), argv[1], seconds)
    return process.returncode, (out + (err if process.returncode else b"")).decode("utf-8", "replace")


def last_line(text: str) -> str:
    """The last line that says something, at most 300 characters of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
