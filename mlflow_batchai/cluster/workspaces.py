"""Workspaces, as records in ``$BATCHAI_HOME/workspaces``: the names that clusters, experiments and jobs belong to."""

from __future__ import annotations

import json
import re
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mlflow_batchai.config import RESOURCE_GROUP, WORKSPACE, home
from mlflow_batchai.errors import UsageError, WorkspaceNotFoundError

TYPE = "Microsoft.BatchAI/workspaces"
LOCATION = "local"
PATTERN = r"[-\w]{1,64}"


def arm_id(resource_group: str, workspace: str, *rest: str) -> str:
    """An id of Azure's form; the subscription is always ``local``.

    Args:
        rest: kind and name of what lies in the workspace: ``"clusters", "nc6"``.
    """
    parts = ["subscriptions", "local", "resourceGroups", resource_group, "providers", TYPE, workspace, *rest]
    return "/" + "/".join(parts)


def timestamp() -> str:
    """Now, as Batch AI wrote times: ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat()


def iso(milliseconds: int | None) -> str | None:
    """A time as Batch AI's command printed it: ``2018-06-14T22:22:57.543000+00:00``."""
    return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, timezone.utc).isoformat()


def names() -> list[str]:
    """Every workspace; ``default`` is there without a record."""
    return sorted({path.stem for path in _folder().glob("*.json")} | {WORKSPACE})


def find(name: str) -> dict[str, Any]:
    """A workspace as Batch AI showed it (its REST API 2018-05-01).

    Raises:
        WorkspaceNotFoundError: there is none of that name.
    """
    record = _record(name)
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


def _record(name: str) -> dict[str, Any]:
    # What couldn't be a name must not become a path.
    if not re.fullmatch(PATTERN, name):
        raise _missing(name)
    try:
        found = json.loads(_path(name).read_text(encoding="utf-8"))
        return {key: found[key] for key in ("resourceGroup", "location", "creationTime")}
    except (FileNotFoundError, NotADirectoryError):
        if name != WORKSPACE:
            raise _missing(name) from None
        return {"resourceGroup": RESOURCE_GROUP, "location": LOCATION, "creationTime": None}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{_path(name)}: the workspace's record can't be read ({error}); remove it, create it anew") from error


def _missing(name: str) -> WorkspaceNotFoundError:
    return WorkspaceNotFoundError(f"there is no workspace '{name}'; the workspaces are: {', '.join(names())}")


def check_delete(name: str) -> None:
    """See that a workspace could be removed.

    Raises:
        WorkspaceNotFoundError: there is none of that name.
        UsageError: it is the default one.
    """
    find(name)
    if name == WORKSPACE:
        raise UsageError(f"the workspace '{WORKSPACE}' is always there and can't be deleted")


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
    """Remove a workspace's record; raises as ``check_delete`` does."""
    check_delete(name)
    _path(name).unlink(missing_ok=True)


def _folder() -> Path:
    return home() / "workspaces"


def _path(name: str) -> Path:
    return _folder() / f"{name}.json"
