"""Fixtures of tests of job folders."""

from relay_world import clock, folder, following, relayed  # noqa: F401 (fixtures)
