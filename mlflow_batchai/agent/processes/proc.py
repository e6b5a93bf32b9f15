"""Find and end the processes of a job on one node, and adopt those whose parent has ended.

Linux only. A process belongs to a job if its environment carries the job's mark, or if it descends from the agent: the agent
makes itself a child subreaper, so a process that called setsid, or whose parent died, comes back to it.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable

try:
    import ctypes
except ImportError:  # a Python that was built without libffi: what it is for fails as where the kernel can't
    ctypes = None  # type: ignore[assignment]

from mlflow_batchai.agent.protocol import MARK_VARIABLE, NODE_VARIABLE, is_marked

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# An exec takes less than a millisecond from its new memory to the environment in it, but may be interrupted there: on a busy
# machine for tens of milliseconds, where a group of processes has used up its share of the processors for longer.
EXEC_PAUSES = (0.001, 0.003, 0.009, 0.027, 0.08, 0.25, 0.5, 1.0)
# Nobody waits longer than this many of them for one that was started without any environment.
BARE_PAUSES = 4
# Of a sweep that has only so many seconds: the last of them are for SIGKILL.
KILL_SECONDS = 2.0


def _prctl(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)
    except (AttributeError, OSError):
        return False


def become_subreaper() -> bool:
    """Make orphans among our descendants our children, so that none can slip away; False where the kernel can't."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def as_child(umask: int) -> Callable[[], None]:
    """A ``preexec_fn`` that sets the child's umask, and has it killed when the agent dies; the library is loaded before the
    fork."""
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (AttributeError, OSError):
        prctl = None

    def prepare() -> None:
        os.umask(umask)
        if prctl:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return prepare


def kernel_text(path: str) -> str:
    """A small file, such as the kernel's; empty if it can't be read."""
    with contextlib.suppress(OSError), open(path, encoding="ascii", errors="replace") as file:
        return file.read()
    return ""


def _stat(pid: int) -> list[bytes]:
    """The fields of a process's stat file (proc(5)) from its state on; raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, None when it has ended: with the pid it is unique."""
    try:
        fields = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if _has_ended(pid, fields[0]) else int(fields[19])


def _has_ended(pid: int, state: bytes) -> bool:
    """Whether nothing of a process in this state runs any more.

    A main thread is a zombie as soon as it has ended itself. Others may outlive it: of a killed process those in which the
    driver still frees its GPU, which the next job couldn't use yet.
    """
    if state not in (b"Z", b"X"):
        return False
    try:
        return len(os.listdir(f"/proc/{pid}/task")) < 2
    except OSError:
        return True


def boot_id() -> str:
    """Id of this boot of this machine, empty if unknown; containers on it share it."""
    return kernel_text("/proc/sys/kernel/random/boot_id").strip()


def identity() -> dict[str, Any]:
    """This very process, so that another one on this machine can tell for certain that it is gone; ``host`` is for people."""
    machine = boot_id()
    try:
        # A container shares the boot id and has pids of its own.
        machine = machine and machine + " " + os.readlink("/proc/self/ns/pid")
    except OSError:
        machine = ""
    return {"machine": machine, "pid": os.getpid(), "started": start_time(os.getpid()), "host": socket.gethostname()}


def is_certainly_gone(other: Mapping[str, Any]) -> bool:
    """Whether the process of an ``identity`` is gone; False whenever that can't be seen from here."""
    return _is_here(other) and not is_alive(other["pid"], other["started"])


def is_certainly_alive(other: Mapping[str, Any]) -> bool:
    """Whether the process of an ``identity`` lives; False whenever that can't be seen from here."""
    return _is_here(other) and is_alive(other["pid"], other["started"])


def _is_here(other: Mapping[str, Any]) -> bool:
    machine = identity()["machine"]
    return bool(machine) and other.get("machine") == machine


def is_alive(pid: int, started: int) -> bool:
    """Whether this very process still runs (a reused pid has another start time)."""
    return start_time(pid) == started


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped (SIGSTOP) and has not gone on."""
    with contextlib.suppress(OSError):
        return _stat(pid)[0] in (b"T", b"t")
    return False


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def marked(mark: str, node: int | None = None, variable: str = MARK_VARIABLE) -> set[int]:
    """Pids whose environment carries the job's mark (``is_marked``; and the node's index, where one machine stands for several
    nodes)."""
    place = None if node is None else f"{NODE_VARIABLE}={node}".encode()
    beginning = f"{variable}=".encode()
    found = set()
    read = {pid: _environment(pid) for pid in pids()}
    for number, pause in enumerate(EXEC_PAUSES):
        # One that is just starting another program has no environment for a moment, and would be missed.
        hollow = [pid for pid, text in read.items() if text == b"" and _has_program(pid)]
        if number >= BARE_PAUSES:
            hollow = [pid for pid in hollow if not _is_bare(pid)]
        if not hollow:
            break
        time.sleep(pause)
        read.update((pid, _environment(pid)) for pid in hollow)
    for pid, text in read.items():
        variables = (text or b"").split(b"\0")
        marks = [os.fsdecode(one[len(beginning) :]) for one in variables if one.startswith(beginning)]
        ours = any(is_marked(one, mark) for one in marks) and (place is None or place in variables)
        if ours and start_time(pid) is not None:
            found.add(pid)
    found.discard(os.getpid())
    return found


def _environment(pid: int) -> bytes | None:
    """A process's environment as it was started with; None: it is gone, or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return None


