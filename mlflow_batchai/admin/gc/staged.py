"""Staged files on a control share that no job's plan names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from mlflow_batchai.admin.gc.items import Item
from mlflow_batchai.admin.gc.jobs import named_hashes
from mlflow_batchai.agent.protocol import OBJECTS, TREES
from mlflow_batchai.job import folders
from mlflow_batchai.storage import Share
from mlflow_batchai.storage.base import Entry
from mlflow_batchai.storage.objects import each
from mlflow_batchai.storage.sweeps import sweeping

# A submit that sends for hours has no plan yet. What is younger stays, though ``storage.sweeps`` would have it sent again.
YOUNG_SECONDS = 86400.0


def find(share: Share, found: Sequence[str], going: Collection[str], before: float) -> list[Item]:
    """One item for all staged files that no job will name when some job folders have gone; none if there are no such files.

    Args:
        found: all job folders of the share.
        going: those that go first.
        before: what was sent after that stays; seconds since the epoch.

    Raises:
        ShareError: a plan can't be read.
    """
    unnamed = _unnamed(share, named_hashes(share, [folder for folder in found if folder not in going]), before)
    if not unnamed:
        return []
    newest = max(entry.modified or 0.0 for _, entry in unnamed)
    count = f"{len(unnamed)} file{'' if len(unnamed) == 1 else 's'} that no job names"
    size = sum(entry.size for _, entry in unnamed)
    return [Item("staged files", f"{share.url}/{OBJECTS}", size, newest, count, partial(_remove, share, before))]


def _unnamed(share: Share, named: Collection[str], before: float) -> list[tuple[str, Entry]]:
    """(path, entry) of the staged files that aren't among the named ones and were sent before that time."""
    places = [f"{OBJECTS}/{entry.name}" for entry in share.list(OBJECTS) if entry.is_directory and len(entry.name) == 2]
    return [
        (f"{place}/{entry.name}", entry)
        for place, entries in zip(places, each(share, share.list, places), strict=True)
        for entry in entries
        if entry.name not in named and entry.modified is not None and entry.modified < before
    ]


def _remove(share: Share, before: float) -> bool:
    """Remove what no job names by now, in as many sweeps as it takes."""
    while True:
        with sweeping(share) as sweep:
            # What says that a whole set lies there: true only as long as all of it does.
            share.delete(TREES)
            unnamed = [path for path, _ in _unnamed(share, named_hashes(share, folders.find(share)), before)]
            removed = sweep.remove(unnamed)
        if removed == len(unnamed):
            return True
        if removed == 0:
            return False
