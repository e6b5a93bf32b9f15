"""Content-addressed files on a share, so that an unchanged project sends nothing."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn, TypeVar

from mlflow_batchai.agent.plan import CodeFile
from mlflow_batchai.agent.protocol import OBJECTS, TREES, TornFileError, decode, encode, now_ms, object_path
from mlflow_batchai.errors import ProjectError
from mlflow_batchai.storage.base import Share, job_file
from mlflow_batchai.storage.ignore import IgnoreRules

# Never part of a project: results of earlier runs, environments, caches.
IGNORED_NAMES = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", ".ipynb_checkpoints", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
    | {"mlruns", "mlartifacts", "mlflow.db", "mlflow.db-journal", "mlflow.db-wal", "mlflow.db-shm", ".DS_Store"}
)
BLOCK = 1 << 20
# Files of more bytes are sent one after the other: a share sends pieces of each at once.
LARGE = 4 << 20
JUST_NOW_NS = 3_000_000_000
# What is older is touched by the submit that needs it, so that its age tells that nobody uses it: `batchai gc` leaves what is
# younger than ``STAYS_SECONDS``. A set is believed to lie there for as long again, and a submit has the rest of the time to
# write its plan.
FRESH_SECONDS, STAYS_SECONDS = 7 * 86400.0, 21 * 86400.0

Progress = Callable[[int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


class StagedFile(NamedTuple):
    """One file of a tree.

    Attributes:
        path: relative, with ``/``.
        mode: permission bits that a copy gets (0644 or 0755).
        link: the target, if it is a symbolic link inside the tree.
    """

    path: str
    source: Path
    sha256: str
    mode: int
    link: str | None = None
    size: int = 0

    def entry(self) -> CodeFile:
        if self.link is not None:
            return CodeFile(self.path, link=self.link)
        return CodeFile(self.path, self.sha256, self.mode)


def hash_file(path: Path) -> tuple[str, int]:
    """The SHA-256 of a file, in hexadecimal, and its size in bytes; a file that is as it was is not read again."""
    seen = path.stat()
    changed = max(seen.st_mtime_ns, seen.st_ctime_ns)
    # A file that was just written may be written again within one tick of its file system's clock.
    if abs(time.time_ns() - changed) < JUST_NOW_NS:
        return _hash(path)
    return _known_hash(path, (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns))


@functools.lru_cache(maxsize=10_000)
def _known_hash(path: Path, identity: tuple[int, ...]) -> tuple[str, int]:
    return _hash(path)


def _hash(path: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
    return digest.hexdigest(), size


def scan(root: Path, skip: Collection[Path] = (), left_out: Callable[[str], None] = lambda file: None) -> list[StagedFile]:
    """Every file of a project folder, sorted by path, without what IGNORED_NAMES and the folder's ignore files list.

    Args:
        skip: folders and files that are no part of it though they lie in it (the client's own, the share, the store).
        left_out: told the name of the ignore file (``.gitignore``) for each file and folder that one leaves out.

    Raises:
        ProjectError: a symbolic link leads out of the folder, or a file can't be read, or an ignore file can't.
    """
    return [_staged(root, path) for path in sorted(_walk(root, {path.resolve() for path in skip}, left_out))]


def _walk(root: Path, skip: Collection[Path], left_out: Callable[[str], None]) -> Iterator[Path]:
    rules = {str(root): IgnoreRules(root)}
    for folder, names, files in os.walk(root, onerror=_unreadable):
        here, real, ours = Path(folder), Path(folder).resolve(), rules.pop(folder)
        for name in [name for name in names if (here / name).is_symlink()]:
            names.remove(name)
            files.append(name)

        def is_part(name: str, is_directory: bool, real: Path = real, ours: IgnoreRules = ours) -> bool:
            if name in IGNORED_NAMES or real / name in skip:
                return False
            if file := ours.leave_out(name, is_directory):
                left_out(file)
            return not file

        names[:] = [name for name in names if is_part(name, is_directory=True)]
        rules.update((os.path.join(folder, name), IgnoreRules(here / name, ours, name)) for name in names)  # noqa: PTH118 (as os.walk)
        yield from (here / name for name in files if is_part(name, is_directory=False))


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


def scan_input(path: Path, skip: Collection[Path] = ()) -> list[StagedFile]:
    """A parameter's file or folder, under its own name (links are followed, but not in circles).

    Args:
        skip: as of ``scan``; a file or folder that is one of these itself has no files.

    Raises:
        ProjectError: a file or folder of it can't be read.
    """
    try:
        found = sorted(_followed(path, {path.resolve() for path in skip}))
        hashed = [(file, *hash_file(file)) for file in found]
        return [
            StagedFile(file.relative_to(path.parent).as_posix(), file, sha256, 0o644, size=size)
            for file, sha256, size in hashed
        ]
    except OSError as error:
        _unreadable(error)


def _followed(path: Path, skip: Collection[Path], above: tuple[Path, ...] = ()) -> Iterator[Path]:
    real = Path(os.path.realpath(path))  # ``resolve`` raises RuntimeError for a link that names itself
    if real in skip or real in above:
        return
    if path.is_dir():
        for each in path.iterdir():
            yield from _followed(each, skip, (*above, real))
    elif path.is_file():
        yield path


def holds_any(share: Share) -> bool:
    """Whether anything was ever sent to the share."""
    return bool(share.list(OBJECTS))


def upload(share: Share, files: Sequence[StagedFile], progress: Progress | None = None) -> int:
    """Send what the share doesn't hold yet, or not whole. Where requests cost time, one may tell that all lies there.

    What it has held for long is only touched: ranks may have it open, and it may be large.

    Args:
        progress: called with (bytes sent so far, bytes to send) as blocks are sent, never twice at a time.

    Returns:
        Bytes sent.

    Raises:
        ProjectError: a file has changed or gone since it was hashed; nothing is kept under a hash that isn't its own.
    """
    wanted = {file.sha256: file for file in reversed(files) if file.link is None}
    if not wanted:
        return 0
    tree, by_requests = _tree(wanted), share.at_once > 1
    if by_requests and _is_young(share, tree):
        return 0
    folders = {sha256[:2] for sha256 in wanted}
    missing = _missing(share, wanted, _make_folders(share, folders) if by_requests else folders)
    counter = _Counter(sum(file.size for file in missing), progress)
    small = [file for file in missing if file.size <= LARGE]
    each(share, lambda file: _send(share, file, counter), small)
    for file in missing:
        if file.size > LARGE:
            _send(share, file, counter)
    if by_requests:
        share.write(tree, encode([{"files": len(wanted), "t": now_ms()}]))
    return counter.sent


def _is_young(share: Share, tree: str) -> bool:
    """Whether a whole set is known to lie there, and to stay as long as a submit may take."""
    data = job_file(share, tree)
    try:
        sent = decode(data)[0].get("t") if data else None
    except (TornFileError, LookupError):
        return False
    return isinstance(sent, int) and abs(now_ms() - sent) < 1000 * FRESH_SECONDS


def _tree(wanted: Iterable[str]) -> str:
    return f"{TREES}/{hashlib.sha256(''.join(sorted(wanted)).encode()).hexdigest()}"


def each(share: Share, act: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Results of a function for each item, as many at once as pay; the first failure ends it."""
    if share.at_once == 1:
        return [act(item) for item in items]
    with ThreadPoolExecutor(share.at_once, "batchai-objects") as pool:
        try:
            return [future.result() for future in [pool.submit(act, item) for item in items]]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _make_folders(share: Share, wanted: Collection[str]) -> set[str]:
    """Make those of the objects' folders that aren't there; those that were."""
    there = {entry.name for entry in share.list(OBJECTS)}
    if not there:
        share.claim(OBJECTS)
    each(share, lambda name: share.claim(f"{OBJECTS}/{name}"), [name for name in (*wanted, "trees") if name not in there])
    return there.intersection(wanted)


def _missing(share: Share, wanted: dict[str, StagedFile], folders: Collection[str]) -> list[StagedFile]:
    """Objects that don't lie whole in one of the folders, in the order of their paths; old ones that do are touched."""
    known: set[str] = set()
    now = time.time()

    def look(folder: str) -> None:
        for name, size, _, modified in share.list(f"{OBJECTS}/{folder}"):
            if name not in wanted or size != wanted[name].size:
                continue
            if modified is None or abs(now - modified) < FRESH_SECONDS or share.touch(object_path(name)):
                known.add(name)

    each(share, look, folders)
    return sorted(file for sha256, file in wanted.items() if sha256 not in known)


class _Counter:
    """Adds up what is sent by several threads, and tells of it."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.sent = 0
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.sent += count
            if self._progress:
                self._progress(self.sent, self._total)


def _send(share: Share, file: StagedFile, counter: _Counter) -> None:
    try:
        incoming = file.source.open("rb")
    except OSError as error:
        _unreadable(error)
    with incoming:
        share.send(object_path(file.sha256), _Checked(incoming, file, counter), file.size)


class _Checked:
    """A staged file as it is read to be sent: its end is an error if it isn't what was hashed."""

    def __init__(self, incoming: BinaryIO, file: StagedFile, counter: _Counter) -> None:
        self._incoming = incoming
        self._file = file
        self._counter = counter
        self._digest = hashlib.sha256()
        self._size = 0

    def read(self, size: int) -> bytes:
        try:
            data = self._incoming.read(size)
        except OSError as error:
            raise ProjectError(f"'{self._file.source}' can't be read: {error.strerror}") from error
        self._digest.update(data)
        self._size += len(data)
        at_end = size and not data
        if self._size > self._file.size or (at_end and self._digest.hexdigest() != self._file.sha256):
            raise ProjectError(f"{self._file.source} changed while it was sent; submit again")
        if data:
            self._counter.add(len(data))
        return data
