"""Workspaces: a name that clusters, experiments and jobs stand under, as records in ``$BATCHAI_HOME/workspaces``."""

from __future__ import annotations

import json
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mlflow_batchai.config import RESOURCE_GROUP, WORKSPACE, home
from mlflow_batchai.errors import UsageError, WorkspaceNotFoundError

TYPE = "Microsoft.BatchAI/workspaces"
LOCATION = "local"


def arm_id(resource_group: str, workspace: str, *rest: str) -> str:
    """An id of Azure's form; the subscription is always ``local``.

    Args:
        rest: kind and name of what lies in the workspace: ``"clusters", "nc6"``.
    """
    parts = ["subscriptions", "local", "resourceGroups", resource_group, "providers", TYPE, workspace, *rest]
    return "/" + "/".join(parts)


def timestamp(moment: datetime | None = None) -> str:
    """A time as Batch AI wrote it: ISO 8601, UTC."""
    return (moment or datetime.now(timezone.utc)).astimezone(timezone.utc).isoformat()


def names() -> list[str]:
    """Every workspace; ``default`` is there without a record."""
    return sorted({path.stem for path in _folder().glob("*.json")} | {WORKSPACE})


def find(name: str) -> dict[str, Any]:
    """A workspace as Batch AI showed it (its REST API 2018-05-01).

    Raises:
        WorkspaceNotFoundError: there is none of that name.
    """
    try:
        record = json.loads(_path(name).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if name != WORKSPACE:
            raise WorkspaceNotFoundError(f"there is no workspace '{name}'; the workspaces are: {', '.join(names())}") from None
        record = {"resourceGroup": RESOURCE_GROUP, "location": LOCATION, "creationTime": None}
    except (OSError, ValueError) as error:
        raise UsageError(f"{_path(name)}: the workspace's record can't be read ({error}); remove it, create it anew") from error
    return {
        "id": arm_id(record["resourceGroup"], name),
        "name": name,
        "type": TYPE,
        "resourceGroup": record["resourceGroup"],
        "location": record["location"],
        "creationTime": record["creationTime"],
        "provisioningState": "succeeded",
        "provisioningStateTransitionTime": record["creationTime"],
    }


def create(name: str, resource_group: str, location: str | None = None) -> dict[str, Any]:
    """Make a workspace; one that is there already is given as it is, as Batch AI's was.

    Raises:
        UsageError: its record can't be written.
    """
    if name in names():
        return find(name)
    record = {"resourceGroup": resource_group, "location": location or LOCATION, "creationTime": timestamp()}
    path = _path(name)
    new = path.with_name(f".{name}.{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(record), encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: the workspace's record can't be written: {error.strerror}") from error
    return find(name)


def delete(name: str) -> None:
    """Remove a workspace's record.

    Raises:
        WorkspaceNotFoundError: there is none of that name.
        UsageError: it is the default one.
    """
    find(name)
    if name == WORKSPACE and not _path(name).exists():
        raise UsageError(f"the workspace '{WORKSPACE}' is always there and can't be deleted")
    _path(name).unlink(missing_ok=True)


def _folder() -> Path:
    return home() / "workspaces"


def _path(name: str) -> Path:
    return _folder() / f"{name}.json"
