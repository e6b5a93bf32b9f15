"""Facts of a node on a saved model, and a file that looks like one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai.tracking.models.directory import HDF5_MAGIC
from mlflow_batchai.tracking.models.facts import ModelFacts

RECORD: dict[str, Any] = {
    "keras": "3.15.1",
    "backend": "tensorflow",
    "tensorflow": "2.21.0",
    "python": "3.11.7",
    "numpy": "2.4.6",
    "inputs": [{"name": "image", "shape": [-1, 32, 32, 3], "dtype": "float32"}],
    "outputs": [{"name": "scores", "shape": [-1, 10], "dtype": "float32"}],
    "requirements": ["tensorflow-cpu==2.21.0", "keras==3.15.1", "numpy==2.4.6", "h5py==3.14.0"],
    "format": "h5",
}


def facts(**changes: Any) -> ModelFacts:
    return ModelFacts.from_record({**RECORD, **changes})


@pytest.fixture
def h5(tmp_path: Path) -> Path:
    """What looks like a model to one that does not open it."""
    path = tmp_path / "tiny net.h5"
    path.write_bytes(HDF5_MAGIC + bytes(100))
    return path
