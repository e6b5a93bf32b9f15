"""A job's directories by Batch AI's ids as clients see them: its logs and those that its document names."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mlflow_batchai.errors import NotFoundError, ShareError, UsageError, some_of
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.places import locate, mount_points, output_places
from mlflow_batchai.storage import Share, spelling
from mlflow_batchai.storage.base import Entry
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.storage.within import Found, Within
from mlflow_batchai.tracking.artifacts import bounds_of, files_below

LOGS = "stdouterr"


class Directory(NamedTuple):
    """A directory of a job.

    Attributes:
        id: ``stdouterr``, or one of the document's outputDirectories.
        path: its path there, as nodes call it.
        rclone: whether the share has it in rclone's spelling.
        bounds: inside of what its links are followed; None: none are.
    """

    id: str
    share: Share
    path: str
    rclone: bool = False
    bounds: Within | None = None

    def inside(self, path: str) -> str:
        """The path on the share of what lies in it, by the name that the job gave it."""
        parts = [part for part in path.split("/") if part not in ("", ".")]
        whole = "/".join([self.path, *parts])
        return spelling.on_share(whole) if self.rclone else whole

    def found(self, path: str) -> str:
        """The same as it can be opened now: through links that lead to something else of the job."""
        inside = self.inside(path)
        return inside if self.bounds is None else self.bounds.real(inside) or inside

    def called(self, name: str) -> str:
        """Name that the job uses for a file of the share."""
        return spelling.on_mount(name) if self.rclone else name

    def entries(self, path: str) -> dict[str, Entry]:
        """What lies directly in a folder of it, or the one file of that name; by the path from here.

        Raises:
            NotFoundError: there is no such path; the message says how far it goes, and what is there.
        """
        parts = [part for part in path.split("/") if part not in ("", ".")]
        for depth, part in enumerate(parts):
            entries = self._listed("/".join(parts[:depth]))
            found = next((entry for entry in entries if entry.name == part), None)
            if found is not None and not found.is_directory:
                if depth + 1 == len(parts):
                    return {path: found}
                raise NotFoundError(f"{'/'.join([self.id, *parts[: depth + 1]])} is a file, not a folder")
            if found is None:
                where = "/".join([self.id, *parts[:depth]])
                names = [entry.name for entry in entries]
                listed = some_of(names) if names else "nothing yet"
                raise NotFoundError(f"there is no '{part}' in {where}; there is: {listed}")
        return {"/".join([*parts, entry.name]): entry for entry in self._listed("/".join(parts))}

    def _listed(self, path: str) -> list[Entry]:
        entries = self.share.list(self.inside(path)) if self.bounds is None else self.bounds.entries(self.inside(path))
        return [entry._replace(name=self.called(entry.name)) for entry in entries]


def directory(job: Job, identity: str) -> Directory:
    """A directory of a job's present attempt.

    Raises:
        NotFoundError: the job has none of that id.
        ShareError: it lies where this machine can't read it.
    """
    if identity == LOGS:
        return _directory(job, identity, job.share, job.paths.stdouterr)
    for place in output_places(job.plan):
        if place["id"] == identity:
            return _directory(job, identity, *job.place(place["share"], place["path"]), place["rclone"])
    for entry in job.plan.output_directories:
        if entry.id == identity:
            index, _ = locate(entry.path_prefix, mount_points(job.plan.volumes), identity)
            volume = job.plan.volumes[index]
            raise ShareError(
                f"output directory '{identity}' of job {job.name} lies on {volume.name}, which this machine can't read; look"
                " at it on a node"
            )
    known = ", ".join([LOGS, *(entry.id for entry in job.plan.output_directories)])
    raise NotFoundError(f"job {job.name} has no output directory '{identity}'; it has: {known}")


def _directory(job: Job, identity: str, share: Share, path: str, rclone: bool = False) -> Directory:
    bounds = bounds_of(job, share, path) if isinstance(share, DirectoryShare) else None
    return Directory(identity, share, path, rclone, bounds)


def files(place: Directory) -> dict[str, int]:
    """All files of a directory, as they are now: path from there, by the names that the job gave them -> size in bytes.

    Links that lead out of the job's folder, where they would name files of this machine, are none.

    Raises:
        ShareError: the share can't be read.
    """
    if place.bounds is None:
        there, _ = files_below(place.share, place.inside(""))
        sizes = {name: stamp.size for name, stamp in there.items()}
    else:
        here = place.bounds.find(place.inside("")) or Found()
        sizes = {name: size for name, (_, size, _) in here.files.items()}
    return {place.called(name): size for name, size in sorted(sizes.items())}


def download(place: Directory, job: Job, path: str, to: Path) -> Path:
    """Copy a file or a folder of a directory into a folder of this machine; where it is then.

    Args:
        path: from the directory; empty: all of it.

    Raises:
        NotFoundError: there is no such file.
        ShareError: the share can't be read, or this machine can't keep it.
    """
    there = files(place)
    wanted = [name for name in there if path in ("", name) or name.startswith(f"{path}/")]
    if not wanted:
        hint = f"there is: {some_of(list(there))}" if there else "there is nothing yet"
        raise NotFoundError(f"there is no '{path}' in {place.id} of job {job.name}; {hint}")
    target = to / (path.rpartition("/")[2] or place.id)
    for name in wanted:
        place.share.download(place.found(name), target / name[len(path) :].strip("/") if name != path else target)
    return target


def log_name(job: Job, rank: int | None, stream: str) -> str:
    """The file of the logs that holds what one rank wrote (None: all, joined).

    Args:
        stream: ``stdout`` or ``stderr``.

    Raises:
        UsageError: there is no such rank.
    """
    ranks = job.plan.ranks
    if rank is not None and not 0 <= rank < ranks:
        raise UsageError(f"job {job.name} has no rank {rank}; it has {ranks}, numbered from 0")
    return f"{stream}.txt" if rank is None or ranks == 1 else f"{stream}-{rank}.txt"
