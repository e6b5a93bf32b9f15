"""What a model takes and gives, as MLflow says it: the signature, and an example of its inputs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_batchai.agent.models import SAVED_MODEL
from mlflow_batchai.tracking.models.facts import ModelFacts, TensorFacts

if TYPE_CHECKING:
    import numpy

DTYPES = {"string": "str"} | {
    name: name
    for name in (
        *("float16", "float32", "float64", "bool"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    )
}
EXAMPLE, SERVING_EXAMPLE = "input_example.json", "serving_input_example.json"
# Zeros of an input with open dimensions, or of a very large one, are no example.
MOST_ZEROS = 1 << 18


def signature_of(facts: ModelFacts) -> tuple[dict[str, str], list[str]]:
    """MLflow's signature, two JSON texts, and notes on what had to be left out of it."""
    inputs, outputs = _schema(facts, facts.inputs), _schema(facts, facts.outputs)
    if inputs is None:
        return {}, ["It has no signature, because the shape and type of its inputs are not known."]
    if outputs is None:
        return {"inputs": inputs}, ["Its signature has no outputs, because their shape or type is not known."]
    return {"inputs": inputs, "outputs": outputs}, []


def _schema(facts: ModelFacts, tensors: tuple[TensorFacts, ...]) -> str | None:
    """None if MLflow can't say it: a type NumPy has no word for, or several tensors without a name each."""
    names = {tensor.name for tensor in tensors}
    named = _named(facts, tensors)
    if not tensors or any(tensor.dtype not in DTYPES or not tensor.shape for tensor in tensors):
        return None
    if named and (None in names or len(names) < len(tensors)):
        return None
    return json.dumps(
        [
            {
                **({"name": tensor.name} if named else {}),
                "type": "tensor",
                "tensor-spec": {"dtype": DTYPES[tensor.dtype], "shape": [-1, *tensor.shape[1:]]},
            }
            for tensor in tensors
        ]
    )


def _named(facts: ModelFacts, tensors: tuple[TensorFacts, ...]) -> bool:
    """One tensor goes without a name, so that a plain array is taken for it; a SavedModel's signature takes names only."""
    return len(tensors) > 1 or facts.format == SAVED_MODEL


def write_example(facts: ModelFacts, target: Path) -> dict[str, str] | None:
    """Write an example of the inputs, as MLflow writes that of ``save_model(input_example=...)``.

    Returns:
        What the MLmodel says of it; None: there is none, because the inputs are not known, or have no fixed size.
    """
    if _schema(facts, facts.inputs) is None:
        return None
    arrays = _given(facts) or _zeros(facts)
    if arrays is None:
        return None
    named = _named(facts, facts.inputs)
    values = {name: array.tolist() for name, array in arrays.items()}
    example: Any = values if named else next(iter(values.values()))
    (target / EXAMPLE).write_text(json.dumps(example), encoding="utf-8")
    (target / SERVING_EXAMPLE).write_text(json.dumps({"inputs": example}), encoding="utf-8")
    return {"artifact_path": EXAMPLE, "serving_input_path": SERVING_EXAMPLE, "type": "ndarray"}


def _given(facts: ModelFacts) -> dict[str, numpy.ndarray[Any, Any]] | None:
    """The script's own example, if it is one for these inputs."""
    import numpy

    if facts.example is None:
        return None
    given = facts.example if isinstance(facts.example, dict) else {facts.inputs[0].name or "": facts.example}
    arrays = {}
    for tensor in facts.inputs:
        try:
            array = numpy.asarray(given[tensor.name or ""], DTYPES[tensor.dtype])
        except (KeyError, ValueError, TypeError, OverflowError):
            return None
        sizes = zip(array.shape[1:], tensor.shape[1:], strict=False)
        if array.ndim != len(tensor.shape) or any(wanted not in (-1, size) for size, wanted in sizes):
            return None
        arrays[tensor.name or ""] = array
    return arrays


def _zeros(facts: ModelFacts) -> dict[str, numpy.ndarray[Any, Any]] | None:
    import numpy

    shapes = [(1, *tensor.shape[1:]) for tensor in facts.inputs]
    if any(-1 in shape for shape in shapes) or sum(map(math.prod, shapes)) > MOST_ZEROS:
        return None
    pairs = zip(facts.inputs, shapes, strict=True)
    return {tensor.name or "": numpy.zeros(shape, DTYPES[tensor.dtype]) for tensor, shape in pairs}
