"""Commands in a container whose end takes the output of all below them: the engine's client waits for the first process only.

A shell dies of SIGTERM at once, while the program that it waits for still saves; what that writes then has no reader.
"""

import signal
from typing import Set

from mlflow_batchai.agent.processes import proc


def waiting(members: Set[int]) -> Set[int]:
    """Of what runs in a container the first process of each command, if something runs below it and SIGTERM would end it."""
    above = {pid: proc.parent(pid) for pid in members}
    parents = set(above.values())
    return {pid for pid, parent in above.items() if parent not in members and pid in parents and not _catches_sigterm(pid)}


def hold(pids: Set[int]) -> None:
    """Keep them from going on with their next command."""
    proc.send(pids, signal.SIGSTOP)


def release(pids: Set[int]) -> None:
    """Let them go on, to SIGTERM and nothing else."""
    proc.send(pids, signal.SIGTERM)
    proc.send(pids, signal.SIGCONT)


def _catches_sigterm(pid: int) -> bool:
    try:
        with open("/proc/%d/status" % pid, encoding="ascii", errors="replace") as file:
            masks = [line.split()[1] for line in file if line.startswith(("SigCgt:", "SigIgn:"))]
    except OSError:  # it has gone
        return False
    return any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in masks)
