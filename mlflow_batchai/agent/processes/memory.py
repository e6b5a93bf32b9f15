"""Detect from the kernel's counters whether it has killed a process for lack of memory.

Counters of ``/proc/vmstat`` are the machine's; those of a control group (version 2: ``memory.events``, version 1:
``memory.oom_control``) tell of what ran in it, and its limit may have been reached long before the machine's memory was.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import NamedTuple

from mlflow_batchai.agent.processes import proc

GROUPS = "/sys/fs/cgroup"
WHAT_TO_DO = "lower the batch size, run fewer ranks on a node, or take nodes with more memory"


class Group(NamedTuple):
    """A control group: its limits and counters.

    Attributes:
        killed: how many of its processes were killed for want of memory.
        reached: how often its own limit was.
        limit: bytes, None: it has none.
    """

    killed: int
    reached: int
    limit: int | None


class Counters(NamedTuple):
    """Counters of the kernel.

    Attributes:
        machine: processes killed for want of memory, on the whole machine; None: it doesn't say.
        groups: folder -> control group, from a process's own up to the root.
    """

    machine: int | None
    groups: Mapping[str, Group]


def counters(pid: int) -> Counters:
    killed = numbers(proc.kernel_text("/proc/vmstat")).get("oom_kill")
    found: dict[str, Group] = {}
    for folder in group_folders(proc.kernel_text(f"/proc/{pid}/cgroup")):
        group = _group(folder)
        if group:
            found[folder] = group
    return Counters(killed, found)


def ran_out(before: Counters, now: Counters, total: int | None = None) -> str | None:
    """Explain a killed process by the counters before and now; None: the kernel killed none for lack of memory.

    Args:
        total: bytes of memory that the machine has, None: not known.
    """
    for folder, group in now.groups.items():
        earlier = before.groups.get(folder, Group(0, 0, None))
        if group.limit is not None and group.reached > earlier.reached and group.killed > earlier.killed:
            return f"the memory limit of its control group was reached ({size(group.limit)}); raise it, or {WHAT_TO_DO}"
    risen = [group.killed > before.groups[folder].killed for folder, group in now.groups.items() if folder in before.groups]
    if any(risen) or (now.machine or 0) > (before.machine or 0):
        return f"the machine ran out of memory{(f' (it has {size(total)})' if total else '')}; {WHAT_TO_DO}"
    return None


def group_folders(text: str, resource: str = "memory") -> list[str]:
    """The folders in which a process's memory (or another resource) is counted, its own first.

    Args:
        text: its ``/proc/PID/cgroup``.
        resource: as version 1 calls it.
    """
    found: list[str] = []
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if number == "0" and not kinds:
            roots = [GROUPS, GROUPS + "/unified"]
        elif resource in kinds.split(","):
            roots = [GROUPS + "/" + resource]
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for root in roots:
            # In a container the paths may be those of the machine, of which only the container's own root is to be seen.
            found += [os.path.join(root, *parts[:count]) for count in range(len(parts), -1, -1)]
    return found


def numbers(text: str) -> dict[str, int]:
    """Lines of a name and a number."""
    pairs = [line.split() for line in text.splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count >> 20} MiB"


def machine_bytes() -> int | None:
    with contextlib.suppress(ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _group(folder: str) -> Group | None:
    events = numbers(proc.kernel_text(folder + "/memory.events"))
    if events:
        return Group(events.get("oom_kill", 0), events.get("oom", 0), _limit(proc.kernel_text(folder + "/memory.max")))
    control = numbers(proc.kernel_text(folder + "/memory.oom_control"))
    if not control:
        return None
    reached = proc.kernel_text(folder + "/memory.failcnt").strip()
    limit = _limit(proc.kernel_text(folder + "/memory.limit_in_bytes"))
    return Group(control.get("oom_kill", 0), int(reached) if reached.isdigit() else 0, limit)


def _limit(text: str) -> int | None:
    # Version 1 has no word for "none": a number that no machine comes to.
    return int(text) if text.strip().isdigit() and int(text) < 1 << 60 else None
