"""Files on a share that is a folder here, maybe a mount: read as they are now, written once under their final name."""

import os
from typing import Iterable

from mlflow_batchai.node import permissions, protocol


def read_fresh(path: str, start: int = 0, length: int = -1) -> bytes:
    """Bytes of a file on a mounted share, which may have appeared since we last asked for it.

    Raises:
        FileNotFoundError: it isn't there.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below)
    except FileNotFoundError:
        freshen(path)
        file = open(path, "rb")  # noqa: SIM115
    with file:
        if start:
            file.seek(start)
        return file.read(length)


def freshen(path: str) -> None:
    """Have a mount look anew for a name that it did not know.

    An NFS client remembers that a name wasn't there until what it knows of the folder expires, 30 s and more (nfs(5):
    lookupcache, acdirmin). Opening the folder has it ask the server (nfs(5): close-to-open). Elsewhere it costs microseconds.
    """
    folder = os.path.dirname(path)
    try:
        os.close(os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY))
    except FileNotFoundError:
        freshen(folder)
    except OSError:
        return  # whoever asks for the file meets it too


def write_closed(path: str, records: Iterable[protocol.Record], bits: int = 0) -> None:
    """Write a closed file once under its final name, making its folder (no rename: some mounts lose the data).

    Args:
        bits: what others may do with it (``permissions.bits_of``).
    """
    data = protocol.encode(records)
    flags = os.O_WRONLY | os.O_TRUNC
    try:
        descriptor = permissions.create(path, flags, bits)
    except FileNotFoundError:
        permissions.make_folders(os.path.dirname(path), bits)
        descriptor = permissions.create(path, flags, bits)
    with open(descriptor, "wb") as file:
        file.write(data)
