"""Fixtures of the tests of the MLflow side."""

from relay_world import folder, following, relayed  # noqa: F401 (fixtures)
