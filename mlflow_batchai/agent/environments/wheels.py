"""Install Horovod into a training environment: a wheel from the share if one works, else build and publish one.

Wheels lie under ``wheels/`` on the control share. A person may put some there; a node that has built one publishes it in a
folder that carries its content key (``horovod_wheel.environment.cache_key``), for later jobs. Only those are installed that the
plan names, by their hash: whoever can write the share can put one there. A node with GPUs takes none without NCCL for a PyTorch
that could use them: training would be right, and many times slower.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from mlflow_batchai.agent import permissions, protocol, safeopen
from mlflow_batchai.agent.layout import NodeLayout, archive_path
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.processes.tasks import Task

WHEELS = "wheels"
HOROVOD_VERSION = "0.28.1"

REQUIREMENT = re.compile(r"^\s*(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(\[[^\]]*\])?\s*(?P<version>[^;#]*)")
WHEEL = re.compile(r"^horovod-.*\.whl$")
# None is larger by far.
MOST_BYTES = 1 << 30
# The end of a folder's name that is a content key.
_KEY = re.compile(r"-(tensorflow|torch)-[^-/]+-[0-9a-f]{8}$")

_HAS_NCCL = """import horovod.%s as hvd
if not hvd.nccl_built():
    raise SystemExit("it was built without NCCL, and this node has GPUs")
