"""What is used of the machine: processors, memory, network, disk, as far as they are the node's.

Names and units are those of MLflow's own system metrics: a megabyte is 10^6 bytes. A control group that limits the node (a
container's) counts instead of the machine: what it may use is all that there is for its job.
"""

import os
import time
from typing import AbstractSet, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from mlflow_batchai.node import memory

MEGABYTE = 1e6

Values = Dict[str, float]


class Limit(NamedTuple):
    """A control group that limits what the node may use.

    Attributes:
        folder: where its files lie.
        most: cores, or bytes of memory.
    """

    folder: str
    most: float


class Machine:
    """The meter of one node.

    Args:
        disk: a folder on the disk that the node's jobs fill.
        proc: ``/proc``.
        links: a folder with an entry for each network interface.
        clock: seconds.
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
        own = read(proc + "/self/cgroup")
        self._cores = os.sched_getaffinity(0)
        self._processors = processor_limit(own, len(self._cores))
        self._memory = memory_limit(own, memory.machine_bytes())
        self._busy: Optional[Tuple[float, float]] = None
        self._interfaces: Dict[str, Tuple[int, int]] = {}
        self._moved = [0, 0]
        self.look()

    def look(self) -> Values:
        """The values now; those of processors are over the time since the look before, those of the network since the first."""
        found: Values = {}
        for values in (self._processor_use(), self._memory_use(), self._disk_use(), self._network_use()):
            found.update(values)
        return found

    def _processor_use(self) -> Values:
        if self._processors:
            used = group_seconds(self._processors.folder)
            now = None if used is None else (used, self._clock() * self._processors.most)
        else:
            now = cpu_times(read(self._proc + "/stat"), self._cores)
        before, self._busy = self._busy, now
        if now is None or before is None or now[1] <= before[1]:
            return {}
        share = (now[0] - before[0]) / (now[1] - before[1])
        return {"cpu_utilization_percentage": 100.0 * min(1.0, max(0.0, share))}

    def _memory_use(self) -> Values:
        if self._memory:
            used, total = group_bytes(self._memory.folder), self._memory.most
        else:
            used, total = memory_bytes(read(self._proc + "/meminfo"))
        if used is None or not total:
            return {}
        return {
            "system_memory_usage_megabytes": used / MEGABYTE,
            "system_memory_usage_percentage": 100.0 * used / total,
        }

    def _disk_use(self) -> Values:
        disk = os.statvfs(self._disk)
        used, free = (disk.f_blocks - disk.f_bfree) * disk.f_frsize, disk.f_bavail * disk.f_frsize
        # What root alone may fill is nobody's. MLflow's two numbers of megabytes are left out: a run of many nodes has so many
        # system metrics that each one hides the model's own in its tables.
        return {"disk_usage_percentage": 100.0 * used / max(1, used + free)}

    def _network_use(self) -> Values:
        now = interface_bytes(read(self._proc + "/net/dev"))
        for name in counted(list(now), self._links):
            # One that has come since then counts from nothing; one that was made anew, or whose counter ran over, too.
            before = self._interfaces.get(name, (0, 0) if self._interfaces else now[name])
            for way in range(2):
                self._moved[way] += now[name][way] - (before[way] if before[way] <= now[name][way] else 0)
        self._interfaces = now
        return {
            "network_receive_megabytes": self._moved[0] / MEGABYTE,
            "network_transmit_megabytes": self._moved[1] / MEGABYTE,
        }


# Texts of the kernel.


def cpu_times(text: str, cores: AbstractSet[int]) -> Optional[Tuple[float, float]]:
    """(ticks in which those cores were busy, all their ticks) of ``/proc/stat``; None: it doesn't say."""
    busy = total = 0
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if not (name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores):
            continue
        # user, nice, system, idle, iowait, irq, softirq, steal; time of guests is among user's.
        ticks = [int(number) for number in rest.split()[:8]]
        total += sum(ticks)
        busy += sum(ticks) - sum(ticks[3:5])
    return (busy, total) if total else None


