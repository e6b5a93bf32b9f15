"""Fixtures of the tests of the MLflow side."""

from relay_world import folder, following, relayed  # noqa: F401 (fixtures)
from saved_models import h5  # noqa: F401
