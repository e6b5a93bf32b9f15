"""A store of its own for each test of sweeps, and a client of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai.tracking import runs


@pytest.fixture
def store(store_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> runs.Tracking:
    shutil.copy(store_template, tmp_path / "m.db")
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return runs.absolute("sqlite:///m.db", tmp_path)


@pytest.fixture
def mlflow(store: runs.Tracking) -> Any:
    return runs.client(store)