def _has_program(pid: int) -> bool:
    """Whether it is neither a zombie nor one of the kernel's own."""
    try:
        return bool(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


def _is_bare(pid: int) -> bool:
    """Whether it was started without any environment: its room for one has a place in memory, and no length (proc(5))."""
    with contextlib.suppress(OSError):
        fields = _stat(pid)
        return fields[47] == fields[48] != b"0"
    return False


def arguments() -> set[str]:
    return {word for pid in pids() for word in command_line(pid)}


def command_line(pid: int) -> list[str]:
    """The words of a process's command line; none of one that has gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    except OSError:
        return []


def lock_holders(path: str) -> set[int]:
    """Pids that hold a flock on this file, inherited ones too (Linux shows it in ``/proc/PID/fdinfo``)."""
    real = os.path.realpath(path)
    found = set()
    for name in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it is closed by now, or another user's
            if os.readlink(name) == real and "FLOCK" in kernel_text(name.replace("/fd/", "/fdinfo/")):
                found.add(int(name.split("/")[2]))
    found.discard(os.getpid())
    return found


def descendants(ancestor: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid in pids():
        try:
            fields = _stat(pid)
        except OSError:
            continue
        if not _has_ended(pid, fields[0]):
            children.setdefault(int(fields[1]), []).append(pid)
    found: set[int] = set()
    todo = [ancestor]
    while todo:
        for pid in children.get(todo.pop(), []):
            if pid not in found:
                found.add(pid)
                todo.append(pid)
    return found


def parent(pid: int) -> int | None:
    """The parent of a process, None when it is gone."""
    try:
        return int(_stat(pid)[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def ask(argv: Sequence[str], environment: Mapping[str, str], seconds: float) -> tuple[int | None, str]:
    """Run a program that may hang: what it asks (a driver, a file server) can hold its processes for ever.

    Returns:
        Its exit code (None: it was killed after ``seconds``, or can't be started), and its output of both kinds.
    """
    try:
        process = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return None, f"{argv[0]} can't be run: {error.strerror}"
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):  # it has just ended, and was collected with the agent's other children; or is root's
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.returncode = -signal.SIGKILL  # it hangs in the kernel; waiting for it would hang us too
        assert process.stdout
        process.stdout.close()
        command = " ".join([os.path.basename(argv[0]), *argv[1:]])
        return None, f"{command} did not answer within {seconds:.0f} s"
    return process.returncode, output.decode("utf-8", "replace")


def reap() -> dict[int, int]:
    """Collect all ended children that nobody else waits for: {pid: wait status}."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def send(pids: set[int], number: int) -> None:
    """Send a signal to each; those already gone are fine."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def sweep(
    find: Callable[[], set[int]],
    grace: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    give_up: float = 30.0,
    rest: Callable[[], float] = lambda: math.inf,
) -> set[int]:
    """End all that ``find`` finds: SIGTERM, after ``grace`` seconds SIGKILL (once at least), until nothing is left.

    Args:
        sleep: may raise what is to end the sweep.
        rest: seconds that it may still take, asked again and again: ``grace`` and ``give_up`` end earlier with them.

    Returns:
        What is still there after ``grace + give_up`` seconds (a process in uninterruptible sleep), usually nothing.
    """
    begun = clock()
    terminated: set[int] = set()
    killed = False
    while True:
        found = find()
        if not found or (killed and (clock() - begun > grace + give_up or rest() <= 0)):
            return found
        if not killed and clock() - begun < grace and rest() > KILL_SECONDS:
            send(found - terminated, signal.SIGTERM)
            terminated |= found
        else:
            send(found, signal.SIGKILL)
            killed = True
        sleep(0.05)


def main(arguments: list[str]) -> int:
    """``sweep MARK [NODE]``: end all that carries the mark; prints what would not go, exit code 1 if anything is left."""
    node = int(arguments[1]) if len(arguments) > 1 else None
    left = sweep(lambda: marked(arguments[0], node), grace=3.0)
    print(" ".join(str(pid) for pid in sorted(left)))
    return 1 if left else 0
