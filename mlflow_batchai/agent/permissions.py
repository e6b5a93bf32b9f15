"""Permissions of what we make on a share: open it to those who may use the share's root in the same way.

A client and the nodes may be different users there. Agents and ranks run with a umask that leaves others nothing, so what is
made on a share for others is given its group and world bits one by one, on its descriptor.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
import uuid
from collections.abc import Sequence
from typing import Callable, TypeVar

Result = TypeVar("Result")

# The umask of agents, and of ranks unless the plan has another.
PRIVATE = 0o077
OTHERS = stat.S_IRWXG | stat.S_IRWXO
# Between the making of a folder by another user and its opening up to us.
MAKING_SECONDS = 1.0
MOST_LEVELS = 100
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def bits_of(root: str) -> int:
    """The group and world bits of a share's root; none if it can't be looked at."""
    try:
        return os.stat(root).st_mode & OTHERS
    except OSError:
        return 0


def opener(root: str) -> Callable[[int], None]:
    """Gives what was made on a share the bits of its root."""
    bits = bits_of(root)
    return lambda descriptor: open_up(descriptor, bits)


def create(path: str, flags: int, bits: int) -> int:
    """Open a file on a share, made if it isn't there; its descriptor. ``flags``: of ``os.open``, besides ``O_CREAT``."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600 | (bits & 0o066))
    open_up(descriptor, bits)
    return descriptor


def make_folder(path: str, bits: int) -> None:
    """Make one folder on a share. Raises FileExistsError: something is there."""
    os.mkdir(path, 0o700 | bits)
    with contextlib.suppress(OSError):  # it was moved away, or others are refused: who wants it meets that too
        descriptor = os.open(path, _FOLDER)
        try:
            open_up(descriptor, bits)
        finally:
            os.close(descriptor)


def make_folders(path: str, bits: int) -> None:
    """Make a folder on a share with its parents, if it isn't there. What is there stays as open as it is."""
    if os.path.isdir(path):
        return
    try:
        try:
            make_folder(path, bits)
        except FileNotFoundError:
            make_folders(os.path.dirname(path), bits)
            make_folder(path, bits)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def open_up(descriptor: int, bits: int, names: int = 1) -> None:
    """Give a file or folder those bits; a file is executable for others only if it is for its owner.

    A file that has more names than are known is left alone: it may be another user's, linked to its place here.

    Args:
        names: how many names of it are known.
    """
    status = os.fstat(descriptor)
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISREG(status.st_mode):
        if status.st_nlink > names or mode & (stat.S_ISUID | stat.S_ISGID):
            return
        bits &= 0o077 if mode & stat.S_IXUSR else 0o066
    elif not stat.S_ISDIR(status.st_mode):
        return
    if bits & ~mode:
        # A mount that knows no such thing says so; then it is its mount options that decide.
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, mode | bits)


def open_up_tree(root: str, path: Sequence[str]) -> None:
    """Open up a folder of a share with all below it that this user has made; no link is followed on the way.

    Args:
        root: the share's, whose bits are given.

    Raises:
        OSError: the folder can't be reached.
    """
    bits = bits_of(root)
    if not bits:
        return
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in path:
            below = os.open(name, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
        owner = _owner_of_ours(folder)
        if owner is not None:
            if os.fstat(folder).st_uid == owner:
                open_up(folder, bits)
            _open_up_below(folder, bits, owner)
    finally:
        os.close(folder)


def _owner_of_ours(folder: int) -> int | None:
    """Owner of files that we make there: a file server may map our user to another. None: we can't make one."""
    name = f".batchai-{uuid.uuid4().hex}"
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError:
        return None
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)


def _open_up_below(folder: int, bits: int, owner: int) -> None:
    """All of ours in a folder, whose descriptor stays open; what can't be opened up is passed over."""
    names: dict[tuple[int, int], int] = {}
    # One descriptor a level, and others of this process need theirs: what lies deeper stays closed.
    levels: list[tuple[int, list[str]]] = [(folder, _listed(folder))]
    try:
        while levels:
            parent, left = levels[-1]
            if not left:
                levels.pop()
                if parent != folder:
                    os.close(parent)
                continue
            name = left.pop()
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and len(levels) < MOST_LEVELS:
                    below = os.open(name, _FOLDER, dir_fd=parent)
                    levels.append((below, []))  # closed with the others
                    if os.fstat(below).st_uid == owner:
                        open_up(below, bits)
                    levels[-1] = (below, _listed(below))
                elif stat.S_ISREG(status.st_mode) and status.st_uid == owner and bits & 0o066 & ~status.st_mode:
                    _open_up_file(parent, name, bits, owner, names)
    finally:
        for descriptor, _ in levels:
            if descriptor != folder:
                os.close(descriptor)


def _open_up_file(parent: int, name: str, bits: int, owner: int, names: dict[tuple[int, int], int]) -> None:
    """One file, once all of its names were seen in the tree (``names``: how many, by device and inode)."""
    descriptor = os.open(name, _FILE, dir_fd=parent)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != owner:
            return
        key = (status.st_dev, status.st_ino)
        names[key] = names.get(key, 0) + 1
        open_up(descriptor, bits, names[key])
    finally:
        os.close(descriptor)


def _listed(folder: int) -> list[str]:
    with os.scandir(folder) as found:
        return [entry.name for entry in found]


def patiently(step: Callable[[], Result]) -> Result:
    """Do something in a folder that another user may have made a moment ago, and not opened up to us yet."""
    until = time.monotonic() + MAKING_SECONDS
    while True:
        try:
            return step()
        except PermissionError:
            if time.monotonic() > until:
                raise
        time.sleep(0.02)
