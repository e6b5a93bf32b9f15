"""Fixtures of the client's tests."""

from __future__ import annotations

from hypothesis import settings
from relay_world import folder, following, relayed

__all__ = ["folder", "following", "relayed"]

# Machines are slow at times; the examples are the same in every run.
settings.register_profile("batchai", deadline=None, derandomize=True, database=None)
settings.load_profile("batchai")
