"""Fixtures of the follower's tests."""

from relay_world import folder, following, relayed  # noqa: F401 (fixtures)
