"""Read and write files on a share that is a folder here: current content, written once under the final name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import BinaryIO

from mlflow_batchai.agent import permissions, protocol, safeopen


def which(folder: str) -> tuple[int, int] | None:
    """Identify a folder, to tell it from another one later at its path (an empty mount point); None: there is none."""
    try:
        status = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def open_fresh(root: str, path: str) -> BinaryIO:
    """A file on a mounted share, which may have appeared since we last asked for it.

    Raises:
        FileNotFoundError: it isn't there.
        OddFileError: something else is.
    """
    try:
        return _open(root, path)
    except FileNotFoundError:
        safeopen.freshen(root, path)
        return _open(root, path)


def _open(root: str, path: str) -> BinaryIO:
    return permissions.patiently(lambda: safeopen.open_file(root, path))


def read_fresh(root: str, path: str, start: int = 0, length: int = -1) -> bytes:
    """Bytes of such a file; errors as ``open_fresh``."""
    with open_fresh(root, path) as file:
        if start:
            file.seek(start)
        return file.read(length)


def read_whole(root: str, path: str, most: int, fresh: bool = True) -> bytes:
    """All of such a file; nothing, as of one that was damaged, if it is longer than that, or something else than a file.

    Args:
        fresh: False: its folder was just looked at.

    Raises:
        FileNotFoundError: it isn't there.
        OddFolderError: nor can it be: what should be its folder is a file, or a link.
    """
    try:
        with (open_fresh if fresh else _open)(root, path) as file:
            data = file.read(most + 1)
    except safeopen.OddFolderError:
        raise
    except safeopen.OddFileError:
        return b""
    return data if len(data) <= most else b""


def write_closed(root: str, path: str, records: Iterable[protocol.Record], within: str = "") -> int:
    """Write a closed file once under its final name, making its folder (no rename: some mounts lose the data); its bytes.

    Args:
        within: see ``safeopen.make_folders``.
    """
    data = protocol.encode(records)
    made = permissions.opener(root)
    opening = permissions.patiently(lambda: safeopen.open_to_write(root, path, made=made, within=within))
    with os.fdopen(opening, "wb") as file:
        return file.write(data)
