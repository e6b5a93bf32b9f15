"""Which process a ticket's agent is: written on the node itself, and known there even if the answer to `start` was lost."""

import contextlib
import fcntl
import json
import os
from typing import Any, Dict, Iterator, List, Optional

from mlflow_batchai.agent import processes, tickets

Agent = Dict[str, Any]


@contextlib.contextmanager
def locked(root: str, number: int) -> Iterator[None]:
    """While this is held nobody else starts an agent for the ticket, or writes who it is."""
    path = _path(root, number)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with open(os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write(root: str, number: int, pid: int, log: str) -> Agent:
    """Write who the agent is (under ``locked``).

    Returns:
        ``pid``, ``started``, ``boot`` (the boot that they belong to), ``root``, ``log``.
    """
    path = _path(root, number)
    found = {"pid": pid, "started": processes.start_time(pid), "boot": processes.boot_id(), "root": root, "log": log}
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(found, file)
    os.replace(path + ".new", path)
    return found


def sign(root: str, number: int) -> None:
    """Called by the agent that has claimed the ticket: whoever else was started for it, this is the one."""
    with locked(root, number):
        write(root, number, os.getpid(), os.readlink("/proc/self/fd/2"))


def read(root: str, number: int) -> Optional[Agent]:
    """Who a ticket's agent is; None if none was started here."""
    return _read(_path(root, number))


def is_alive(agent: Agent) -> bool:
    """Whether it lives: an earlier boot's doesn't, nor one whose number another process has by now."""
    same_boot = agent["boot"] == processes.boot_id()
    return same_boot and agent["started"] is not None and processes.is_alive(agent["pid"], agent["started"])


def known(root: str) -> List[int]:
    """The tickets that an agent was started for on this node, as far as that wasn't long ago."""
    folder = os.path.join(root, "tickets")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    numbers = [name[: -len(".agent")] for name in names if name.endswith(".agent")]
    return sorted(int(number) for number in numbers if number.isdigit())


def living(root: str) -> List[Agent]:
    """All agents that live on this node."""
    found = [read(root, number) for number in known(root)]
    return [agent for agent in found if agent and is_alive(agent)]


def _path(root: str, number: int) -> str:
    return tickets.ticket_path(root, number) + ".agent"


def _read(path: str) -> Optional[Agent]:
    try:
        with open(path, encoding="utf-8") as file:
            found: Agent = json.load(file)
            return found
    except (OSError, ValueError):
        return None
