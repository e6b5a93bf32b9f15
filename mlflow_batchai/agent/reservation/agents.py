"""The agents of a node's reservations, from files on its own disk: which has come, its process, its last report.

An agent keeps the file of its reservation locked while it lives. Node roots are folders on the node's own disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Sequence
from typing import IO, Any, Callable

from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.reservation import locks

# A reservation whose agent hasn't come within this many seconds is given up: its submitter died between two steps.
ARRIVAL_SECONDS = 60.0
# Others give it up this much later: between machines an age is known no better than a question and its answer take.
MARGIN_SECONDS = 15.0
# A waiting agent may still look for a file that has just become free, and finding it gone reads as ended too.
ENDED_SECONDS = 86400.0
LEFTOVER_SECONDS = 30 * 86400.0

WAITING, HELD, ENDED = "waiting", "held", "ended"

Record = dict[str, Any]

_NUMBERED = re.compile(r"^(?P<number>\d+)\.")


class LateError(Exception):
    """The agent came when its reservation had been given up: others may have the node before it, here but not elsewhere."""


class TwinError(Exception):
    """The reservation has its agent already: the second one must not say a word in its name."""


def path_of(root: str, number: int) -> str:
    """The file that the agent of this reservation keeps locked on its node."""
    return os.path.join(root, "tickets", str(number))


def state(root: str, number: int, taken: float, now: float) -> str:
    """``waiting`` (its agent hasn't come), ``held`` (its agent lives) or ``ended``, as seen on that node."""
    try:
        with open(path_of(root, number)) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return HELD
            return ENDED
    except FileNotFoundError:
        # A clock that was set back a little since must not end it either.
        return WAITING if abs(now - taken) < ARRIVAL_SECONDS + MARGIN_SECONDS else ENDED


def claim(root: str, number: int, taken: float, clock: Callable[[], float] = time.time) -> IO[str]:
    """Called by the agent at its start: the file of its reservation, open and locked; it must stay open.

    Raises:
        TwinError: another agent has it, or had it.
        LateError: it has been given up (and the order of the queue would be lost if we went on).
    """
    path = path_of(root, number)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    # Locked before it has its name: nobody may see it there and free.
    new = f"{path}.{os.getpid()}"
    file = open(new, "a")  # noqa: SIM115 (it lives as long as the agent)
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        os.link(new, path)
    except FileExistsError:
        file.close()
        raise TwinError(f"the reservation {number} has its agent already") from None
    finally:
        os.unlink(new)
    # Asked last: who looked in time saw the file, and who looks later sees it.
    if abs(clock() - taken) >= ARRIVAL_SECONDS:
        file.close()
        raise LateError(f"its agent came more than {ARRIVAL_SECONDS:.0f} s after the node was reserved; submit again")
    return file


def before(root: str, after: Sequence[int], taken: float, now: float) -> list[int]:
    """Select the earlier reservations that still stand before ours on this node."""
    return [number for number in after if state(root, number, taken, now) != ENDED]


# What an agent says of itself.


def report(root: str, number: int, said: Record) -> None:
    """Write what the engine's poll can say of this node without the share."""
    _replace(path_of(root, number) + ".state", said)


def last_report(root: str, number: int) -> Record:
    """The last report of a reservation's agent; empty if there is none."""
    return _read(path_of(root, number) + ".state") or {}


def locked(root: str, number: int) -> contextlib.AbstractContextManager[None]:
    """While this is held nobody else starts an agent for the reservation, or writes which process it is."""
    path = path_of(root, number) + ".agent.lock"
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    return locks.held(path)


def write(root: str, number: int, pid: int, log: str) -> Record:
    """Write which process the agent is (under ``locked``): known here even if the answer to ``start`` was lost.

    Returns:
        ``pid``, ``started``, ``boot`` (the boot that they belong to), ``root``, ``log``.
    """
    found = {"pid": pid, "started": proc.start_time(pid), "boot": proc.boot_id(), "root": root, "log": log}
    _replace(path_of(root, number) + ".agent", found)
    return found


def sign(root: str, number: int) -> None:
    """Called by the agent that has claimed the reservation: whoever else was started for it, this is the one."""
    with locked(root, number):
        write(root, number, os.getpid(), os.readlink("/proc/self/fd/2"))


def read(root: str, number: int) -> Record | None:
    """The record of a reservation's agent; None if none was started here."""
    return _read(path_of(root, number) + ".agent")


def is_alive(agent: Record) -> bool:
    """Whether it lives: an earlier boot's doesn't, nor one whose number another process has by now."""
    same_boot = agent["boot"] == proc.boot_id()
    return same_boot and agent["started"] is not None and proc.is_alive(agent["pid"], agent["started"])


def known(root: str) -> dict[int, Record]:
    """Number -> record of the agents that were started on this node, as far as that wasn't long ago."""
    found = {}
    for name in _names(root):
        number, _, ending = name.partition(".")
        agent = read(root, int(number)) if ending == "agent" and number.isdigit() else None
        if agent is not None:
            found[int(number)] = agent
    return found


def living(root: str) -> list[Record]:
    """All agents that live on this node."""
    return [agent for agent in known(root).values() if is_alive(agent)]


def states(root: str) -> dict[str, str]:
    """Number, as text, -> ``waiting``, ``held`` or ``ended``, of the reservations whose agents have come."""
    return {
        str(number): last_report(root, number).get("state", WAITING) if is_alive(agent) else ENDED
        for number, agent in sorted(known(root).items())
    }


def forget_ended(root: str, now: float) -> None:
    """Remove what ended reservations have left (called by an agent that holds the node); files without one after 30 days."""
    for name in _names(root):
        path, found = os.path.join(root, "tickets", name), _NUMBERED.match(name)
        with contextlib.suppress(OSError):
            age = now - os.lstat(path).st_mtime
            if name.isdigit() and age > ENDED_SECONDS and state(root, int(name), 0, now) == ENDED:
                for ending in ("", ".state", ".agent", ".agent.lock"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path + ending)
            elif found and age > LEFTOVER_SECONDS and not os.path.exists(path_of(root, int(found.group("number")))):
                os.unlink(path)


# Whether the node takes jobs.


def drained_path(root: str) -> str:
    """The file that is there as long as the node takes no jobs."""
    return os.path.join(root, "closed")


def is_drained(root: str) -> bool:
    """Whether the node takes no jobs."""
    return os.path.exists(drained_path(root))


def drain(root: str, drained: bool) -> None:
    """Have the node take no job that hasn't got it yet, or take jobs again."""
    path = drained_path(root)
    if drained:
        with open(path, "a"):
            pass
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _names(root: str) -> list[str]:
    try:
        return os.listdir(os.path.join(root, "tickets"))
    except OSError:
        return []


def _replace(path: str, record: Record) -> None:
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(path + ".new", path)


def _read(path: str) -> Record | None:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
