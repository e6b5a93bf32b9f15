"""Fixtures of tests of job folders."""

from relay_world import folder, following, relayed  # noqa: F401 (fixtures)
