"""Processor, memory, disk and network metrics of a node, in all and of the job's own processes.

Names and units are those of MLflow's own system metrics: a megabyte is 10^6 bytes. The limit of a control group (a container's)
counts instead of the machine's size: it is all that the node's job may use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Callable

from mlflow_batchai.agent.processes import memory, proc
from mlflow_batchai.agent.processes.proc import kernel_text

MEGABYTE = 1e6

Values = dict[str, float]


class Machine:
    """The meter of one node; values of processors are over the time since the call before, of the network since the start.

    Args:
        links: a folder with an entry for each network interface.
    """

    def __init__(
        self,
        disk: str,
        proc: str = "/proc",
        links: str = "/sys/class/net",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._disk = disk
        self._proc = proc
        self._links = links
        self._clock = clock
        self._cores = os.sched_getaffinity(0)
        groups = kernel_text(f"{proc}/self/cgroup")
        # Folder of the control group with the lowest limit -> the limit: cores, bytes.
        self._core_limit = _lowest(memory.group_folders(groups, "cpu"), core_limit, len(self._cores))
        self._memory_limit = _lowest(memory.group_folders(groups), memory_limit, memory.machine_bytes() or float("inf"))
        self._busy: tuple[float, float] | None = None
        self._interfaces: dict[str, tuple[int, int]] = {}
        self._moved = [0, 0]
        self.look()

    def look(self) -> Values:
        """The values now; a value that the kernel doesn't tell is left out."""
        return {**self._processor_use(), **self._memory_use(), **self._disk_use(), **self._network_use()}

    def _processor_use(self) -> Values:
        if self._core_limit:
            folder, cores = self._core_limit
            used = group_seconds(folder)
            now = None if used is None else (used, self._clock() * cores)
        else:
            now = cpu_times(kernel_text(f"{self._proc}/stat"), self._cores)
        before, self._busy = self._busy, now
        if now is None or before is None or now[1] <= before[1]:
            return {}
        share = (now[0] - before[0]) / (now[1] - before[1])
        return {"cpu_utilization_percentage": 100.0 * min(1.0, max(0.0, share))}

    def _memory_use(self) -> Values:
        if self._memory_limit:
            folder, total = self._memory_limit
            used = group_bytes(folder)
        else:
            used, total = memory_bytes(kernel_text(f"{self._proc}/meminfo"))
        if used is None or not total:
            return {}
        return {"system_memory_usage_megabytes": used / MEGABYTE, "system_memory_usage_percentage": 100.0 * used / total}

    def _disk_use(self) -> Values:
        disk = os.statvfs(self._disk)
        used, free = disk.f_blocks - disk.f_bfree, disk.f_bavail  # what root alone may fill is left out
        return {"disk_usage_percentage": 100.0 * used / max(1, used + free)}

    def _network_use(self) -> Values:
        now = interface_bytes(kernel_text(f"{self._proc}/net/dev"))
        for name in counted(list(now), self._links):
            # An interface that was added or made anew counts from 0; the first call only remembers.
            before = self._interfaces.get(name, (0, 0) if self._interfaces else now[name])
            for way in range(2):
                self._moved[way] += now[name][way] - (before[way] if before[way] <= now[name][way] else 0)
        self._interfaces = now
        received, sent = self._moved
        return {"network_receive_megabytes": received / MEGABYTE, "network_transmit_megabytes": sent / MEGABYTE}


class JobProcesses:
    """The meter of the job's own processes: where nodes share a machine, it tells them apart.

    Args:
        ancestor: pid of the process above them; it is not counted itself.
        others: pids of more of them, which have another parent (in a container).
    """

    def __init__(self, ancestor: int, others: Callable[[], Iterable[int]] = tuple) -> None:
        self._ancestor = ancestor
        self._others = others
        self._looked: float | None = None
        # (pid, start time) -> ticks on processors.
        self._ticks: dict[tuple[int, int], int] = {}
        self.look()

    def look(self) -> Values:
        """The values now: one core that is busy all the time is 100 %; memory that several share counts for each of them."""
        now, pages, ticks = time.monotonic(), 0, {}
        for pid in proc.descendants(self._ancestor) | set(self._others()):
            fields = kernel_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
            if fields:  # else it has just ended
                ticks[pid, int(fields[19])] = int(fields[11]) + int(fields[12])
                pages += int(fields[21])
        used = sum(count - self._ticks.get(process, 0) for process, count in ticks.items())
        before, self._looked, self._ticks = self._looked, now, ticks
        found = {"process_memory_megabytes": pages * os.sysconf("SC_PAGE_SIZE") / MEGABYTE}
        if before is not None and now > before:
            found["process_cpu_percentage"] = 100.0 * used / os.sysconf("SC_CLK_TCK") / (now - before)
        return found


