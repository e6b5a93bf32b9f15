"""Upload folders of a share into a run's artifacts, file by file."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Condition
from typing import TYPE_CHECKING, TypeVar

from mlflow_batchai.agent.safeopen import OddFileError
from mlflow_batchai.errors import ShareError, ShareNotFoundError, some_of
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.places import segment_of
from mlflow_batchai.job.sent import Stamp
from mlflow_batchai.storage import Share, spelling
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.storage.within import Within, as_file, is_foreign
from mlflow_batchai.tracking import runs, stores

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

Result = TypeVar("Result")

# Bytes of a file that is read whole.
SMALL = 1 << 20
# Bytes of a file's name on this machine; Azure takes 255 letters of any alphabet.
LONGEST_NAME = 255
# Bytes of files that lie here at a time, on their way from a share over the network; one that is larger lies here alone.
PORTION = 256 << 20
# Bytes of a growing file that are asked for at once: of so many an Azure share's answer is one, whatever is written meanwhile.
PIECE = 4 << 20
# Bytes of files that are fetched at once; one that is larger is fetched alone, in pieces.
FETCHED_AT_ONCE = 16 << 20
_GONE, _CLOSED = "gone", "this account may not read it"
_FOREIGN = "a hard link to a file of another user"


class Folder:
    """A folder of a share, on its way to the run's artifacts. One that isn't there is empty.

    Args:
        artifact: its path among the artifacts.
        rclone: whether nodes wrote it by rclone, so that some names are spelled otherwise on the share.
        copies: if its files only grow: where they lie from one call to the next, so that only what is new is fetched.
    """

    def __init__(
        self,
        client: MlflowClient,
        job: Job,
        share: Share,
        path: str,
        artifact: str,
        rclone: bool = False,
        copies: Path | None = None,
    ) -> None:
        self._client = client
        self._job = job
        self._share = share
        self._path = spelling.on_share(path) if rclone else path
        self._rclone = rclone
        self._copies = copies
        # Name as nodes know it -> on the share: spelled, or from its root and without links where that is a directory.
        self._spelled: dict[str, str] = {}
        # Why -> files that were not sent for it.
        self._refused: dict[str, list[str]] = {}
        self._astray: list[str] = []
        self.artifact = artifact

    @property
    def notes(self) -> list[str]:
        """Sentences on what was left out."""
        refused = (f"not sent: {some_of(names)} ({why})" for why, names in self._refused.items())
        return [f"{self.artifact}: {note}" for note in (*self._astray, *refused)]

    def look(self) -> dict[str, Stamp]:
        """The files in it and below, by their paths from there as nodes know them."""
        share, path = self._share, self._path
        if isinstance(share, DirectoryShare):
            here = bounds_of(self._job, share, path).find(path)
            if here is None:
                self._astray = [f"not sent: {path} lies behind a link out of the share"]
                return {}
            if here.astray:
                names = ", ".join(sorted(here.astray))
                self._astray = [f"not sent: {names} (links out of the share, or to nothing)"]
            left_out = {_CLOSED: here.closed, "it lies too deep": here.deep, _FOREIGN: here.foreign}
            self._refused = {why: [_line(name) for name in names] for why, names in left_out.items() if names}
            self._spelled = {name: real for name, (real, _, _) in here.files.items()}
            return {name: Stamp(size, modified) for name, (_, size, modified) in here.files.items()}
        found, self._astray = files_below(share, path)
        self._spelled = {spelling.on_mount(name) if self._rclone else name: name for name in found}
        return {name: found[spelled] for name, spelled in self._spelled.items()}

    def read(self, name: str) -> bytes:
        """A small file's content; nothing if it has gone, or isn't small."""
        return next((data for _, data in self._share.read_many([self._on_share(name)], SMALL)), b"")

    def _on_share(self, name: str) -> str:
        return self._spelled[name] if isinstance(self._share, DirectoryShare) else f"{self._path}/{self._spelled[name]}"

    def send(self, files: Mapping[str, Stamp]) -> Iterator[str]:
        """Send files of it; each one's name when it is there. Memory and disk need not hold them all.

        One that can't be read, or that the store refuses for its name or its size, keeps no other from being sent.
        """
        if isinstance(self._share, DirectoryShare):
            for name in files:
                if why := self._log_open(self._share, name):
                    self._leave_out(name, why)
                else:
                    yield name
            return
        for names in _portions({name: stamp.size for name, stamp in files.items()}):
            sizes = {name: files[name].size for name in names}
            with contextlib.nullcontext(self._copies) if self._copies else TemporaryDirectory(prefix="batchai-") as scratch:
                there = at_once(self._share, functools.partial(self._fetch, Path(scratch), sizes), sizes)
                for name, fetched in zip(names, there, strict=True):
                    if why := self._log(Path(scratch, name), name) if fetched else _GONE:
                        self._leave_out(name, why)
                    else:
                        yield name

    def _log_open(self, share: DirectoryShare, name: str) -> str:
        """Send a file of a directory: what was opened, whatever takes its place meanwhile; why it isn't, or nothing."""
        try:
            file = share.open(self._spelled[name])
        except ShareNotFoundError:
            return _GONE
        except ShareError as error:
            if isinstance(error.__cause__, PermissionError):
                return _CLOSED
            if isinstance(error.__cause__, OddFileError):
                return "it is no file any more"
            raise
        folder = share.look(self._path)
        with file:
            if folder and is_foreign(os.fstat(file.fileno()), folder):
                return _FOREIGN
            with as_file(file, name.rpartition("/")[2]) as path:
                return self._log(path, name)

    def _log(self, file: Path, name: str) -> str:
        return log_file(self._client, self._job, file, f"{self.artifact}/{name}")

    def _leave_out(self, name: str, why: str) -> None:
        self._refused.setdefault(why, []).append(_line(name))

    def _fetch(self, scratch: Path, sizes: Mapping[str, int], name: str) -> bool:
        """Download a file; False if someone has removed it meanwhile."""
        path, target = self._on_share(name), scratch / name
        try:
            if self._copies is None:
                self._share.download(path, target)
            else:
                _fetch_new(self._share, path, target, sizes[name])
        except ShareNotFoundError:
            return False
        return True


