"""Folders of a share go into a run's artifacts."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from mlflow_batchai.errors import ShareNotFoundError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.shares import Share, spelling
from mlflow_batchai.shares.directory import DirectoryShare

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

Result = TypeVar("Result")

# Bytes of a file's name on this machine; Azure takes 255 letters of any alphabet.
LONGEST_NAME = 255
# Bytes of files that lie here at a time, on their way from a share over the network; one that is larger lies here alone.
PORTION = 256 << 20


@dataclass
class Progress:
    """How far a folder has come into the run's artifacts, for who is cut off in the middle and sends it again.

    Attributes:
        begun: whether it was tried once, as a whole: a folder of this machine, or what of another share lies here.
        sent: after that: its files that are there for certain.
        notes: once it is done: sentences on what was left out.
    """

    begun: bool = False
    sent: set[str] = field(default_factory=set)
    notes: list[str] | None = None


def upload(
    client: MlflowClient,
    job: Job,
    share: Share,
    path: str,
    artifact: str,
    rclone: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Send a folder of a share, as it is now, to the run's artifacts; one that isn't there is none.

    Args:
        rclone: whether nodes wrote it by rclone, so that some names are spelled otherwise on the share.
        progress: how far it has come before; kept up to date.
    """
    run_id = str(job.plan["runId"])
    progress = progress or Progress()
    if isinstance(share, DirectoryShare):
        folder, bounds = share.local(path), bounds_of(job, share)
        if not folder.is_dir():
            return []
        if is_astray(folder, bounds):
            return [f"{artifact}: not sent: {path} lies behind a link out of the share"]
        astray = sorted(_links_astray(folder, bounds))
        _log_folder(client, run_id, folder, artifact, progress, astray)
        return [f"{artifact}: not sent: {', '.join(astray)} (links out of the share, or to nothing)"] if astray else []
    path = spelling.on_share(path) if rclone else path
    sizes, notes = sizes_below(share, path)
    called = {name: spelling.on_mount(name) if rclone else name for name in sizes}
    for names in _portions({name: size for name, size in sizes.items() if called[name] not in progress.sent}):
        with TemporaryDirectory(prefix="batchai-") as scratch:
            targets = {name: Path(scratch, called[name]) for name in names}
            there = at_once(share, functools.partial(_fetch_one, share, path, targets), names)
            notes += [f"not sent: {name} is gone" for name, fetched in zip(names, there, strict=True) if not fetched]
            _log_folder(client, run_id, Path(scratch), artifact, progress)
        progress.sent.update(called[name] for name in names)
        progress.begun = False
    return [f"{artifact}: {note}" for note in notes]


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


def _log_folder(
    client: MlflowClient, run_id: str, folder: Path, artifact: str, progress: Progress, left_out: Sequence[str] = ()
) -> None:
    """Send a folder of this machine: as a whole, which some stores do at once, or what is still to be sent, file by file."""
    if not left_out and not progress.begun:
        progress.begun = True
        client.log_artifacts(run_id, str(folder), artifact)
        return
    for parent, _, names in os.walk(folder):
        inside = Path(parent).relative_to(folder)
        for name in names:
            file = (inside / name).as_posix()
            if file not in left_out and file not in progress.sent:
                client.log_artifact(run_id, str(Path(parent, name)), f"{artifact}/{inside.as_posix()}".removesuffix("/."))
                progress.sent.add(file)


def _fetch_one(share: Share, path: str, targets: Mapping[str, Path], name: str) -> bool:
    """Download a file of a folder; False if someone has removed it meanwhile."""
    try:
        share.download(f"{path}/{name}", targets[name])
    except ShareNotFoundError:
        return False
    return True


def bounds_of(job: Job, share: DirectoryShare) -> Path:
    """What links must not lead out of. A volume on the control share is a folder that nodes can put a link in place of."""
    control = job.share
    if isinstance(control, DirectoryShare) and share.root.is_relative_to(control.root):
        return control.root.resolve()
    return share.root.resolve()


def _links_astray(folder: Path, root: Path) -> Iterator[str]:
    """Links that lead out of the share, where they would name files of this machine, or nowhere."""
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent, name)
            if path.is_symlink() and is_astray(path, root):
                yield path.relative_to(folder).as_posix()


def is_astray(path: Path, root: Path) -> bool:
    return not path.exists() or not path.resolve().is_relative_to(root)


def sizes_below(share: Share, path: str) -> tuple[dict[str, int], list[str]]:
    """(size of each file below a folder, by its path from there; sentences on names that can't be files of this machine)."""
    sizes: dict[str, int] = {}
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
                sizes[folder + entry.name] = entry.size
    return sizes, notes


def at_once(share: Share, act: Callable[[str], Result], names: Iterable[str]) -> list[Result]:
    """What comes of something that is done for each name, as many at a time as pay."""
    with ThreadPoolExecutor(share.at_once, "batchai-collect") as pool:
        futures = [pool.submit(act, name) for name in names]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
