"""Open files and folders below a folder that others may write, without following links.

Whoever may write a share can put a link, a FIFO or a device in place of any name there, between two of our calls as well. So
each part of a path is opened in the folder before it and no link is followed; what was opened is looked at, and not its name.
A kernel that can is asked for all of the way at once: agents and followers open such paths many times a second.
Only the folder itself (``root``) is opened as any path is: it is our own choice. Paths below it have ``/`` between their parts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import sys
import uuid
from collections.abc import Iterator
from typing import BinaryIO, Callable

try:
    import ctypes

    _syscall = ctypes.CDLL(None, use_errno=True).syscall if sys.platform == "linux" else None
except (ImportError, AttributeError, OSError):  # a Python that was built without libffi, say: part by part
    _syscall = None

# openat2(2) of Linux 5.6, which has one number on x86-64, ARM and POWER, and its RESOLVE_NO_SYMLINKS.
OPENAT2, _NO_LINKS = 437, 4
LONGEST_PATH = 4095  # bytes, as the kernel has it for a path that is opened at once
# O_PATH: what a folder on the way has to permit is to search it, and no more.
_WAY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
# Levels that are removed with a descriptor open for each; what lies deeper is moved up first.
_DEEPEST = 64
# How often a folder that is being removed may get something new.
_REFILLED = 5

Made = Callable[[int], None]


class OddFileError(OSError):
    """Something lies there, and no file or folder that may be opened: ``strerror`` says what it is, ``filename`` where."""

    number = errno.EINVAL

    def __init__(self, what: str) -> None:
        super().__init__(self.number, what)


class OddFolderError(OddFileError, NotADirectoryError):
    """A link or a file lies in place of a folder, or on the way to it."""

    number = errno.ENOTDIR


class Descriptor(int):
    """A file descriptor that is closed at the end of a ``with`` block."""

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self)


@contextlib.contextmanager
def _named(root: str, path: str) -> Iterator[None]:
    """Errors name the whole path."""
    try:
        yield
    except OSError as error:
        error.filename = os.path.join(root, path)
        raise


def parts_of(path: str) -> list[str]:
    """The names that a path is made of. Raises OSError: it leads out of the root, or no file system takes it."""
    try:
        length = len(os.fsencode(path))
    except UnicodeEncodeError:
        raise OSError(errno.EINVAL, "that can't be the name of a file") from None
    if length > LONGEST_PATH:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in path:
        raise OSError(errno.EINVAL, "that is no path below a folder")
    return parts


def open_file(root: str, path: str) -> BinaryIO:
    """A regular file, to be read.

    Raises:
        OddFileError: something else lies there.
        FileNotFoundError: nothing does.
    """
    with _named(root, path):
        folder, name = _folder_of(root, path)
        with folder:
            return os.fdopen(_open(folder, name, os.O_RDONLY), "rb")


def open_folder(root: str, path: str) -> Descriptor:
    """A folder, to be listed. Raises OddFolderError: it is a link or a file, or lies behind one."""
    with _named(root, path):
        return _folder(root, parts_of(path), _LISTED)


def make_folders(root: str, path: str, made: Made = lambda folder: None, within: str = "") -> Descriptor:
    """A folder, which is made with its parents if it isn't there; the root is not.

    Args:
        made: given a descriptor of each that we have made.
        within: a folder above it that has to be there, as those above it have to.

    Raises:
        FileNotFoundError: that isn't there.
    """
    with _named(root, path):
        return _make(root, parts_of(path), made, within)


def claim(root: str, path: str, made: Made = lambda folder: None, within: str = "") -> bool:
    """Make a folder, and its parents; False if something of that name was there. Arguments: see ``make_folders``."""
    with _named(root, path):
        *above, name = parts_of(path)
        with _make(root, above, made, within) as folder:
            try:
                os.mkdir(name, dir_fd=folder)
            except FileExistsError:
                return False
            with _step(folder, name, _LISTED) as below:
                made(below)
        return True


def open_to_write(
    root: str, path: str, append: bool = False, made: Made = lambda descriptor: None, within: str = ""
) -> Descriptor:
    """A file to be written from its beginning, or appended to; its folders are made.

    What lies there and is no file of ours (``OddFileError``) gets another name beside it, so that it keeps nobody from writing.

    Args:
        made: given a descriptor of each folder that we have made, and of the file.
        within: see ``make_folders``.
    """
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0)
    with _named(root, path):
        *above, name = parts_of(path)
        with _make(root, above, made, within) as folder:
            try:
                descriptor = _open(folder, name, flags)
            except OddFileError:
                os.rename(name, f".odd-{uuid.uuid4().hex}", src_dir_fd=folder, dst_dir_fd=folder)
                descriptor = _open(folder, name, flags | os.O_EXCL)
        made(descriptor)
        if not append:
            os.ftruncate(descriptor, 0)
        return descriptor


def look(root: str, path: str) -> os.stat_result | None:
    """Status of a path, a link as a link; None if nothing lies there."""
    with _named(root, path):
        try:
            folder, name = _folder_of(root, path)
            with folder:
                return os.lstat(name, dir_fd=folder)
        except (FileNotFoundError, OddFolderError):
            return None


def freshen(root: str, path: str) -> None:
    """Have a mount look anew for a name that it did not know.

    An NFS client remembers that a name wasn't there until what it knows of the folder expires, 30 s and more (nfs(5):
    lookupcache, acdirmin). Opening the folder has it ask the server (nfs(5): close-to-open). Elsewhere it costs microseconds.
    """
    with contextlib.suppress(OSError):  # whoever asks for the file meets it too
        folder, missing = _deepest(root, parts_of(path)[:-1], _LISTED)
        for part in missing:
            with folder:
                below = _step(folder, part, _LISTED)
            folder = below
        os.close(folder)


def remove(root: str, path: str) -> None:
    """Remove a file or a link, or a folder with all that is in it, though others put something there meanwhile.

    Raises:
        OSError: it can't be done; FileNotFoundError if nothing is there.
    """
    with _named(root, path):
        folder, name = _folder_of(root, path)
        with folder:
            if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                os.unlink(name, dir_fd=folder)
                return
            with _step(folder, name, _LISTED) as top:
                for turn in range(_REFILLED + 1):
                    while _empty(top, top, 0):
                        pass  # what lay too deep lies in it now
                    try:
                        os.rmdir(name, dir_fd=folder)
                    except FileNotFoundError:
                        return  # others were quicker
                    except OSError as error:
                        if error.errno != errno.ENOTEMPTY or turn == _REFILLED:
                            raise
                    else:
                        return


def _folder_of(root: str, path: str) -> tuple[Descriptor, str]:
    """(the folder that something lies in, its name there)."""
    parts = parts_of(path)
    if not parts:
        raise OddFileError("it is a folder, and no file")
    return _folder(root, parts[:-1]), parts[-1]


def _folder(root: str, parts: list[str], flags: int = _WAY) -> Descriptor:
    folder = Descriptor(os.open(root, _WAY if parts else flags))
    if parts and _syscall:
        how = struct.pack("QQQ", flags, 0, _NO_LINKS)
        whole = _syscall(ctypes.c_long(OPENAT2), folder, os.fsencode("/".join(parts)), how, ctypes.c_size_t(len(how)))
        if whole >= 0 or ctypes.get_errno() == errno.ENOENT:
            os.close(folder)
            if whole < 0:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return Descriptor(whole)
    for number, part in enumerate(parts, 1):
        with folder:
            below = _step(folder, part, _WAY if number < len(parts) else flags)
        folder = below
    return folder


def _deepest(root: str, parts: list[str], flags: int = _WAY) -> tuple[Descriptor, list[str]]:
    """(the deepest folder of a way that is there, the parts behind it)."""
    for there in range(len(parts), 0, -1):
        with contextlib.suppress(FileNotFoundError):
            return _folder(root, parts[:there], flags), parts[there:]
    return _folder(root, [], flags), parts


def _step(folder: int, name: str, flags: int = _WAY) -> Descriptor:
    try:
        return Descriptor(os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder))
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        kind = _kind(os.lstat(name, dir_fd=folder))
        raise OddFolderError(f"'{name}' is {kind}, and no folder") from None


def _kind(status: os.stat_result) -> str:
    return next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "something else")


def _make(root: str, parts: list[str], made: Made, within: str) -> Descriptor:
    folder, missing = _deepest(root, parts)
    there = len(parts_of(within))
    for number, part in enumerate(missing, len(parts) - len(missing)):
        with folder:
            below = _step(folder, part) if number < there else _made(folder, part, made)
        folder = below
    return folder


def _made(folder: int, name: str, made: Made) -> Descriptor:
    try:
        os.mkdir(name, dir_fd=folder)
    except FileExistsError:
        return _step(folder, name)
    with _step(folder, name, _LISTED) as below:
        made(below)
        return Descriptor(os.dup(below))


def _open(folder: int, name: str, flags: int) -> Descriptor:
    """A regular file of a folder."""
    try:
        # Some devices do something when they are opened.
        _check(os.lstat(name, dir_fd=folder), flags)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    try:
        descriptor = Descriptor(os.open(name, flags | _FILE, 0o666, dir_fd=folder))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise OddFileError("it is no file any more") from None
        raise
    try:
        _check(os.fstat(descriptor), flags)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(status: os.stat_result, flags: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OddFileError(f"it is {_kind(status)}, and no file")
    if flags & os.O_WRONLY and status.st_nlink > 1:
        raise OddFileError("it has another name as well (a hard link)")


def _empty(folder: int, top: int, level: int) -> bool:
    """Remove all in a folder; whether something was moved up to the top instead."""
    moved = False
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        with _changing():
            if not is_folder:
                os.unlink(name, dir_fd=folder)
            elif level >= _DEEPEST:
                os.rename(name, f".deep-{uuid.uuid4().hex}", src_dir_fd=folder, dst_dir_fd=top)
                moved = True
            else:
                with _step(folder, name, _LISTED) as below:
                    moved = _empty(below, top, level + 1) or moved
                os.rmdir(name, dir_fd=folder)
    return moved


@contextlib.contextmanager
def _changing() -> Iterator[None]:
    """Ignore entries that have gone or changed their kind meanwhile: the removal looks again."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
