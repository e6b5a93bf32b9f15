"""An alias of a registered model moves to a new version: always, or only if that is better than the version that has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlflow_batchai.models.logged import as_model_error

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

# How often an alias is looked at again that another job has moved meanwhile.
LOOKS = 5


@dataclass(frozen=True)
class Condition:
    """What a new version must be better in: the last value of a metric of its run, by ``mode`` (``min`` or ``max``)."""

    metric: str
    mode: str

    @classmethod
    def from_plan(cls, plan: Mapping[str, Any] | None) -> Condition | None:
        """As the job's plan has it."""
        return cls(str(plan["metric"]), str(plan["mode"])) if plan else None


@dataclass(frozen=True)
class Promotion:
    """Whether an alias points to the new version now, and why: one sentence."""

    alias: str
    done: bool
    why: str


def promote(client: MlflowClient, name: str, version: str, alias: str, condition: Condition | None) -> Promotion:
    """Have an alias point to a version.

    A registry has no way to move an alias only if nobody else has moved it. So its holder is looked at just before, and again
    afterwards: of two jobs that end at once each finds the other, and the better one stays (without a condition the newer).
    A second call for the same version changes nothing.

    Raises:
        ModelError: the registry failed.
    """
    with as_model_error(f"version {version} of {name}"):
        why = "nothing had it"
        for _ in range(LOOKS):
            holder = _holder(client, name, alias)
            if holder is not None and str(holder.version) == version:
                return Promotion(alias, True, f"{alias} points to version {version}: {why}")
            better, why = _compared(client, name, version, holder, condition)
            if not better:
                return Promotion(alias, False, f"{alias} does not point to version {version}: {why}")
            client.set_registered_model_alias(name, alias, version)
        return Promotion(alias, False, f"{alias} does not point to version {version}: other jobs move it all the time")


def _holder(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        # A database says the first of an alias that isn't there, other stores the second.
        if error.error_code in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST"):
            return None
        raise


def _compared(
    client: MlflowClient, name: str, version: str, holder: ModelVersion | None, condition: Condition | None
) -> tuple[bool, str]:
    """(whether a version is to have an alias, why)"""
    if condition is None:
        if holder is None:
            return True, "nothing had it"
        newer = int(version) > int(holder.version)
        return newer, f"version {holder.version} had it" if newer else f"version {holder.version}, which has it, is newer"
    metric = condition.metric
    own = _metric(client, str(client.get_model_version(name, version).run_id), metric)
    if own is None or math.isnan(own):
        return False, f"its run has no {metric}" if own is None else f"the {metric} of its run is NaN"
    if holder is None:
        return True, f"nothing had it ({metric} {own:g})"
    held = _metric(client, str(holder.run_id), metric)
    if held is None:
        return False, f"the run of version {holder.version}, which has it, has no {metric} to compare with"
    # A version whose metric is NaN is worse than any other.
    better = math.isnan(held) or (own < held if condition.mode == "min" else own > held)
    return better, f"{metric} {own:g} {'beats' if better else 'does not beat'} {held:g} of version {holder.version}"


def _metric(client: MlflowClient, run_id: str, metric: str) -> float | None:
    """The last value that a run has of a metric; None if it has none, or is gone."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id).data.metrics.get(metric)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