# Texts of the kernel.


def cpu_times(text: str, cores: Iterable[int]) -> tuple[float, float] | None:
    """(ticks in which those cores were busy, all their ticks) of ``/proc/stat``; None: it doesn't say."""
    lines = {name: rest.split() for name, _, rest in (line.partition(" ") for line in text.splitlines())}
    # user, nice, system, idle, iowait, irq, softirq, steal; time of guests is among user's.
    ticks = [[int(number) for number in lines[f"cpu{core}"][:8]] for core in cores if f"cpu{core}" in lines]
    total = sum(map(sum, ticks))
    return (total - sum(sum(one[3:5]) for one in ticks), total) if total else None


def memory_bytes(text: str) -> tuple[float | None, float]:
    """(bytes in use, bytes in all) of ``/proc/meminfo``: what the kernel would give to a program at once is not in use."""
    kilobytes = memory.numbers(text.replace(":", " ").replace(" kB", ""))
    if "MemTotal" not in kilobytes or "MemAvailable" not in kilobytes:
        return None, 0.0
    return 1024.0 * (kilobytes["MemTotal"] - kilobytes["MemAvailable"]), 1024.0 * kilobytes["MemTotal"]


def interface_bytes(text: str) -> dict[str, tuple[int, int]]:
    """Interface -> (bytes received, bytes sent), of ``/proc/net/dev``."""
    found = {}
    for line in text.splitlines()[2:]:
        name, _, rest = line.partition(":")
        numbers = rest.split()
        found[name.strip()] = (int(numbers[0]), int(numbers[8]))
    return found


def counted(names: list[str], links: str) -> list[str]:
    """The interfaces through which a node's traffic goes, each byte once.

    They are the machine's network cards: bridges, bonds and tunnels send through them, and a card that is a part of another one
    (in Azure's accelerated networking) is counted there. Where there is none (in a container) all count but loopback.
    """
    cards = [name for name in names if os.path.exists(os.path.join(links, name, "device"))]
    outer = {name: os.path.basename(os.path.realpath(os.path.join(links, name, "master"))) for name in cards}
    return [name for name in cards if outer[name] not in cards] or [name for name in names if name != "lo"]


# Control groups, of version 2 or 1.


def _lowest(folders: Iterable[str], limit_of: Callable[[str], float | None], most: float) -> tuple[str, float] | None:
    limits = [(folder, limit) for folder in folders for limit in [limit_of(folder)] if limit and limit < most]
    return min(limits, key=lambda each: each[1], default=None)


def core_limit(folder: str) -> float | None:
    """Number of cores that a group may use; None: all."""
    words = (kernel_text(f"{folder}/cpu.max") or kernel_text(f"{folder}/cpu.cfs_quota_us")).split()
    period = words[1] if len(words) > 1 else kernel_text(f"{folder}/cpu.cfs_period_us").strip()
    return int(words[0]) / int(period) if words and words[0].isdigit() and period.isdigit() else None


def memory_limit(folder: str) -> float | None:
    """Bytes of memory that a group may use; None: all."""
    return _number(kernel_text(f"{folder}/memory.max") or kernel_text(f"{folder}/memory.limit_in_bytes"))


def group_seconds(folder: str) -> float | None:
    """Seconds that a group's processes have run, on all cores together; None: it doesn't say."""
    used = memory.numbers(kernel_text(f"{folder}/cpu.stat")).get("usage_usec")
    if used is not None:
        return used / 1e6
    # Version 1 counts in another hierarchy, which most systems have in the same place.
    beside = f"{folder}/".replace("/cpu/", "/cpuacct/", 1)
    nanoseconds = _number(kernel_text(f"{folder}/cpuacct.usage") or kernel_text(f"{beside}cpuacct.usage"))
    return None if nanoseconds is None else nanoseconds / 1e9


def group_bytes(folder: str) -> float | None:
    """Bytes that a group's processes use and that can't be had back at once, as its cache of files can."""
    used = _number(kernel_text(f"{folder}/memory.current") or kernel_text(f"{folder}/memory.usage_in_bytes"))
    stat: Mapping[str, int] = memory.numbers(kernel_text(f"{folder}/memory.stat"))
    return None if used is None else max(0.0, used - stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _number(text: str) -> float | None:
    return float(text) if text.strip().isdigit() else None
