"""The client of whole jobs."""

from __future__ import annotations

from typing import Any

import pytest
from ssh_world import HereClient


@pytest.fixture
def here(world: Any, monkeypatch: pytest.MonkeyPatch) -> HereClient:
    """In this process, in a fresh world."""
    return HereClient(world, monkeypatch)
