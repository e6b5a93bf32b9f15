"""Which container this node has for a job, written on its disk, so that whoever comes after a killed agent can remove it."""

import contextlib
import json
import os
import shutil
import time
from typing import Any, Dict, Mapping, Optional

from mlflow_batchai.agent.containers.engines import Engine, ask, last_line, own_environment
from mlflow_batchai.agent.environment import for_engines
from mlflow_batchai.agent.protocol import is_marked

REMOVE_SECONDS = 20.0
PAUSE_SECONDS = 0.2


def remember(root: str, engine: Engine, name: str, mark: str, login: str) -> None:
    """Write down a container that is about to be made.

    Args:
        mark: the job's.
        login: the folder in which the registry's password is while the image is pulled.
    """
    record = {
        "engine": list(engine),
        "name": name,
        "mark": mark,
        # Where the daemon is, and its storage: who removes the container may have been started elsewhere.
        "environment": for_engines(os.environ),
        "login": login,
    }
    path = _path(root)
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(path + ".new", path)


def has_one(root: str, mark: str) -> bool:
    """Whether the node may have a container of that job."""
    record = _read(root)
    return record is not None and is_marked(record["mark"], mark)


def sweep(root: str, mark: Optional[str] = None) -> Optional[str]:
    """Remove what a job has left of its container, and its registry's password; nothing to do is fine.

    Args:
        root: the node's own folder.
        mark: only that job's; None: whichever it was (its agent is dead, and we have the node).

    Returns:
        Why it is still there, as a sentence, or None.
    """
    record = _read(root)
    if record is None or (mark is not None and not is_marked(record["mark"], mark)):
        return None
    shutil.rmtree(record["login"], ignore_errors=True)
    trouble = remove(Engine(*record["engine"]), record["name"], {**own_environment(os.environ), **record["environment"]})
    if trouble is None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_path(root))
    return trouble


def remove(engine: Engine, name: str, environment: Mapping[str, str]) -> Optional[str]:
    """Remove a container, ending all that runs in it; one that isn't there is fine.

    Returns:
        Why it is still there, as a sentence, or None.
    """
    said = ""
    # podman waits seconds for the end of one whose monitor is dead, unless it is told not to (from version 4).
    at_once = ["--time=0"] if engine.kind == "podman" else []
    for options in (at_once, at_once, []):
        # It may be going by itself just now; then, or if nobody has seen its end, engines say first that they can't remove it.
        argv = [engine.program, "rm", "--force", "--volumes", *options, name]
        code, said = ask(argv, environment, seconds=REMOVE_SECONDS)
        if code is None:
            break
        listing = [engine.program, "ps", "--all", "--quiet", "--filter=name=^%s$" % name]
        code, left = ask(listing, environment, seconds=REMOVE_SECONDS)
        if code == 0 and not left.strip():
            return None
        time.sleep(PAUSE_SECONDS)
    return "the container %s could not be removed: %s" % (name, last_line(said))


def _path(root: str) -> str:
    return os.path.join(os.path.expanduser(root), "container.json")


def _read(root: str) -> Optional[Dict[str, Any]]:
    try:
        with open(_path(root), encoding="utf-8") as file:
            found: Dict[str, Any] = json.load(file)
            return found
    except (OSError, ValueError):
        return None
