"""The client's folder ``$BATCHAI_HOME``, defaults from its ``config.yaml`` and the environment, the file of a sqlite store."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow_batchai.agent import boot
from mlflow_batchai.errors import UsageError
from mlflow_batchai.terminal import Notice, is_quiet

if TYPE_CHECKING:
    from mlflow_batchai.documents.settings import SettingsFile

RESOURCE_GROUP, WORKSPACE = "batchai", "default"


def home() -> Path:
    """The client's folder: ``$BATCHAI_HOME``, by default ``~/.batchai``.

    Raises:
        UsageError: this user has none, or other users can change what lies there: programs, nodes' folders, addresses.
    """
    try:
        path = Path(os.environ.get("BATCHAI_HOME") or Path.home() / ".batchai").absolute()
    except RuntimeError as error:
        raise UsageError("this user has no home folder; set BATCHAI_HOME to a folder of its own") from error
    _refuse_others(path)
    return path


def untold(sentences: Iterable[str], noted: bool = True) -> list[str]:
    """The sentences without the notices that a command of this user has said before.

    Args:
        noted: whether the others count as said from now on; with ``--quiet`` they never do.
    """
    path = home() / "notices"
    try:
        told = set(path.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        told = set()
    found: list[str] = []
    for sentence in sentences:
        if isinstance(sentence, Notice):
            name = hashlib.sha256(sentence.encode(errors="replace")).hexdigest()[:16]
            if name in told:
                continue
            told.add(name)
            # Where it can't be noted it is said again.
            if noted and not is_quiet():
                with contextlib.suppress(OSError), path.open("a", encoding="ascii") as file:
                    file.write(name + "\n")
        found.append(sentence)
    return found


@functools.lru_cache
def _refuse_others(path: Path) -> None:
    try:
        status = boot.walk(str(path))
        if status.st_uid != os.geteuid():
            raise boot.FolderError(f"{path} belongs to another user")
        if boot.others_write(status):
            raise boot.FolderError(f"other users can write {path}: take that from them (chmod go-w)")
    except boot.FolderError as error:
        raise UsageError(f"{error}; what batchai runs and trusts lies there: mend that, or set BATCHAI_HOME") from error
    except OSError:  # it isn't there yet; the way to where it will be was looked at
        return


def settings() -> SettingsFile | None:
    """``$BATCHAI_HOME/config.yaml``, None where there is no such file, or one that says nothing.

    Raises:
        DocumentError: it is wrong.
    """
    path = home() / "config.yaml"
    if not path.is_file():
        return None
    return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _read(path: Path, changed: int) -> SettingsFile | None:
    with contextlib.suppress(OSError):  # what is wrong is said below
        if all(not line or line.startswith(b"#") for line in map(bytes.strip, path.read_bytes().splitlines())):
            return None
    # Most commands have no such file, and then nothing of pydantic to import.
    from mlflow_batchai.documents.model import parse
    from mlflow_batchai.documents.reading import read
    from mlflow_batchai.documents.settings import SettingsFile

    return parse(SettingsFile, read(path), str(path))[0]


def default(name: str) -> str | None:
    """A default: BATCHAI_<NAME> of the environment, else ``defaults`` of config.yaml; None: there is none.

    Args:
        name: ``resource_group``, ``workspace``, ``experiment``, ``cluster`` or ``output``.
    """
    if given := os.environ.get(f"BATCHAI_{name.upper()}"):
        return given
    found = settings()
    said: str | None = getattr(found.defaults, name) if found else None
    return said


def database_file(uri: str) -> str | None:
    """The file of a tracking store that is a sqlite database, as its address has it; None: it is another store."""
    found = re.match(r"sqlite(?:\+\w+)?:///([^:?][^?]*)", uri)
    return found[1] if found else None
