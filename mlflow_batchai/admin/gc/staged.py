"""Find and remove staged files on a control share that no job's plan names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

from mlflow_batchai.admin.gc.items import Age, Item
from mlflow_batchai.agent.protocol import OBJECTS, TREES
from mlflow_batchai.errors import ShareError
from mlflow_batchai.job import places
from mlflow_batchai.storage import Share
from mlflow_batchai.storage.base import Entry
from mlflow_batchai.storage.objects import STAYS_SECONDS, each


def find(share: Share, found: Sequence[str], going: Collection[str], age: Age) -> list[Item]:
    """One item for all staged files that no job will name when some job folders have gone; none if there are no such files.

    Args:
        going: those that go first.

    Raises:
        ShareError: a plan can't be read.
    """
    named = named_hashes(share, [folder for folder in found if folder not in going])
    unnamed = [one for some in each(share, partial(_unnamed, share, named, age), _folders(share)) for one in some]
    if not unnamed:
        return []
    newest = max(entry.modified or 0.0 for entry in unnamed)
    count = f"{len(unnamed)} file{'' if len(unnamed) == 1 else 's'} that no job names"
    size = sum(entry.size for entry in unnamed)
    return [Item("staged files", f"{share.url}/{OBJECTS}", size, newest, count, partial(_remove, share, age))]


def _folders(share: Share) -> list[str]:
    return [f"{OBJECTS}/{entry.name}" for entry in share.list(OBJECTS) if entry.is_directory and len(entry.name) == 2]


def _unnamed(share: Share, named: Collection[str], age: Age, folder: str) -> list[Entry]:
    """Staged files of a folder that aren't among the named ones and were sent, or last needed, long enough ago."""
    return [entry for entry in share.list(folder) if entry.name not in named and age.is_past(entry.modified, STAYS_SECONDS)]


def named_hashes(share: Share, found: Sequence[str]) -> set[str]:
    """SHA-256 of every staged file that a job names. Raises ShareError: a plan can't be read, so that nobody knows."""
    hashes: set[str] = set()
    for folder, plan in zip(found, each(share, partial(places.plan_record, share), found), strict=True):
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


def _remove(share: Share, age: Age) -> bool:
    """Remove what no job names by now, and then what says that whole sets lie there, so that the next submit looks itself.

    A submit touches what it needs before it writes its plan: so plans are read first, each folder just before its files go.
    """
    named = named_hashes(share, places.find(share))
    for folder in _folders(share):
        each(share, share.delete, [f"{folder}/{entry.name}" for entry in _unnamed(share, named, age, folder)])
    share.delete(TREES)
    return True
