"""What the job's own processes on a node use: where several nodes share a machine nothing else tells them apart."""

import os
import time
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from mlflow_batchai.node.meters.machine import MEGABYTE, Values


class Process(NamedTuple):
    """What ``/proc/PID/stat`` says of a process: its parent, when it started, its ticks on processors, its pages in memory."""

    parent: int
    started: int
    ticks: int
    pages: int


class Family:
    """The meter of all processes below one.

    Args:
        ancestor: its pid; it is not counted itself.
        others: pids of more of them, which have another parent (in a container).
        proc: ``/proc``.
        clock: seconds.
    """

    def __init__(
        self,
        ancestor: int,
        others: Callable[[], Iterable[int]] = tuple,
        proc: str = "/proc",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ancestor = ancestor
        self._others = others
        self._proc = proc
        self._clock = clock
        # Pids of processes that are not of the family: a machine may have thousands, which are looked at once.
        self._foreign: Set[int] = set()
        self._ticks: Dict[Tuple[int, int], int] = {}
        self._looked: Optional[float] = None
        self._tick = float(os.sysconf("SC_CLK_TCK"))
        self._page = os.sysconf("SC_PAGE_SIZE")
        self.look()

    def look(self) -> Values:
        """The values now: of one core that is busy all the time 100 %; memory that several share counts for each of them."""
        now, members = self._clock(), self._members()
        ticks = {(pid, process.started): process.ticks for pid, process in members.items()}
        used = sum(count - self._ticks.get(which, 0) for which, count in ticks.items())
        before, self._looked, self._ticks = self._looked, now, ticks
        found = {"process_memory_megabytes": sum(process.pages for process in members.values()) * self._page / MEGABYTE}
        if before is not None and now > before:
            found["process_cpu_percentage"] = 100.0 * used / self._tick / (now - before)
        return found

    def _members(self) -> Dict[int, Process]:
        others = set(self._others())
        there = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        self._foreign &= there - others
        read = {pid: self._stat(pid) for pid in there - self._foreign}
        known = {pid: process for pid, process in read.items() if process}
        ours = others & known.keys()
        for pid in known:
            line: List[int] = []
            while pid in known and pid not in ours and pid != self._ancestor and pid not in line:
                line.append(pid)
                pid = known[pid].parent
            if pid == self._ancestor or pid in ours:
                ours.update(line)
            elif pid == 0 or pid in self._foreign:
                self._foreign.update(line)
            # Else its parent has gone just now: it is looked at again.
        return {pid: known[pid] for pid in ours}

    def _stat(self, pid: int) -> Optional[Process]:
        try:
            with open("%s/%d/stat" % (self._proc, pid), "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # it has gone
            return None
        return Process(int(fields[1]), int(fields[19]), int(fields[11]) + int(fields[12]), int(fields[21]))
