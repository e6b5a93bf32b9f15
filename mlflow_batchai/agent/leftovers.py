"""Find and remove unused files on a node's own disk, for `batchai gc`.

Agents remove by themselves what every job leaves (``tidy``). Environments and kept preparations, which cost time to make, stay
until then.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

from mlflow_batchai.agent.environments import kept
from mlflow_batchai.agent.layout import archive_path
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.reservation.agents import living

Answer = dict[str, Any]

DAY_SECONDS = 86400.0
LOG_SECONDS = 30 * DAY_SECONDS
# Each version of this package has an archive of its own; a client of that version sends it again, as it does a tool.
SENT_SECONDS = 90 * DAY_SECONDS

_KEPT = re.compile(r"^[0-9a-f]{4,64}$")
_LOG = re.compile(r"^[^.].*\.log$")
_TOOL = re.compile(r"^rclone-[0-9a-f]+")
_ARCHIVE = re.compile(r"^agent-[0-9a-f]+\..*(pyz|new)$")


class Leftover(NamedTuple):
    """One thing that could go.

    Attributes:
        kind: ``environment``, ``preparation``, ``log``, ``tool`` or ``agent``.
        used: when it was last used, seconds since the epoch by this node's clock.
        remove: removes it, unless it is in use by now; whether it is gone.
    """

    kind: str
    path: str
    used: float
    reason: str
    remove: Callable[[], bool]


def leftovers(
    root: str,
    seconds: float,
    environments: str | None = None,
    agents: str | None = None,
    archive: str | None = None,
    remove: Sequence[str] | None = None,
) -> Answer:
    """List what was unused for so many seconds and isn't in use now; with ``remove``, remove it.

    Args:
        environments: where it keeps built environments; None: below its root.
        agents: where agents' archives are kept; None: where the one that answers lies.
        archive: the one that the next agent runs; None: the one that answers.
        remove: paths; what is not found anew, or in use by now, stays.

    Returns:
        ``items``: of each the ``kind``, ``path``, ``bytes`` that would come free, ``age`` (seconds; clocks of nodes differ) and
        ``reason``; ``gone``: those of the paths where nothing is any more.
    """
    root, now = os.path.expanduser(root), time.time()
    own = archive or archive_path()
    found = [
        *_kept(os.path.expanduser(environments) if environments else os.path.join(root, "envs"), "environment", now - seconds),
        *_kept(os.path.join(root, "prepared"), "preparation", now - seconds),
        *_logs(root, now - seconds),
        *_tools(root, now - seconds),
        *_archives(agents or os.path.dirname(own), own, now - seconds),
    ]
    if remove is not None:
        wanted = set(remove)
        gone = [each.path for each in found if each.path in wanted and each.remove()]
        return {"items": [], "gone": [*gone, *(path for path in remove if path not in gone and not os.path.lexists(path))]}
    items = [
        {"kind": each.kind, "path": each.path, "bytes": size(each.path), "age": now - each.used, "reason": each.reason}
        for each in found
    ]
    return {"items": items, "gone": []}


def tidy(root: str, now: float, archive: str | None = None) -> None:
    """Remove agents' logs after 30 days, archives and tools that clients have sent after 90 days without use.

    Called by an agent that has the node; what can't be removed is left.

    Args:
        archive: the one that runs, which stays; default: ours.
    """
    found = [*_logs(root, now - LOG_SECONDS), *_tools(root, now - SENT_SECONDS)]
    own = archive or archive_path()
    if os.path.isfile(own):  # not run from source
        with contextlib.suppress(OSError):
            # Disks that are mounted with noatime don't tell otherwise that it is in use.
            os.utime(own, (now, now))
        found += _archives(os.path.dirname(own), own, now - SENT_SECONDS)
    for each in found:
        each.remove()


def size(path: str) -> int:
    """Bytes that removing a file or a folder sets free: what has another name elsewhere stays."""
    total = 0
    inside = (os.path.join(parent, name) for parent, folders, names in os.walk(path) for name in (*folders, *names))
    for each in (path, *inside):
        with contextlib.suppress(OSError):
            status = os.lstat(each)
            if not stat.S_ISDIR(status.st_mode) and status.st_nlink == 1:
                total += status.st_size
    return total


def _kept(place: str, kind: str, before: float) -> Iterator[Leftover]:
    """Folders of ``kept.once``: made and unused since, or never finished."""
    for name in _names(place, _KEPT):
        folder = os.path.join(place, name)
        used = _last_use(folder)
        try:
            if used is None or used >= before or kept.is_in_use(folder):
                continue
        except OSError:
            continue  # another user's: he removes it
        reason = "not used since" if os.path.exists(os.path.join(folder, kept.MARKER)) else "never finished"
        yield Leftover(
            kind, folder, used, reason, functools.partial(kept.remove, folder, functools.partial(_is_old, folder, before))
        )


def _is_old(folder: str, before: float) -> bool:
    used = _last_use(folder)
    return used is not None and used < before


def _last_use(folder: str) -> float | None:
    """Time of the marker, which users of the folder refresh; without a marker, time of the folder."""
    for path in (os.path.join(folder, kept.MARKER), folder):
        try:
            return os.lstat(path).st_mtime
        except OSError:
            continue
    return None


def _logs(root: str, before: float) -> Iterator[Leftover]:
    used = {agent["log"] for agent in living(root)}
    yield from _files(os.path.join(root, "logs"), "log", _LOG, before, lambda path: path in used)


def _tools(root: str, before: float) -> Iterator[Leftover]:
    yield from _files(os.path.join(root, "tools"), "tool", _TOOL, before, lambda path: False)


def _archives(folder: str, own: str, before: float) -> Iterator[Leftover]:
    """Archives of other versions: an agent reads its own as long as it lives."""
    yield from _files(folder, "agent", _ARCHIVE, before, lambda path: path == own or path in proc.arguments())


def _files(folder: str, kind: str, names: re.Pattern[str], before: float, keep: Callable[[str], bool]) -> Iterator[Leftover]:
    for name in _names(folder, names):
        path = os.path.join(folder, name)
        try:
            status = os.lstat(path)
        except OSError:
            continue
        # Who uses an archive or a tool says so by either time; disks that are mounted with noatime tell only one.
        used = max(status.st_atime, status.st_mtime) if kind == "agent" else status.st_mtime
        if stat.S_ISREG(status.st_mode) and used < before and not keep(path):
            yield Leftover(kind, path, used, "not used since", functools.partial(_unlink, path))


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _names(folder: str, pattern: re.Pattern[str]) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if pattern.search(name))
    except OSError:
        return []


VERBS: dict[str, Callable[..., Answer]] = {"leftovers": leftovers}