def _fetch_new(share: Share, path: str, copy: Path, size: int) -> None:
    """Append what a growing file of such a size has more than its copy."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    with copy.open("a+b") as file:
        have, end = file.tell(), b""
        # A file is made longer before it is written there: NULs at the end may be something else by now.
        while have and not end:
            start = max(0, have - PIECE)
            file.seek(start)
            end = file.read(have - start).rstrip(b"\0")
            have = start + len(end)
        if have > size:
            have = 0  # another file took its place
        file.truncate(have)
        while have < size and (data := share.read(path, have, min(PIECE, size - have))):
            have += file.write(data)


def log_file(client: MlflowClient, job: Job, file: Path, artifact: str) -> str:
    """Send a file of that name to a path of the run's artifacts; why the server refuses just this one, or nothing."""
    try:
        client.log_artifact(job.plan.run_id, str(file), artifact.rpartition("/")[0])
    except Exception as error:  # MLflow raises whatever its store raises
        if not stores.refuses_a_file(error):
            raise
        answer = getattr(error, "response", None)
        # The sentence has the file's whole address, and so would be another one for each file.
        return _line(str(error)) if answer is None else f"the server's answer is {answer.status_code} {answer.reason}"
    return ""


def _line(text: str) -> str:
    """A name, or a sentence on one, in one line that every store takes."""
    return " ".join(runs.plain(text).split())


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


def bounds_of(job: Job, share: DirectoryShare, path: str) -> Within:
    """The job's own folder around a path on a share: links must not lead out of it.

    Ranks can put a link anywhere, and files of other jobs, or of this machine, are not theirs to send.
    """
    before, found, _ = path.partition(segment_of(job.folder))
    return Within(share, before + found)


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
    """Results of a function for each file, as many at a time as pay and as memory allows."""
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
