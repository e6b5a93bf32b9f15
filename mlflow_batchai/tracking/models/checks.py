"""What the check of a saved model, made on the node that trained, means for it here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlflow_batchai.agent.models import FAILED, PASSED, TORCH
from mlflow_batchai.errors import ModelError


def judge(path: str, check: object, meta: Mapping[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """(how a model was checked, in a few words, or None; sentences on what a person should know of it)

    Args:
        path: of the model, on the node.
        check: the check's record; None: it wasn't asked for.
        meta: the model's facts.

    Raises:
        ModelError: the model is not one that could be served.
    """
    if meta.get("format") == TORCH:
        raise ModelError(
            f"{path} is a PyTorch file (a state dict, say), which can't be served without the script's own classes: it is kept"
            " with the outputs, and no model is made of it; save an MLflow model (mlflow.pytorch.save_model) for one"
        )
    if not isinstance(check, Mapping):
        return None, ()
    outcome, why = check.get("outcome"), str(check.get("why") or "")
    if outcome == FAILED:
        raise ModelError(f"the model {path} did not pass its check, and nothing was made of it: {why}")
    if outcome != PASSED:
        return None, (f"the model {path} was not checked: {why}",)
    versions = ", ".join(f"{name} {meta[name]}" for name in ("keras", "tensorflow", "python") if meta.get(name))
    by = f" by {versions}" if versions else ""
    said = f"loaded and tried in {check.get('seconds')} s{by}" if not why else f"{why}{by}"
    return said, ((f"the model {path}: {why}",) if why else ())
