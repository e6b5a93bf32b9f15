"""Removing from a node's own disk what jobs long past have left; what later jobs use stays: environments, kept preparations."""

import contextlib
import os
import re
from typing import Callable, Optional

from mlflow_batchai.agent import tickets
from mlflow_batchai.agent.layout import archive_path

DAY_SECONDS = 86400.0
LEFTOVER_SECONDS = 30 * DAY_SECONDS
# Each version of this package has an archive of its own; a client of that version sends it again.
ARCHIVE_SECONDS = 90 * DAY_SECONDS

_LOG = re.compile(r"\.log$")
_OF_A_TICKET = re.compile(r"^(?P<number>\d+)\.")
_ARCHIVE = re.compile(r"^agent-[0-9a-f]+\.")
_TOOL = re.compile(r"^rclone-[0-9a-f]+")


def tidy(root: str, now: float, archive: Optional[str] = None) -> None:
    """Called by an agent that has taken the node; what can't be removed is left.

    Removes agents' logs, and what belongs to tickets whose own file is gone, after 30 days; archives, and tools that
    clients have sent, after 90 days without use.

    Args:
        archive: the one that runs, which stays; default: ours.
    """
    _remove(os.path.join(root, "logs"), _LOG, lambda name, status: now - status.st_mtime > LEFTOVER_SECONDS)

    def is_leftover(name: str, status: os.stat_result) -> bool:
        found = _OF_A_TICKET.match(name)
        has_ticket = found is not None and os.path.exists(tickets.ticket_path(root, int(found.group("number"))))
        return not has_ticket and now - status.st_mtime > LEFTOVER_SECONDS

    _remove(os.path.dirname(tickets.ticket_path(root, 0)), _OF_A_TICKET, is_leftover)
    # Who uses one says so by its time.
    _remove(os.path.join(root, "tools"), _TOOL, lambda name, status: now - status.st_mtime > ARCHIVE_SECONDS)
    own = archive or archive_path()
    if not os.path.isfile(own):
        return  # run from source
    with contextlib.suppress(OSError):
        # Disks that are mounted with noatime don't tell otherwise.
        os.utime(own, (now, now))
    _remove(
        os.path.dirname(own),
        _ARCHIVE,
        lambda name, status: name != os.path.basename(own) and now - max(status.st_atime, status.st_mtime) > ARCHIVE_SECONDS,
    )


def _remove(folder: str, names: "re.Pattern[str]", is_old: Callable[[str, os.stat_result], bool]) -> None:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                known = names.search(entry.name) and entry.is_file(follow_symlinks=False)
                if known and is_old(entry.name, entry.stat(follow_symlinks=False)):
                    os.unlink(entry.path)
