"""Where job folders lie on a control share, found without a tracking store."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Sequence

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.plan import Plan, PlanError, read_plan
from mlflow_batchai.agent.protocol import TornFileError
from mlflow_batchai.storage import Share, job_file
from mlflow_batchai.storage.objects import each

# One file for each path under which job folders lie, besides the root: a share may hold millions of files that aren't ours.
PREFIXES = ".batchai/prefixes"
TOP = "workspaces"
# Below the prefix: workspaces/<workspace>/experiments/<experiment>/jobs/<job>/<short id>; None: any name.
_LEVELS: Sequence[str | None] = (TOP, None, "experiments", None, "jobs", None, None)


def note(share: Share, prefix: str) -> None:
    """Write that job folders lie under a path of the share (empty: its root, where they are looked for anyway)."""
    if prefix:
        name = hashlib.sha256(prefix.encode()).hexdigest()[:16]
        share.write(f"{PREFIXES}/{name}", protocol.encode([{"prefix": prefix}]))


def find(share: Share) -> list[str]:
    """Every job folder: under the root, under each folder of the root, and under every path that was noted.

    Raises:
        ShareError: a folder that job folders may lie in can't be read.
    """
    prefixes = {""}
    names = [f"{PREFIXES}/{entry.name}" for entry in share.list(PREFIXES)]
    for _, data in share.read_many(names, protocol.LONGEST_RECORD):
        with contextlib.suppress(TornFileError):
            prefix = protocol.decode_one(data).get("prefix")
            if isinstance(prefix, str) and ".." not in prefix.split("/") and "\0" not in prefix:
                prefixes.add(prefix)
    prefixes |= {entry.name for entry in share.list("") if entry.is_directory and entry.name not in (TOP, ".batchai")}
    found: Iterable[str] = sorted(prefixes)
    for level in _LEVELS:
        found = _below(share, found, level)
    return sorted(found)


def _below(share: Share, folders: Iterable[str], name: str | None) -> list[str]:
    if name is not None:
        return [f"{folder}/{name}" if folder else name for folder in folders]
    above = list(folders)
    lists = each(share, share.list, above)
    return [
        f"{folder}/{entry.name}"
        for folder, entries in zip(above, lists, strict=True)
        for entry in entries
        if entry.is_directory
    ]


def plan_record(share: Share, folder: str) -> protocol.Record | None:
    """The content of ``plan.json`` of a job folder, of whatever version; None if it has none that is whole."""
    try:
        return protocol.decode_one(job_file(share, protocol.JobPaths(folder).plan) or b"")
    except TornFileError:
        return None


def find_plan(share: Share, folder: str) -> Plan | None:
    """The plan of a job folder; None if it has none that can be read."""
    try:
        return read_plan(plan_record(share, folder))
    except PlanError:
        return None
