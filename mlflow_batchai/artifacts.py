"""Folders of a share go into a run's artifacts, file by file, and each file once."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Condition
from typing import TYPE_CHECKING, TypeVar

from mlflow_batchai.errors import ShareError, ShareNotFoundError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.places import output_places
from mlflow_batchai.job.selection import Selected, select
from mlflow_batchai.job.sent import SentFiles, Stamp
from mlflow_batchai.shares import Share, spelling
from mlflow_batchai.shares.directory import DirectoryShare

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

Result = TypeVar("Result")

# Bytes of a file's name on this machine; Azure takes 255 letters of any alphabet.
LONGEST_NAME = 255
# Bytes of files that lie here at a time, on their way from a share over the network; one that is larger lies here alone.
PORTION = 256 << 20
# Bytes of files that are fetched at once; one that is larger is fetched alone, in pieces.
FETCHED_AT_ONCE = 16 << 20
# What has fewer bytes and takes less time isn't worth a word.
LARGE, SHORT_SECONDS = 64 << 20, 5.0
# How often the next relay is told what it needn't send.
SAVE_SECONDS = 10.0


class Folder:
    """A folder of a share, on its way to the run's artifacts. One that isn't there is empty.

    Args:
        artifact: its path among the artifacts.
        rclone: whether nodes wrote it by rclone, so that some names are spelled otherwise on the share.

    Attributes:
        notes: sentences on what was left out.
    """

    def __init__(self, client: MlflowClient, job: Job, share: Share, path: str, artifact: str, rclone: bool = False) -> None:
        self._client = client
        self._job = job
        self._share = share
        self._path = spelling.on_share(path) if rclone else path
        self._rclone = rclone
        # Name as nodes know it -> on the share, where that is another machine's.
        self._spelled: dict[str, str] = {}
        self.artifact = artifact
        self.notes: list[str] = []

    def look(self) -> dict[str, Stamp]:
        """The files in it and below, by their paths from there as nodes know them."""
        share, path = self._share, self._path
        if isinstance(share, DirectoryShare):
            folder, bounds = share.local(path), bounds_of(self._job, share)
            if not folder.is_dir():
                return {}
            if is_astray(folder, bounds):
                self.notes = [f"{self.artifact}: not sent: {path} lies behind a link out of the share"]
                return {}
            files, astray = _files_here(folder, bounds)
            listed = ", ".join(sorted(astray))
            self.notes = [f"{self.artifact}: not sent: {listed} (links out of the share, or to nothing)"] if astray else []
            return files
        found, notes = files_below(share, path)
        self.notes = [f"{self.artifact}: {note}" for note in notes]
        self._spelled = {spelling.on_mount(name) if self._rclone else name: name for name in found}
        return {name: found[spelled] for name, spelled in self._spelled.items()}

    def read(self, name: str) -> bytes:
        """A file's content."""
        return self._share.read(f"{self._path}/{self._spelled.get(name, name)}")

    def send(self, files: Mapping[str, Stamp]) -> Iterator[str]:
        """Send files of it; each one's name when it is there. Memory and disk need not hold them all."""
        if isinstance(self._share, DirectoryShare):
            for name in files:
                self._log(self._share.local(self._path) / name, name)
                yield name
            return
        for names in _portions({name: stamp.size for name, stamp in files.items()}):
            with TemporaryDirectory(prefix="batchai-") as scratch:
                fetch = functools.partial(self._fetch, Path(scratch))
                there = at_once(self._share, fetch, {name: files[name].size for name in names})
                for name, fetched in zip(names, there, strict=True):
                    if fetched:
                        self._log(Path(scratch, name), name)
                        yield name
                    else:
                        self.notes.append(f"{self.artifact}: not sent: {name} is gone")

    def _log(self, file: Path, name: str) -> None:
        path = f"{self.artifact}/{name}".rpartition("/")[0]
        self._client.log_artifact(str(self._job.plan["runId"]), str(file), path)

    def _fetch(self, scratch: Path, name: str) -> bool:
        """Download a file; False if someone has removed it meanwhile."""
        try:
            self._share.download(f"{self._path}/{self._spelled[name]}", scratch / name)
        except ShareNotFoundError:
            return False
        return True


