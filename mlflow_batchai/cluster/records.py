"""Files of a cluster in ``$BATCHAI_HOME/clusters``: NAME.yaml, its document, and NAME.state.json, its record."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from mlflow_batchai.agent.reservation import locks
from mlflow_batchai.config import home
from mlflow_batchai.documents.cluster import ClusterRecord
from mlflow_batchai.documents.model import parse
from mlflow_batchai.documents.reading import read
from mlflow_batchai.errors import ClusterError, UsageError


def document_path(name: str) -> Path:
    """Path of a cluster's document."""
    return home() / "clusters" / f"{name}.yaml"


def record_path(name: str) -> Path:
    """Path of a cluster's record."""
    return home() / "clusters" / f"{name}.state.json"


def find(name: str) -> ClusterRecord | None:
    """A cluster's record; None for one that nobody has created or resized. Raises DocumentError: it can't be read."""
    path = record_path(name)
    return parse(ClusterRecord, read(path), str(path))[0] if path.is_file() else None


def in_workspace(workspace: str) -> list[str]:
    """The names of the clusters that were created in a workspace."""
    names = sorted(path.name.removesuffix(".state.json") for path in (home() / "clusters").glob("*.state.json"))
    found = ((name, find(name)) for name in names)
    return [name for name, record in found if record and record.creation_time and record.workspace == workspace]


def save(name: str, record: ClusterRecord) -> None:
    """Write a cluster's record; ClusterError if that can't be done."""
    _write(record_path(name), json.dumps(record.model_dump(mode="json", by_alias=True, exclude_none=True)))


def add_document(name: str, data: dict[str, Any]) -> None:
    """Write a new cluster's document, which may hold secrets: for this user only.

    Raises:
        UsageError: somebody has just made one of that name.
        ClusterError: it can't be written.
    """
    _write(document_path(name), yaml.safe_dump(data, sort_keys=False, allow_unicode=True), new=True)


def delete(name: str) -> None:
    """Remove both."""
    for path in (document_path(name), record_path(name)):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """For the time of the block nobody else with this client's folder changes the cluster.

    Raises:
        ClusterError: there is no place for the lock.
    """
    path = home() / "locks" / f"cluster-{name}"
    busy = f"cluster '{name}' is just being changed by another command; waiting for it"
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locks.held(str(path), lambda: say(busy)))
        except OSError as error:
            raise ClusterError(f"{path} can't be written: {error.strerror}") from error
        yield


def _write(path: Path, text: str, new: bool = False) -> None:
    """Write a file whole or not at all; ``new``: don't replace an existing one."""
    other = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(other, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        if new:
            path.hardlink_to(other)
        else:
            other.replace(path)
    except FileExistsError as error:
        raise UsageError(f"{path} has just been made by somebody else; see batchai cluster list") from error
    except OSError as error:
        raise ClusterError(f"{path} can't be written: {error.strerror}") from error
    finally:
        other.unlink(missing_ok=True)
