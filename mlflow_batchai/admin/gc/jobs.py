"""Job folders on a control share: which of them can go, and removing one."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mlflow_batchai.admin.gc.items import Item, Say
from mlflow_batchai.agent.protocol import PROTOCOL_VERSION, JobPaths
from mlflow_batchai.errors import BatchAIError, ShareError, ShareNotFoundError
from mlflow_batchai.job import folders
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Hold, Lease
from mlflow_batchai.job.places import output_places
from mlflow_batchai.storage import Share, spelling
from mlflow_batchai.storage.base import Entry
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.storage.objects import each

# Agents that were started by a submitter which then died may wait for their turn as long as what opens their volumes is good.
NEVER_STARTED_SECONDS = 7 * 86400.0
# A directory in a job folder: its removal has begun, and whoever finds it goes on with that.
REMOVING = "removing"
TRIES = 5
_FOLDER = re.compile(r"(?:(?P<prefix>.+)/)?(?P<segment>workspaces/[^/]+/experiments/[^/]+/jobs/(?P<job>[^/]+)/[^/]+)")


@dataclass(frozen=True)
class Remains:
    """The job folders of one share, judged.

    Attributes:
        items: those that can go.
        going: their folders.
        living: short ids of jobs that have not ended, or whose results are on their way.
    """

    items: Sequence[Item]
    going: frozenset[str]
    living: frozenset[str]


@dataclass(frozen=True)
class _Fate:
    """What becomes of a folder.

    Attributes:
        reason: why it can go; empty: it stays.
        since: when its job ended, seconds since the epoch.
        also: other folders of the share that belong to the job.
        attempt: the job's current one; None where there is no plan.
        lives: whether its job may still need something.
        trouble: a sentence on why nobody can say.
        theirs: whether another user submitted it.
    """

    reason: str = ""
    since: float | None = None
    also: tuple[str, ...] = ()
    attempt: int | None = None
    lives: bool = False
    trouble: str = ""
    theirs: bool = False


def find(share: Share, found: Sequence[str], now: float, seconds: float, deleted: Collection[str], say: Say) -> Remains:
    """Judge job folders.

    Those can go whose job ended more than ``seconds`` ago, with its results in MLflow, or whose run was deleted; and what a
    submit that died half-way has left, after a week at least.

    Args:
        found: job folders (``folders.find``).
        deleted: ids of runs that were deleted in MLflow.
        say: told of what can't be judged.
    """
    fates = dict(zip(found, each(share, lambda folder: _fate(share, folder, now, seconds, deleted), found), strict=True))
    for folder, fate in fates.items():
        if fate.trouble:
            say(f"{share.url}: {folder} stays: {fate.trouble}")
    if theirs := sum(fate.theirs for fate in fates.values()):
        say(f"{share.url}: {theirs} job folder{' of another user stays' if theirs == 1 else 's of other users stay'}")
    going = {folder: fate for folder, fate in fates.items() if fate.reason}
    sizes = _sizes(share, [path for folder, fate in going.items() for path in (folder, *fate.also)])
    items = [
        Item(
            "job",
            f"{share.url}/{folder}",
            sum(sizes[path] for path in (folder, *fate.also)),
            fate.since,
            "; also ".join((fate.reason, *fate.also)),
            partial(_remove, share, folder, fate.also, fate.attempt),
        )
        for folder, fate in going.items()
    ]
    living = frozenset(folder.rpartition("/")[2] for folder, fate in fates.items() if fate.lives or fate.trouble or fate.theirs)
    return Remains(items, frozenset(going), living)


def _fate(share: Share, folder: str, now: float, seconds: float, deleted: Collection[str]) -> _Fate:
    try:
        there = {entry.name: entry for entry in share.list(f"{folder}/batchai")}
        if not there:
            return _Fate()  # outputs of a job whose own folder lies elsewhere
        if _is_theirs(share, folder):
            return _Fate(theirs=True)
        if REMOVING in there:
            also = tuple(elsewhere(Job(share, folder))) if "plan.json" in there else ()
            return _Fate("its removal was interrupted", _newest(there.values()), also)
        if "plan.json" not in there:
            return _half_done(there, now, seconds)
        job = Job(share, folder)
        return replace(_judge(job, there, now, seconds, deleted), attempt=job.attempt)
    except BatchAIError as error:
        return _Fate(trouble=str(error))
    except (KeyError, TypeError, ValueError) as error:
        return _Fate(trouble=f"it can't be understood ({type(error).__name__}: {error})")


def _is_theirs(share: Share, folder: str) -> bool:
    """Whether another user submitted a job, where shares know of users; to root all are its own."""
    if not isinstance(share, DirectoryShare) or os.geteuid() == 0:
        return False
    found = share.look(f"{folder}/batchai")
    return found is not None and found.st_uid != os.geteuid()


def _judge(job: Job, there: dict[str, Entry], now: float, seconds: float, deleted: Collection[str]) -> _Fate:
    if job.plan.protocol > PROTOCOL_VERSION:
        return _Fate(trouble="a newer mlflow-batchai made it; update this one")
    snapshot, state = job.snapshot(), job.state()
    if not state.ended:
        if snapshot.announces or job.handle() is not None:
            return _Fate(lives=True)
        fate = _half_done(there, now, seconds)
        if fate.reason and job.attempt > 1:
            # Whoever began it has died, and the attempt before has left results.
            return _Fate(lives=True, trouble=f"its attempt {job.attempt} was never started: batchai job attach {job.name}")
        return fate
    # A later attempt that could not be started comes after one that has left results.
    by_submitter = (snapshot.verdict or {}).get("by") == "submitter" and job.attempt == 1
    lease = Lease(job)
    since = (state.end_time or 0) / 1000
    is_deleted = job.plan.run_id in deleted
    if not by_submitter and not lease.finished():
        # Nobody can attach to one whose run is deleted; it goes as soon as nobody can be at it.
        if not is_deleted:
            return _Fate(lives=True, trouble=f"its results are not in MLflow yet: batchai job attach {job.name}")
        if lease.glance().hold is not Hold.FREE and now - since <= seconds:
            return _Fate(lives=True, trouble="its run was deleted, and a process may relay it still")
    also = tuple(elsewhere(job))
    if is_deleted:
        return _Fate("its run was deleted", since, also)
    if now - since <= seconds:
        return _Fate()
    if left_out := [] if by_submitter else lease.left_out():
        what = f"not all of its results are in MLflow ({left_out[0]}); batchai job delete {job.name} gives them up"
        return _Fate(trouble=what)
    return _Fate("its submit failed" if by_submitter else "ended; results are in MLflow", since, also)


def _half_done(there: dict[str, Entry], now: float, seconds: float) -> _Fate:
    newest = _newest(there.values())
    if newest is None or now - newest <= max(seconds, NEVER_STARTED_SECONDS):
        return _Fate(lives=True)
    return _Fate("was never started", newest)


def _newest(entries: Iterable[Entry]) -> float | None:
    return max((entry.modified for entry in entries if entry.modified is not None), default=None)


def elsewhere(job: Job) -> list[str]:
    """Folders of the control share, besides its own, that a job wrote outputs and copies of its logs to; nobody else does."""
    control = str(job.plan.volumes[0].share)
    matched = _FOLDER.fullmatch(job.folder)
    # What is removed is named by a file that others can write: it has to be this very job's.
    if matched is None or matched["segment"] != job.plan.segment:
        return []
    segment = matched["segment"]
    roots = []
    for place in output_places(job.plan):
        before = place["path"].partition(segment)[0]
        roots.append((place["share"], spelling.on_share(before) if place["rclone"] else before))
    copied = job.plan.log_copy_prefix
    if copied and copied.volume is not None:
        roots.append((job.plan.volumes[copied.volume].share, f"{copied.path}/" if copied.path else ""))
    found = []
    for address, before in roots:
        if address == control or str(address).startswith(control + "/"):
            inside = str(address)[len(control) + 1 :]
            found.append("/".join(part.strip("/") for part in (inside, before, segment) if part.strip("/")))
    return [path for path in dict.fromkeys(found) if path != job.folder]


def _remove(share: Share, folder: str, also: Sequence[str], attempt: int | None) -> bool:
    """Remove a job's folders, its own last, so that a removal that is interrupted can be gone on with."""
    for _ in range(TRIES):
        # What another gc removes under our hands.
        with contextlib.suppress(ShareNotFoundError):
            return _removed(share, folder, also, attempt)
    return not share.list(folder)


