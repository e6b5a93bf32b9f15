"""Fixtures of the client's tests."""

from relay_world import folder, following, relayed  # noqa: F401 (fixtures)
