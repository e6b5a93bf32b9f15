"""Job folders on a control share: find those that can go, and remove them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from mlflow_batchai.admin.gc.items import Age, Item, Say
from mlflow_batchai.agent.protocol import PROTOCOL_VERSION, JobPaths
from mlflow_batchai.errors import BatchAIError, ShareNotFoundError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease, LeaseState
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


class _Goes(NamedTuple):
    """A folder that can go: since when its job is over, which other folders belong to it, and the attempt that it was at."""

    reason: str
    since: float | None
    also: tuple[str, ...] = ()
    attempt: int | None = None


# Why a folder stays, where nobody has to be told each time.
_NO_MATTER, _THEIRS = "", "another user submitted it"


def find(share: Share, found: Sequence[str], age: Age, deleted: Collection[str], say: Say) -> dict[str, Item]:
    """The job folders that can go: folder -> item.

    Those can go whose job ended long enough ago, with its results in MLflow, or whose run was deleted; and what a submit that
    died half-way has left, after a week at least.

    Args:
        say: told of what can't be judged.
    """
    judged = dict(zip(found, each(share, lambda folder: _judge(share, folder, age, deleted), found), strict=True))
    going = {folder: one for folder, one in judged.items() if isinstance(one, _Goes)}
    for folder, why in judged.items():
        if isinstance(why, str) and why not in (_NO_MATTER, _THEIRS):
            say(f"{share.url}: {folder} stays: {why}")
    if theirs := list(judged.values()).count(_THEIRS):
        say(f"{share.url}: {theirs} job folder{' of another user stays' if theirs == 1 else 's of other users stay'}")
    sizes = _sizes(share, [path for folder, one in going.items() for path in (folder, *one.also)])
    return {
        folder: Item(
            "job",
            f"{share.url}/{folder}",
            sum(sizes[path] for path in (folder, *one.also)),
            one.since,
            "; also ".join((one.reason, *one.also)),
            partial(_remove, share, folder, one.also, one.attempt),
        )
        for folder, one in going.items()
    }


def _judge(share: Share, folder: str, age: Age, deleted: Collection[str]) -> _Goes | str:
    try:
        there = {entry.name: entry for entry in share.list(f"{folder}/batchai")}
        if not there:
            return _NO_MATTER  # outputs of a job whose own folder lies elsewhere
        if _is_theirs(share, folder):
            return _THEIRS
        if REMOVING in there:
            also = tuple(elsewhere(Job(share, folder))) if "plan.json" in there else ()
            return _Goes("its removal was interrupted", _newest(there.values()), also)
        if "plan.json" not in there:
            return _half_done(there, age)
        return _judge_job(Job(share, folder), there, age, deleted)
    except BatchAIError as error:
        return str(error)
    except (KeyError, TypeError, ValueError) as error:
        return f"it can't be understood ({type(error).__name__}: {error})"


def _is_theirs(share: Share, folder: str) -> bool:
    """Whether another user submitted a job, where shares know of users; to root all are its own."""
    if not isinstance(share, DirectoryShare) or os.geteuid() == 0:
        return False
    found = share.look(f"{folder}/batchai")
    return found is not None and found.st_uid != os.geteuid()


def _judge_job(job: Job, there: dict[str, Entry], age: Age, deleted: Collection[str]) -> _Goes | str:
    if job.plan.protocol > PROTOCOL_VERSION:
        return "a newer mlflow-batchai made it; update this one"
    snapshot, state = job.snapshot(), job.state()
    if not state.ended:
        if snapshot.announces or job.handle() is not None:
            return _NO_MATTER
        left = _half_done(there, age)
        if isinstance(left, str):
            return left
        if job.attempt == 1:
            return left._replace(attempt=1)
        # Whoever began it has died, and the attempt before has left results.
        return f"its attempt {job.attempt} was never started: batchai job attach {job.name}"
    # A later attempt that could not be started comes after one that has left results.
    by_submitter = (snapshot.verdict or {}).get("by") == "submitter" and job.attempt == 1
    lease = Lease(job)
    since = (state.end_time or 0) / 1000
    is_deleted = job.plan.run_id in deleted
    if not by_submitter and not lease.finished():
        # Nobody can attach to one whose run is deleted; it goes as soon as nobody can be at it.
        if not is_deleted:
            return f"its results are not in MLflow yet: batchai job attach {job.name}"
        if lease.view().state is not LeaseState.FREE and not age.is_past(since):
            return "its run was deleted, and a process may relay it still"
    reason = "its run was deleted" if is_deleted else "its submit failed" if by_submitter else "ended; results are in MLflow"
    if not is_deleted and not age.is_past(since):
        return _NO_MATTER
    if not is_deleted and not by_submitter and (left_out := lease.left_out()):
        return f"not all of its results are in MLflow ({left_out[0]}); batchai job delete {job.name} gives them up"
    return _Goes(reason, since, tuple(elsewhere(job)), job.attempt)


def _half_done(there: dict[str, Entry], age: Age) -> _Goes | str:
    newest = _newest(there.values())
    return _Goes("was never started", newest) if age.is_past(newest, NEVER_STARTED_SECONDS) else _NO_MATTER


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


def _sizes(share: Share, tops: Sequence[str]) -> dict[str, int]:
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
