"""Fixtures of tests of what others may do."""

from relay_world import clock  # noqa: F401 (a fixture)