def memory_bytes(text: str) -> Tuple[Optional[float], float]:
    """(bytes in use, bytes in all) of ``/proc/meminfo``: what the kernel would give to a program at once is not in use."""
    kilobytes = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isdigit():
            kilobytes[name] = int(number[0])
    total = kilobytes.get("MemTotal", 0)
    # Kernels before 3.14 have no word for it.
    free = kilobytes.get("MemAvailable", sum(kilobytes.get(name, 0) for name in ("MemFree", "Buffers", "Cached")))
    return (1024.0 * (total - free), 1024.0 * total) if total else (None, 0.0)


def interface_bytes(text: str) -> Dict[str, Tuple[int, int]]:
    """Interface -> (bytes received, bytes sent), of ``/proc/net/dev``."""
    found = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        numbers = rest.split()
        if colon and len(numbers) >= 9 and numbers[0].isdigit() and numbers[8].isdigit():
            found[name.strip()] = (int(numbers[0]), int(numbers[8]))
    return found


def counted(names: List[str], links: str) -> List[str]:
    """The interfaces through which a node's traffic goes, each byte once.

    That are the machine's cards: bridges, bonds and tunnels send through them, and one that is a part of another card (as in
    Azure's accelerated networking) is counted there. Where there is none (in a container) all count but loopback.
    """
    cards = [name for name in names if os.path.exists(os.path.join(links, name, "device"))]
    outer = {name: os.path.basename(os.path.realpath(os.path.join(links, name, "master"))) for name in cards}
    return [name for name in cards if outer[name] not in cards] or [name for name in names if name != "lo"]


# Control groups.


def processor_limit(own: str, cores: int) -> Optional[Limit]:
    """The group that leaves a process the least time on its cores; None: it may use them all.

    Args:
        own: its ``/proc/PID/cgroup``.
        cores: on how many it may run.
    """
    limits = []
    for folder in memory.group_folders(own, "cpu"):
        words = (read(folder + "/cpu.max") or read(folder + "/cpu.cfs_quota_us")).split()
        period = words[1] if len(words) > 1 else read(folder + "/cpu.cfs_period_us").strip()
        if words and words[0].isdigit() and period.isdigit() and int(period):
            limits.append(Limit(folder, int(words[0]) / int(period)))
    return min((limit for limit in limits if 0 < limit.most < cores), key=lambda limit: limit.most, default=None)


def memory_limit(own: str, total: Optional[int]) -> Optional[Limit]:
    """The group that leaves a process the least memory; None: it may use all that the machine has."""
    limits = []
    for folder in memory.group_folders(own):
        text = (read(folder + "/memory.max") or read(folder + "/memory.limit_in_bytes")).strip()
        if text.isdigit():
            limits.append(Limit(folder, float(text)))
    most = float(total or "inf")
    return min((limit for limit in limits if 0 < limit.most < most), key=lambda limit: limit.most, default=None)


def group_seconds(folder: str) -> Optional[float]:
    """Seconds that a group's processes have run, on all cores together; None: it doesn't say."""
    used = memory.numbers(read(folder + "/cpu.stat")).get("usage_usec")
    if used is not None:
        return used / 1e6
    # Version 1 counts in another hierarchy, which most systems have in the same place.
    beside = (folder + "/").replace("/cpu/", "/cpuacct/", 1)
    text = (read(folder + "/cpuacct.usage") or read(beside + "cpuacct.usage")).strip()
    return int(text) / 1e9 if text.isdigit() else None


def group_bytes(folder: str) -> Optional[float]:
    """Bytes that a group's processes use and that can't be had back at once: what it caches of files isn't."""
    text = (read(folder + "/memory.current") or read(folder + "/memory.usage_in_bytes")).strip()
    if not text.isdigit():
        return None
    stat: Mapping[str, int] = memory.numbers(read(folder + "/memory.stat"))
    return float(max(0, int(text) - stat.get("total_inactive_file", stat.get("inactive_file", 0))))


def read(path: str) -> str:
    """A file of the kernel's; empty if it isn't there."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
