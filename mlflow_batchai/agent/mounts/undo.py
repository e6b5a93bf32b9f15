"""Undoing mounts, whoever was to do it: what an agent leaves that was killed would keep its node from ever being cleared."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import time
from typing import Iterator, List, NamedTuple, Sequence, Set

from mlflow_batchai.agent.mounts import table
from mlflow_batchai.agent.reservation import locks

STEP_SECONDS = 10.0
# While a rank that has just been killed still has a file open there.
BUSY_SECONDS = 1.0
LAST_SECONDS = 60.0
KILL_SECONDS = 1.0

# Folders in folders, and bytes of a path below the folder that is removed.
DEEPEST = 100
LONGEST = 1000


def unmount(path: str) -> str:
    """Undo the mount at a path: politely, after ``BUSY_SECONDS`` lazily.

    Returns:
        Why it is still there, in the words of the last command; empty: it is gone.
    """
    begun = time.monotonic()
    while True:
        mounted = table.at(path)
        if mounted is None:
            return ""
        if time.monotonic() - begun > LAST_SECONDS:
            return "it is mounted again each time"
        lazy = time.monotonic() - begun > BUSY_SECONDS
        why = ""
        for argv in _commands(mounted, lazy):
            why = _run(argv)
            if not why:
                break
        if why and lazy:
            return why
        if why:
            time.sleep(0.1)


def _commands(mounted: table.Mounted, lazy: bool) -> List[List[str]]:
    found = []
    if mounted.kind.split(".")[0] in ("fuse", "fuseblk"):
        found += [[tool, "-uz" if lazy else "-u", "--", mounted.point] for tool in ("fusermount3", "fusermount")]
    # -c: it doesn't look at the path, which would wait for a server that hangs.
    plain = ["umount", "-c", *(["-l"] if lazy else []), "--", mounted.point]
    found.append(plain if os.geteuid() == 0 else ["sudo", "-n", *plain])
    return found


def _run(argv: Sequence[str]) -> str:
    """Empty if the command did it, else what it said."""
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return "%s: %s" % (argv[0], error.strerror)
    assert process.stdout
    with process.stdout:
        try:
            output, _ = process.communicate(timeout=STEP_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):  # sudo's is root's
                process.kill()
            try:
                process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                process.returncode = -signal.SIGKILL  # the kernel holds it: nobody waits for that
            return "%s: no answer in %d s" % (argv[0], STEP_SECONDS)
    said = output.decode("utf-8", "replace").strip().splitlines()
    return "" if process.returncode == 0 else (said[-1] if said else "%s: exit code %d" % (argv[0], process.returncode))


# Which mounts are ours. Below <root>/jobs all are: the folder is a job's own. In <root>/mounts somebody else may have put one.


def _register(root: str) -> str:
    return os.path.join(root, "mounted")


def note_mount(root: str, target: str) -> None:
    """Write down that a mount at this path is ours, before it is made."""
    descriptor = os.open(_register(root), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(json.dumps(os.path.relpath(target, root)) + "\n")


def _noted(root: str) -> List[str]:
    found = []
    with contextlib.suppress(OSError), open(_register(root), encoding="ascii", errors="replace") as file:
        for line in dict.fromkeys(file):
            with contextlib.suppress(ValueError):  # written to a disk that was full
                found.append(os.path.join(root, json.loads(line)))
    return found


def sweep(root: str, ours: bool = False) -> List[str]:
    """Undo all mounts that a job has left on a node: below its ``jobs`` folder, and those noted in its ``mounts`` folder.

    Nothing is done while an agent lives that has the node.

    Args:
        root: the node's own folder.
        ours: whether the caller is that agent.

    Returns:
        What is still mounted: path and reason each.
    """
    with _unless_held(root, ours) as free:
        if not free:
            return []
        left = []
        for folder in [os.path.join(root, "jobs"), *_noted(root)]:
            for mounted in table.below(folder):
                why = unmount(mounted.point)
                if why:
                    left.append("%s (%s)" % (mounted.point, why))
        if not left:
            with contextlib.suppress(OSError):
                os.unlink(_register(root))
        return left


@contextlib.contextmanager
def _unless_held(root: str, ours: bool) -> Iterator[bool]:
    """Whether no agent has the node; none can take it meanwhile."""
    if ours:
        yield True
        return
    if not os.path.isdir(root):
        yield False
        return
    lock = locks.open_agent_lock(root)
    try:
        yield locks.try_lock(lock)
    finally:
        os.close(lock)


def remove_tree(folder: str) -> None:
    """Remove a folder with all that is in it, except what is mounted there; what can't be removed stays."""
    top = table.real(folder)
    points = {mounted.point for mounted in table.below(folder)}
    try:
        device = os.lstat(top).st_dev
    except OSError:
        return
    todo = [top]
    while todo:
        _remove(todo.pop(), _Tree(top, points, device, todo))
    with contextlib.suppress(OSError):
        os.rmdir(top)


class _Tree(NamedTuple):
    top: str
    points: Set[str]
    device: int
    deep: List[str]

    def lift(self, path: str) -> bool:
        """Whether a folder that lies too deep for a path (4096 bytes) or for us was moved up, to be removed later."""
        if any(point.startswith(path + "/") for point in self.points):
            return False
        moved = os.path.join(self.top, "deep-%d" % time.monotonic_ns())
        os.rename(path, moved)
        self.deep.append(moved)
        return True


def _remove(path: str, tree: _Tree, level: int = 0) -> None:
    if path in tree.points:
        return
    try:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(path)
            return
        if status.st_dev != tree.device:
            return  # mounted since we looked
        is_deep = level > DEEPEST or len(os.fsencode(path)) > len(os.fsencode(tree.top)) + LONGEST
        if is_deep and tree.lift(path):
            return
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return
    for name in names:
        _remove(os.path.join(path, name), tree, level + 1)
    with contextlib.suppress(OSError):
        os.rmdir(path)
