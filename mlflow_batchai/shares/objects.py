"""Content-addressed files on a share: an unchanged project sends nothing."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mlflow_batchai.errors import ProjectError
from mlflow_batchai.node.protocol import OBJECTS, object_path
from mlflow_batchai.shares.base import Share

# Never part of a project: results of earlier runs, environments, caches.
IGNORED_NAMES = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", ".ipynb_checkpoints", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
    | {"mlruns", "mlartifacts", "mlflow.db", "mlflow.db-journal", "mlflow.db-wal", "mlflow.db-shm", ".DS_Store"}
)
BLOCK = 1 << 20


class StagedFile(NamedTuple):
    """One file of a tree.

    Attributes:
        path: relative, with ``/``.
        source: where it lies here.
        sha256: of its content.
        mode: permission bits that a copy gets (0644 or 0755).
        link: the target, if it is a symbolic link inside the tree.
        size: bytes of its content.
    """

    path: str
    source: Path
    sha256: str
    mode: int
    link: str | None = None
    size: int = 0

    def entry(self) -> dict[str, Any]:
        """As it stands in the plan."""
        if self.link is not None:
            return {"path": self.path, "link": self.link}
        return {"path": self.path, "sha256": self.sha256, "mode": self.mode}


def hash_file(path: Path) -> tuple[str, int]:
    """The SHA-256 of a file, in hexadecimal, and its size in bytes."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
    return digest.hexdigest(), size


def scan(root: Path, skip: Collection[Path] = ()) -> list[StagedFile]:
    """Every file of a project folder, sorted by path, without what IGNORED_NAMES lists.

    Args:
        skip: folders that are no part of it though they lie in it (the client's own, the share).

    Raises:
        ProjectError: a symbolic link leads out of the folder, or a file can't be read.
    """
    return [_staged(root, path) for path in sorted(_walk(root, {path.resolve() for path in skip}))]


def _walk(root: Path, skip: Collection[Path]) -> Iterator[Path]:
    for folder, names, files in os.walk(root, onerror=_unreadable):
        for name in [name for name in names if (Path(folder) / name).is_symlink()]:
            names.remove(name)
            files.append(name)
        names[:] = [name for name in names if name not in IGNORED_NAMES and (Path(folder) / name).resolve() not in skip]
        yield from (Path(folder) / name for name in files if name not in IGNORED_NAMES)


def _unreadable(error: OSError) -> NoReturn:
    raise ProjectError(f"'{error.filename}' can't be read: {error.strerror}") from error


def _staged(root: Path, path: Path) -> StagedFile:
    relative = path.relative_to(root).as_posix()
    if path.is_symlink():
        target = path.readlink()
        inside = Path(os.path.normpath(path.parent / target))
        if target.is_absolute() or not inside.is_relative_to(root):
            raise ProjectError(f"'{relative}' is a link out of the project ({target}); replace it with the file itself")
        return StagedFile(relative, path, "", 0o777, str(target))
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ProjectError(f"'{relative}' of the project is neither a file nor a folder; remove it")
        sha256, size = hash_file(path)
        return StagedFile(relative, path, sha256, 0o755 if mode & 0o100 else 0o644, size=size)
    except OSError as error:
        raise ProjectError(f"'{relative}' of the project can't be read: {error.strerror}") from error


def scan_input(path: Path) -> list[StagedFile]:
    """A parameter's file or folder, under its own name (links are followed, but not in circles).

    Raises:
        ProjectError: a file or folder of it can't be read.
    """
    try:
        found = [path] if path.is_file() else sorted(_followed(path))
        hashed = [(file, *hash_file(file)) for file in found]
        return [
            StagedFile(file.relative_to(path.parent).as_posix(), file, sha256, 0o644, size=size)
            for file, sha256, size in hashed
        ]
    except OSError as error:
        _unreadable(error)


def _followed(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    real = folder.resolve()
    for path in folder.iterdir() if real not in above else ():
        if path.is_dir():
            yield from _followed(path, (*above, real))
        elif path.is_file():
            yield path


def holds_any(share: Share) -> bool:
    """Whether anything was ever sent to the share."""
    return bool(share.list(OBJECTS))


def upload(share: Share, files: Sequence[StagedFile]) -> int:
    """Send what the share doesn't hold yet.

    Returns:
        Bytes sent.

    Raises:
        ProjectError: a file has changed or gone since it was hashed; nothing is kept under a hash that isn't its own.
    """
    sent = 0
    known: dict[str, set[str]] = {}
    for file in files:
        if file.link is not None:
            continue
        target = object_path(file.sha256)
        folder, _, name = target.rpartition("/")
        if folder not in known:
            known[folder] = {entry.name for entry in share.list(folder)}
        if name in known[folder]:
            continue
        sent += _send(share, file, target)
        known[folder].add(name)
    return sent


def _send(share: Share, file: StagedFile, target: str) -> int:
    try:
        incoming = file.source.open("rb")
    except OSError as error:
        _unreadable(error)
    digest, sent = hashlib.sha256(), 0
    with incoming, share.open_write(target) as outgoing:
        while block := incoming.read(BLOCK):
            digest.update(block)
            outgoing.write(block)
            sent += len(block)
        if digest.hexdigest() != file.sha256:
            raise ProjectError(f"{file.source} changed while it was sent; submit again")
    return sent
