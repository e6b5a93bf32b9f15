"""Choose the saved model that batchai.yaml asks for; the node and the client choose alike."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

Record = dict[str, Any]

# What a record's ``meta`` calls its format.
H5, KERAS, SAVED_MODEL, MLFLOW, TORCH = "h5", "keras", "saved_model", "mlflow", "torch"
# The signature of a SavedModel that is served, if it has it.
SERVING = "serving_default"
TORCH_ENDINGS = (".pt", ".pth")
MOST_FOUND = 100
# How a model's check came out.
PASSED, FAILED, UNCHECKED = "passed", "failed", "unchecked"
LONGEST_SENTENCE = 600


def choose(known: Sequence[Mapping[str, Any]], path: str | None) -> Mapping[str, Any] | None:
    """The record of the job's model, or None.

    The one that node 0 has chosen, if it has said so; else the last that a rank reported, else the last that was found. What
    only PyTorch can load comes behind all others.

    Args:
        known: bodies of ``report`` records on saved models, in their order.
        path: what batchai.yaml names, below an output directory; None: anything.
    """
    chosen = [record for record in known if record.get("chosen")]
    if chosen:
        return chosen[-1]
    if path:
        ending = "/" + path.strip("/")
        known = [record for record in known if str(record["path"]).rstrip("/").endswith(ending)]
    best = [record for record in known if not record.get("found")] or list(known)
    best = [record for record in best if not str(record["path"]).endswith(TORCH_ENDINGS)] or best
    return best[-1] if best else None


def found_in(folders: Sequence[str], path: str | None) -> list[str]:
    """Saved models in output directories: the named file or folder, else all that have a model's form and are no checkpoints.

    A folder that is a model (MLflow's, or a TensorFlow SavedModel) is one; what lies in it is not looked at.
    """
    found: list[str] = []
    for folder in folders:
        if path:
            named = os.path.join(folder, path)
            found += [named] if os.path.exists(named) else []
            continue
        for parent, below, names in os.walk(folder):
            if folder_format(parent):
                found.append(parent)
                below[:] = []
                continue
            below[:] = sorted(name for name in below if "checkpoint" not in name.lower())
            found += [os.path.join(parent, name) for name in sorted(names) if _is_model(name)]
    return list(dict.fromkeys(found))[-MOST_FOUND:]


def folder_format(path: str) -> str | None:
    """``mlflow`` or ``saved_model`` for a folder that is a model, else None."""
    if os.path.isfile(os.path.join(path, "MLmodel")):
        return MLFLOW
    return SAVED_MODEL if os.path.isfile(os.path.join(path, "saved_model.pb")) else None


def _is_model(name: str) -> bool:
    return name.endswith((".h5", ".keras", *TORCH_ENDINGS)) and not name.endswith(".weights.h5")


def outcome(result: str, why: str | None, seconds: float) -> Record:
    """The record of a check: its outcome, and a sentence's end on why."""
    return {"outcome": result, "why": why and why[:LONGEST_SENTENCE], "seconds": round(seconds, 2)}
