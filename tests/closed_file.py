"""One closed file, as an agent reads it."""

from __future__ import annotations

from pathlib import Path

from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.agent.share.mounted import MountedShare


def read_closed(path: str | Path) -> Record | None:
    """Its record; None while it isn't there or isn't closed."""
    return MountedShare(str(Path(path).parent)).read_closed(Path(path).name)
