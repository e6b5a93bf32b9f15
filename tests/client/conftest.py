"""Fixtures of the client's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from job_folder import JobFolder

# Machines are slow at times; the examples are the same in every run.
settings.register_profile("batchai", deadline=None, derandomize=True, database=None)
settings.load_profile("batchai")


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., JobFolder]:
    """Makes job folders; keyword arguments go into the plan."""

    def make(nodes: int = 1, name: str = "share", **plan: Any) -> JobFolder:
        return JobFolder(tmp_path / name, nodes, **plan)

    return make
