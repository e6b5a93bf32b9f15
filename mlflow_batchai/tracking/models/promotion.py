"""Move a registered model's alias to a new version: always, or only if that is better than the present one."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlflow_batchai.agent.plan import Condition
from mlflow_batchai.tracking.models.logged import as_model_error

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

# How often an alias is moved, if each time another job has moved it to a worse version.
MOVES = 4
# What a job may need from its look at an alias to its move.
MOVE_SECONDS = 0.5


@dataclass(frozen=True)
class Promotion:
    """Whether an alias points to the new version now, and why: words that stay true when another version has it."""

    alias: str
    version: str
    done: bool
    why: str

    def __str__(self) -> str:
        return f"{self.why}, promoted to @{self.alias}" if self.done else f"not promoted to @{self.alias}: {self.why}"


def promote(client: MlflowClient, name: str, version: str, alias: str, condition: Condition | None) -> Promotion:
    """Have an alias point to a version if that is better than its holder.

    A registry has no way to move an alias only if nobody else has moved it: what was moved is looked at again ``MOVE_SECONDS``
    later, when each job that had looked before has moved it, too. A second call for the same version changes nothing.

    Raises:
        ModelError: the registry failed.
    """
    with as_model_error(f"the alias {alias} of {name}", f"could not be moved to version {version}"):
        why = "as before"
        for moves in range(MOVES + 1):
            holder = _holder(client, name, alias)
            if holder is not None and str(holder.version) == version:
                return Promotion(alias, version, True, why)
            better, told = _compared(client, name, version, holder, condition)
            if not better:
                return Promotion(alias, version, False, told)
            if moves < MOVES and _set(client, name, alias, version, holder):
                why = told
                if condition is not None:
                    time.sleep(MOVE_SECONDS)
        return Promotion(alias, version, False, "other jobs move it all the time")


def _set(client: MlflowClient, name: str, alias: str, version: str, holder: ModelVersion | None) -> bool:
    """Point an alias to a version; False if another job has made it since it was looked for: a database adds it once."""
    from mlflow.exceptions import MlflowException

    try:
        client.set_registered_model_alias(name, alias, version)
    except MlflowException:
        if holder is not None or _holder(client, name, alias) is None:
            raise
        return False
    return True


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
    first = "first version" if version == "1" else "no version had it"
    if condition is None:
        if holder is None:
            return True, first
        newer = int(version) > int(holder.version)
        return newer, f"newer than version {holder.version}" if newer else f"version {holder.version}, which has it, is newer"
    metric = condition.metric
    own = _metric(client, str(client.get_model_version(name, version).run_id), metric)
    if own is None or math.isnan(own):
        return False, f"its run has no {metric}" if own is None else f"the {metric} of its run is NaN"
    if holder is None:
        return True, f"{first} ({metric} {own:g})"
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