def _removed(share: Share, folder: str, also: Sequence[str], attempt: int | None) -> bool:
    mark = f"{folder}/batchai/{REMOVING}"
    names = {entry.name for entry in share.list(f"{folder}/batchai")}
    if not names:
        share.delete(folder)  # another gc was quicker
        return True
    if REMOVING not in names:
        # Whoever would retry the job can't any more; if somebody has, meanwhile, the job stays.
        if attempt is not None and not share.claim(JobPaths(folder, attempt + 1).begun):
            return any(entry.name == REMOVING for entry in share.list(f"{folder}/batchai"))
        share.claim(mark)
    for path in also:
        share.delete(path)
    inside = [f"{folder}/{entry.name}" for entry in share.list(folder) if entry.name != "batchai"]
    inside += [f"{folder}/batchai/{entry.name}" for entry in share.list(f"{folder}/batchai") if entry.name != REMOVING]
    for path in inside:
        share.delete(path)
    share.delete(folder)
    return not share.list(folder)


def named_hashes(share: Share, found: Sequence[str]) -> set[str]:
    """SHA-256 of every staged file that a job names.

    Raises:
        ShareError: a plan can't be read, so that nobody knows.
    """
    hashes: set[str] = set()
    for folder, plan in zip(found, each(share, partial(folders.plan_record, share), found), strict=True):
        if plan is not None:
            hashes.update(_hashes(plan))
        elif any(entry.name == "plan.json" for entry in share.list(f"{folder}/batchai")):
            raise ShareError(f"the plan of {folder} can't be read")
    return hashes


def _hashes(value: Any) -> Iterable[str]:
    if isinstance(value, dict):
        if isinstance(value.get("sha256"), str):
            yield value["sha256"]
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _hashes(inner)


def _sizes(share: Share, tops: Sequence[str]) -> dict[str, int]:
    """Bytes below each of several folders."""
    sizes = dict.fromkeys(tops, 0)
    level = [(top, top) for top in tops]
    while level:
        lists = each(share, lambda pair: share.list(pair[1]), level)
        following = []
        for (top, path), entries in zip(level, lists, strict=True):
            sizes[top] += sum(entry.size for entry in entries)
            following += [(top, f"{path}/{entry.name}") for entry in entries if entry.is_directory]
        level = following
    return sizes
