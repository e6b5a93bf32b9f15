"""Fixtures of the tests of the MLflow side."""

from __future__ import annotations

from hypothesis import settings
from relay_world import folder, following, relayed

__all__ = ["folder", "following", "relayed"]

settings.register_profile("batchai", deadline=None, derandomize=True, database=None)
settings.load_profile("batchai")