"""


class Steps(NamedTuple):
    """Functions by which a build works on its node.

    Attributes:
        attempt: runs one command (argv, what it is for people) to its end, its output in the preparation's log.
        must: the same; raises Failure unless it succeeds.
    """

    attempt: Callable[[list[str], str], Task]
    must: Callable[[list[str], str], Task]
    say: Callable[[str], None]
    variables: Mapping[str, str]


def install(layout: NodeLayout, python: str, framework: str, requirements: list[str], steps: Steps) -> None:
    """Install Horovod into an environment that has its framework.

    pip judges whether a wheel is for this interpreter and what the project asks for; importing it shows whether it is for this
    framework's version. The first one that passes stays.

    Raises:
        Failure: no wheel on the share works, and none can be built.
    """
    pip = [python, "-m", "pip"]
    install_wheel = [*pip, "install", "--progress-bar", "off"]
    wanted = ["horovod" + _version(line) for line in requirements if _version(line)]
    key, nccl = content(python, framework, steps.variables)
    check = [python, "-c", _HAS_NCCL % framework if nccl else f"import horovod.{framework}"]
    named = layout.plan.wheels
    for number, path in enumerate(candidates(layout.mounted_share, key)):
        name = os.path.relpath(path, layout.mounted_share)
        wheel = os.path.join(layout.temp, "wheels", str(number), os.path.basename(path))
        if named.get(name) is None:
            steps.say(f"passing over the Horovod wheel {name} of the share: the job's plan does not name it")
            continue
        if _copied(layout.mounted_share, name, wheel) != named[name]:
            steps.say(f"passing over the Horovod wheel {name} of the share: it was changed since the job was submitted")
            continue
        steps.say(f"trying the Horovod wheel {name} of the share")
        if steps.attempt([*install_wheel, wheel, *wanted], "installing Horovod").exit_code == 0:
            if steps.attempt(check, "importing Horovod").exit_code == 0:
                steps.say(f"using the Horovod wheel {name} of the share")
                return
            steps.must([*pip, "uninstall", "--yes", "horovod"], "removing a Horovod that does not work")
        steps.say(f"the Horovod wheel {name} of the share does not fit")
    check_version(requirements, layout)
    steps.say("building a Horovod wheel, which takes minutes unless this node has built it before")
    out = os.path.join(layout.temp, "wheel")
    os.makedirs(out, exist_ok=True)
    builder = [sys.executable, archive_path(), "horovod-build"]
    began = time.monotonic()
    steps.must([*builder, "--python", python, "--framework", framework, "--out", out], "building the Horovod wheel")
    steps.say(f"Horovod wheel: {time.monotonic() - began:.0f} s")
    built = [os.path.join(out, name) for name in sorted(os.listdir(out)) if WHEEL.match(name)]
    steps.must([*install_wheel, *built], "installing Horovod")
    steps.must(check, "importing Horovod")
    if key:
        for wheel in built:
            publish(layout.mounted_share, key, wheel, steps.say)


def candidates(share: str, key: str | None) -> list[str]:
    """Horovod wheels on the share: those of our content key first, then those of none; those of another key are for others."""
    found = []
    for folder, _, names in os.walk(os.path.join(share, WHEELS)):
        own = os.path.basename(folder)
        if key and own != key and _KEY.search(own):
            continue
        found += [(own != key, os.path.join(folder, name)) for name in names if WHEEL.match(name)]
    return [path for _, path in sorted(found)]


def _copied(share: str, name: str, target: str) -> str:
    """Copy what can be had of a wheel of the share to this node's disk; the copy's SHA-256.

    Raises:
        OSError: this node's disk doesn't take it.
    """
    digest = hashlib.sha256()
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "wb") as copy:
        for block in _blocks(share, name):
            digest.update(block)
            copy.write(block)
    return digest.hexdigest()


def _blocks(share: str, name: str) -> Iterator[bytes]:
    with contextlib.suppress(OSError), safeopen.open_file(share, name) as file:
        yield from itertools.islice(iter(lambda: file.read(1 << 20), b""), MOST_BYTES >> 20)


def content(python: str, framework: str, variables: Mapping[str, str]) -> tuple[str | None, bool]:
    """(what a wheel for this interpreter and node is made of, in one name; whether it has to have NCCL).

    No name can be said of an interpreter without the framework. NCCL has to be where the node has GPUs and PyTorch is for them.
    """
    # Only here: few jobs need it, and every agent would pay for the import.
    from mlflow_batchai.horovod_wheel import HorovodBuildError
    from mlflow_batchai.horovod_wheel.environment import cache_key, flags
    from mlflow_batchai.horovod_wheel.gpus import choose
    from mlflow_batchai.horovod_wheel.interpreter import probe

    try:
        interpreter = probe(python, framework)
        target = choose(interpreter, None, (), variables)
    except HorovodBuildError:
        return None, False
    nccl = target is not None and flags(framework, variables, target).get("HOROVOD_GPU_OPERATIONS") == "NCCL"
    return cache_key(interpreter, variables, target), nccl


def publish(share: str, key: str, wheel: str, say: Callable[[str], None]) -> None:
    """Put a wheel on the share, whole or not at all. A share that won't take it is a note: this node has its own.

    Others may read it, as far as they may read the share's root; nobody may write it: clients vouch for no other.
    """
    bits = permissions.bits_of(share)
    folder = os.path.join(share, WHEELS, key)
    target = os.path.join(folder, os.path.basename(wheel))
    part = os.path.join(folder, f".{uuid.uuid4().hex}.part")
    try:
        if os.path.exists(target):
            return
        permissions.make_folders(folder, bits)
        flags = os.O_WRONLY | os.O_EXCL | os.O_NOFOLLOW
        with open(wheel, "rb") as source, open(permissions.create(part, flags, bits & 0o044), "wb") as file:
            shutil.copyfileobj(source, file)
        os.rename(part, target)
    except OSError as error:
        say(f"the Horovod wheel could not be put on the share for others: {error}")
    else:
        say(f"the Horovod wheel is on the share for others: {os.path.relpath(target, share)}")


def check_version(requirements: list[str], layout: NodeLayout) -> None:
    """Raise a Failure if the project asks for another Horovod than the one that can be built."""
    for line in requirements:
        version = _version(line)
        if version.startswith("==") and version[2:].strip() not in (HOROVOD_VERSION, "0.28.*", "0.*"):
            raise Failure(
                protocol.ENVIRONMENT_FAILED,
                f"python_env.yaml asks for '{line}'; only horovod=={HOROVOD_VERSION} can be built for today's frameworks, and"
                f" {WHEELS}/ on the share has no other that works",
                node=layout.node,
            )


def _version(line: str) -> str:
    match = REQUIREMENT.match(line)
    return match.group("version").strip() if match else ""
