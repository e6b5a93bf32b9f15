"""A job's code as one small archive among its run's artifacts: packed when the job runs, unpacked to run it again."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from mlflow_batchai.agent.plan import CodeFile
from mlflow_batchai.agent.protocol import object_path
from mlflow_batchai.errors import JobError
from mlflow_batchai.storage import Share

NAME = "code.tar.gz"
# Bytes that an archive has for one file besides its content: headers, a long name, padding.
OVERHEAD = 16 << 10


def pack(share: Share, code: Sequence[CodeFile], size: int) -> bytes:
    """The archive of code that lies on a share; of the same code the same bytes.

    Raises:
        JobError: a file is not there as it was sent.
        ShareError: the share can't be read.
    """
    wanted = sorted({object_path(file.sha256) for file in code if file.link is None})
    contents = dict(share.read_many(wanted, size + 1))
    packed = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", fileobj=packed, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for file in code:
            entry = tarfile.TarInfo(file.path)
            entry.mode, content = file.mode, b""
            if file.link is not None:
                entry.type, entry.linkname = tarfile.SYMTYPE, file.link
            else:
                content = contents.get(object_path(file.sha256), b"")
                if hashlib.sha256(content).hexdigest() != file.sha256:
                    raise JobError(f"'{file.path}' is not on the share as it was sent")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def unpack(archive: Path, code: Sequence[CodeFile], size: int, folder: Path) -> None:
    """Write code into an empty folder: the files that are listed, each with its listed content, and no other.

    Args:
        size: bytes of the code, in the plan: no more of the archive are read than they take.

    Raises:
        JobError: the archive is not that of the list, or the list has a path out of the folder.
    """
    contents = _contents(archive, size + OVERHEAD * (len(code) + 1))
    for file in sorted(code, key=lambda file: file.link is not None):  # links last: nothing is written through one
        path = folder / file.path
        target = file.path if file.link is None else os.path.join(os.path.dirname(file.path), file.link)  # noqa: PTH118, PTH120
        for inside in (file.path, os.path.normpath(target)):
            if PurePosixPath(inside).is_absolute() or ".." in PurePosixPath(inside).parts or "\0" in inside:
                raise JobError(f"the list of the code names '{file.path}', which leads out of the project")
        if not path.parent.resolve().is_relative_to(folder.resolve()) or os.path.lexists(path):
            raise JobError(f"the list of the code names '{file.path}' twice, or behind a link")
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.link is not None:
            path.symlink_to(file.link)
            continue
        if hashlib.sha256(content := contents.get(file.path, b"")).hexdigest() != file.sha256:
            raise JobError(f"'{file.path}' in {NAME} is not the file that the job ran")
        path.write_bytes(content)
        path.chmod(file.mode & 0o755)


def _contents(archive: Path, most: int) -> dict[str, bytes]:
    """The files of an archive by their names, as far as they lie in its first bytes."""
    try:
        with gzip.open(archive) as packed:
            data = packed.read(most)
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as opened:
            return {entry.name: found.read() for entry in opened if entry.isreg() and (found := opened.extractfile(entry))}
    except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as error:
        raise JobError(f"{NAME} is no archive that a job has left: {error}") from error