class Outputs:
    """What ranks have left in the job's output directories, on its way to the run's artifacts: ``outputs/<id>/...``.

    Args:
        sent: what is there already.
        clock: seconds.

    Attributes:
        checkpoints: a sentence on those that stay on the share, since nobody asked for them; empty: none do.
        excluded: the same of files that a pattern of batchai.yaml leaves out.
    """

    def __init__(self, client: MlflowClient, job: Job, sent: SentFiles, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._job = job
        self._sent = sent
        self._clock = clock
        self.checkpoints = ""
        self.excluded = ""

    def send(self, tell: Callable[[str], None] = lambda text: None) -> list[str]:
        """Send what isn't there; if that fails, call it again, and it goes on where it was.

        Args:
            tell: told how far it has come, after each file, if there is much to send.

        Returns:
            Sentences on what was left out against our will.
        """
        folders, waiting = [], []
        checkpoints = excluded = 0
        for folder, selected in self._selected():
            checkpoints += selected.checkpoints
            excluded += selected.excluded
            folders.append(folder)
            new = {name: stamp for name, stamp in selected.wanted.items() if not self._is_there(folder, name, stamp)}
            waiting.append((folder, new))
        if checkpoints:
            self.checkpoints = (
                f"{_counted(checkpoints, 'checkpoint')} on the share (artifacts.checkpoints: true sends {_them(checkpoints)})"
            )
        if excluded:
            self.excluded = f"{_counted(excluded, 'file')} on the share (artifacts.exclude)"
        with self._saving():
            self._send_all(waiting, tell)
        return [note for folder in folders for note in folder.notes]

    def _selected(self) -> Iterator[tuple[Folder, Selected]]:
        """Each output directory with its files; one that lies in another one has its own."""
        places = {(place["share"], place["path"]): place for place in reversed(output_places(self._job.plan))}
        settings = self._job.plan.get("artifacts") or {}
        for (address, path), place in reversed(places.items()):
            inner = tuple(
                other.removeprefix(f"{path}/" if path else "") + "/"
                for share, other in places
                if share == address and other != path and other.startswith(f"{path}/" if path else "")
            )
            share = self._job.share_at(address)
            folder = Folder(self._client, self._job, share, path, f"outputs/{place['id']}", place["rclone"])
            files = {name: stamp for name, stamp in folder.look().items() if not name.startswith(inner)}
            yield folder, select(files, folder.read, settings.get("checkpoints", False), settings.get("exclude", ()))

    def _is_there(self, folder: Folder, name: str, stamp: Stamp) -> bool:
        return self._sent.has(f"{folder.artifact}/{name}", stamp)

    def _send_all(self, waiting: Sequence[tuple[Folder, Mapping[str, Stamp]]], tell: Callable[[str], None]) -> None:
        count = sum(len(files) for _, files in waiting)
        total = sum(stamp.size for _, files in waiting for stamp in files.values())
        number = size = 0
        begun = saved = self._clock()
        for folder, files in waiting:
            sending = folder.send(files)
            while True:
                if number < count and (total >= LARGE or self._clock() - begun >= SHORT_SECONDS):
                    tell(f"outputs: file {number + 1} of {count}, {size / 1e6:.0f} of {total / 1e6:.0f} MB")
                if (name := next(sending, None)) is None:
                    break
                self._sent.add(f"{folder.artifact}/{name}", files[name])
                number += 1
                size += files[name].size
                if self._clock() - saved >= SAVE_SECONDS:
                    self._sent.save()
                    saved = self._clock()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """However it ends, what was sent is known to the next relay, if the share takes that."""
        try:
            yield
        except Exception:
            with contextlib.suppress(ShareError):
                self._sent.save()
            raise
        self._sent.save()


def _counted(number: int, what: str) -> str:
    return f"1 {what} stays" if number == 1 else f"{number} {what}s stay"


def _them(number: int) -> str:
    return "it" if number == 1 else "them"


def _portions(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names, as many at a time as have room on this machine's disk."""
    names: list[str] = []
    room = PORTION
    for name, size in sizes.items():
        if names and size > room:
            yield names
            names, room = [], PORTION
        names.append(name)
        room -= size
    if names:
        yield names


def bounds_of(job: Job, share: DirectoryShare) -> Path:
    """What links must not lead out of. A volume on the control share is a folder that nodes can put a link in place of."""
    control = job.share
    if isinstance(control, DirectoryShare) and share.root.is_relative_to(control.root):
        return control.root.resolve()
    return share.root.resolve()


def _files_here(folder: Path, root: Path) -> tuple[dict[str, Stamp], list[str]]:
    """(files below a folder of this machine, links that lead out of the share, where they would name files of this machine, to
    nothing, or back to where they lie)."""
    files: dict[str, Stamp] = {}
    astray: list[str] = []

    def walk(inside: str, above: frozenset[str]) -> None:
        path = folder / inside
        above |= {os.path.realpath(path)}
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            name = f"{inside}{entry.name}"
            if entry.is_symlink() and (is_astray(folder / name, root) or os.path.realpath(entry.path) in above):
                astray.append(name)
            elif entry.is_dir():
                walk(f"{name}/", above)
            elif entry.is_file():
                found = entry.stat()
                files[name] = Stamp(found.st_size, found.st_mtime)

    walk("", frozenset())
    return files, astray


def is_astray(path: Path, root: Path) -> bool:
    return not path.exists() or not path.resolve().is_relative_to(root)


def files_below(share: Share, path: str) -> tuple[dict[str, Stamp], list[str]]:
    """(each file below a folder, by its path from there; sentences on names that can't be files of this machine)."""
    files: dict[str, Stamp] = {}
    notes: list[str] = []
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        for entry in share.list(f"{path}/{folder}".rstrip("/")):
            if (
                entry.name in ("", ".", "..")
                or "/" in entry.name
                or "\0" in entry.name
                or len(os.fsencode(entry.name)) > LONGEST_NAME
            ):
                notes.append(f"not sent: {folder}{entry.name!r} can't be a name here")
            elif entry.is_directory:
                waiting.append(f"{folder}{entry.name}/")
            else:
                files[folder + entry.name] = Stamp(entry.size, entry.modified)
    return files, notes


def at_once(share: Share, act: Callable[[str], Result], sizes: Mapping[str, int]) -> list[Result]:
    """What comes of something that is done for each file, as many at a time as pay, and as have room in memory."""
    room, free = Condition(), FETCHED_AT_ONCE

    def within(name: str) -> Result:
        nonlocal free
        size = min(sizes[name], FETCHED_AT_ONCE)
        with room:
            room.wait_for(lambda: free >= size)
            free -= size
        try:
            return act(name)
        finally:
            with room:
                free += size
                room.notify_all()

    with ThreadPoolExecutor(share.at_once, "batchai-collect") as pool:
        futures = [pool.submit(within, name) for name in sizes]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
