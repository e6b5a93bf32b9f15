"""Mount points of this node: list them, find and undo our own, and remove folders without entering a mount.

An agent that was killed leaves its mounts behind: they would keep its node from ever being cleared.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.reservation import locks

STEP_SECONDS = 10.0
# While a rank that has just been killed still has a file open there.
BUSY_SECONDS = 1.0
LAST_SECONDS = 60.0
# Folders in folders that are open at once while they are removed.
DEEPEST = 100

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mounted(NamedTuple):
    """One mount.

    Attributes:
        point: absolute path of the mount point, links resolved.
        kind: the file system's type (``fuse.rclone``, ``cifs``, ``ext4``).
        source: what is mounted, in the words of who mounted it.
        shared: whether what is mounted below it reaches other mount namespaces.
    """

    point: str
    kind: str
    source: str
    shared: bool


def unescape(text: str) -> str:
    """A path of mountinfo as it is: blanks, tabs, newlines and backslashes stand there as octal numbers (proc(5))."""
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), text)


def parse(text: str) -> list[Mounted]:
    """The mounts that the text of a mountinfo file tells of, in the order in which they were made."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) > 4 and len(right) > 1:
            shared = any(field.startswith(("shared:", "master:")) for field in left[6:])
            found.append(Mounted(unescape(left[4]), right[0], unescape(right[1]), shared))
    return found


def mounts() -> list[Mounted]:
    """All mounts that this process sees; none where the kernel has no such table.

    Raises:
        OSError: it can't be read just now (no descriptor is free). That nothing is mounted must not be believed then.
    """
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            return parse(file.read())
    except FileNotFoundError:
        return []


def real(path: str) -> str:
    """A path as mountinfo would name it. Its last part is not looked at: it may be a mount whose server is gone."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def at(path: str) -> Mounted | None:
    """The mount at a path (the last one, if several are stacked), or None."""
    point = real(path)
    return next((mount for mount in reversed(mounts()) if mount.point == point), None)


def below(folder: str) -> list[Mounted]:
    """The mounts at and below a folder, in the order in which they have to be undone."""
    top = real(folder)
    return [mount for mount in reversed(mounts()) if mount.point == top or mount.point.startswith(top.rstrip("/") + "/")]


def unmount(path: str) -> str:
    """Undo the mount at a path: politely, after ``BUSY_SECONDS`` lazily.

    Returns:
        Why it is still there, in the words of the last command; empty: it is gone.
    """
    begun = time.monotonic()
    while True:
        mounted = at(path)
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


def _commands(mounted: Mounted, lazy: bool) -> list[list[str]]:
    found = []
    if mounted.kind.split(".")[0] in ("fuse", "fuseblk"):
        found += [[tool, "-uz" if lazy else "-u", "--", mounted.point] for tool in ("fusermount3", "fusermount")]
    # -c: it doesn't look at the path, which would wait for a server that hangs.
    plain = ["umount", "-c", *(["-l"] if lazy else []), "--", mounted.point]
    found.append(plain if os.geteuid() == 0 else ["sudo", "-n", *plain])
    return found


def _run(argv: Sequence[str]) -> str:
    code, output = proc.ask(argv, os.environ, STEP_SECONDS)
    if code == 0:
        return ""
    said = output.strip().splitlines()
    return said[-1] if said else f"{argv[0]}: exit code {code}"


# Which mounts are ours. Below <root>/jobs all are: the folder is a job's own. In <root>/mounts somebody else may have put one.
REGISTER = "mounted"


def note_mount(root: str, target: str) -> None:
    """Write down that a mount at this path is ours, before it is made."""
    descriptor = os.open(os.path.join(root, REGISTER), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(json.dumps(os.path.relpath(target, root)) + "\n")


def _noted(root: str) -> list[str]:
    found = []
    with contextlib.suppress(OSError), open(os.path.join(root, REGISTER), encoding="ascii", errors="replace") as file:
        for line in dict.fromkeys(file):
            with contextlib.suppress(ValueError):  # written to a disk that was full
                found.append(os.path.join(root, json.loads(line)))
    return found


def sweep(root: str, ours: bool = False) -> list[str]:
    """Undo all mounts that a job has left on a node: below its ``jobs`` folder, and those noted in its ``mounts`` folder.

    Nothing is done while an agent lives that has the node; none can take it meanwhile.

    Args:
        ours: whether the caller is that agent.

    Returns:
        What is still mounted: path and reason each.
    """
    if ours:
        return _undo_all(root)
    if not os.path.isdir(root):
        return []
    lock = locks.open_agent_lock(root)
    try:
        return _undo_all(root) if locks.try_lock(lock) else []
    finally:
        os.close(lock)


def _undo_all(root: str) -> list[str]:
    left = []
    for folder in [os.path.join(root, "jobs"), *_noted(root)]:
        for mounted in below(folder):
            why = unmount(mounted.point)
            if why:
                left.append(f"{mounted.point} ({why})")
    if not left:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(root, REGISTER))
    return left


def remove_tree(folder: str) -> str:
    """Remove a folder with all that is in it, except what is mounted there.

    Returns:
        The first thing that stays, and why; empty: all is gone.
    """
    left: list[str] = []
    path, points = real(folder), frozenset(mounted.point for mounted in below(folder))
    with _noting(path, left):
        if path in points:
            raise OSError(errno.EXDEV, "it is mounted")
        try:
            top = os.open(path, _FOLDER)
        except NotADirectoryError:  # a link to one, too
            os.unlink(path)
            return ""
        try:
            while _empty(top, path, top, points, left):
                pass
        finally:
            os.close(top)
        os.rmdir(path)
    return left[0] if left else ""


def _empty(folder: int, path: str, top: int, points: Collection[str], left: list[str], level: int = 1) -> bool:
    """Remove what is in an open folder, but for what is mounted there, by now as well.

    No path is followed, so it may go deeper than one may be long.

    Returns:
        Whether folders that lie too deep were moved up to the top, whose turn has to come again.
    """
    moved = False
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        inside = f"{path}/{entry.name}"
        with _noting(inside, left):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=folder)
                continue
            if inside in points:
                raise OSError(errno.EXDEV, "it is mounted")
            if level == DEEPEST and not any(point.startswith(inside) for point in points):
                os.rename(entry.name, f"deep-{time.monotonic_ns()}", src_dir_fd=folder, dst_dir_fd=top)
                moved = True
                continue
            try:
                child = os.open(entry.name, _FOLDER, dir_fd=folder)
            except PermissionError:
                os.rmdir(entry.name, dir_fd=folder)  # it may be empty
                continue
            try:
                if os.fstat(child).st_dev != os.fstat(top).st_dev:
                    raise OSError(errno.EXDEV, "it is mounted")
                moved = _empty(child, inside, top, points, left, level + 1) or moved
            finally:
                os.close(child)
            os.rmdir(entry.name, dir_fd=folder)
    return moved


@contextlib.contextmanager
def _noting(name: str, left: list[str]) -> Iterator[None]:
    """Note what can't be removed, and go on."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        left.append(f"{name}: {error.strerror}")
