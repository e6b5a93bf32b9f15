"""Loads a saved model and has it predict once, with the interpreter that trained: ``python agent.pyz try-model ...``.

A process of its own, without the training script: what can't be loaded here can't be loaded where the model is served.
Standard library, and the framework that the model is of.
"""

import argparse
import importlib
import json
import math
import os
import sys
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from mlflow_batchai.agent import customs, describe, models

Facts = Dict[str, Any]

# Tried in turn for dimensions that a model leaves open, the batch excepted.
SIZES = (1, 32, 224)
MOST_VALUES = 100


class Fault(Exception):
    """The model can't be used as it was saved; ``str(error)`` is the reason, for a sentence."""


class Unchecked(Exception):
    """This interpreter can't tell whether the model is good; ``str(error)`` is the reason, for a sentence."""


class Tried:
    """What a prediction told.

    Attributes:
        facts: ``inputs`` and ``outputs`` of the loaded model, as far as it tells.
        output: of the example: list of ``{"name", "shape", "dtype", "values"}``.
        note: what a person may want to know, or None.
    """

    def __init__(self, facts: Facts, output: Optional[List[Dict[str, Any]]] = None, note: Optional[str] = None) -> None:
        self.facts = facts
        self.output = output
        self.note = note


def main(arguments: List[str]) -> int:
    """``try-model [--load] [--example FILE] MODEL``: one JSON object on standard output; all else goes to standard error.

    The object: ``meta``, the facts of the model, as ``describe`` tells them, and with ``--load`` ``check``: ``outcome``
    (``passed``, ``failed``, ``unchecked``), ``why`` (a sentence's end, or null), ``seconds``, ``output``.
    """
    parser = argparse.ArgumentParser(prog="try-model")
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--example")
    parser.add_argument("model")
    options = parser.parse_args(arguments)
    # Frameworks print what they like, where they like.
    with os.fdopen(os.dup(1), "w") as said:
        os.dup2(2, 1)
        example = None
        if options.example:
            with open(options.example, encoding="utf-8") as file:
                example = json.load(file)
        said.write(json.dumps(examine(options.model, options.load, example)) + "\n")
    return 0


def examine(path: str, load: bool, example: Any = None) -> Dict[str, Any]:
    """What ``main`` prints.

    Args:
        example: a batch of one that the training script gave: nested lists, or a mapping of the inputs' names to such.
    """
    begun = time.monotonic()
    meta: Facts
    try:
        meta = facts_of(path)
    except describe.DescribeError as error:
        meta = {"error": str(error)}
    if not load:
        return {"meta": meta}
    outcome, why, output = models.PASSED, None, None
    try:
        if "error" in meta:
            raise Fault(meta["error"])
        tried = _TRIALS[meta["format"]](path, meta, example)
        meta.update(tried.facts)
        why, output = tried.note, tried.output
    except Fault as error:
        outcome, why = models.FAILED, str(error)
    except Unchecked as error:
        outcome, why = models.UNCHECKED, str(error)
    return {"meta": meta, "check": models.check(outcome, why, time.monotonic() - begun, output)}


def facts_of(path: str) -> Facts:
    """What can be told of a model without loading it. Raises DescribeError."""
    if not os.path.isdir(path):
        return describe.describe(path)
    found = models.folder_format(path)
    if found is None:
        raise describe.DescribeError("%s is no model: it has neither an MLmodel file nor a saved_model.pb" % path)
    return {"format": found, **(describe.environment("tensorflow") if found == models.SAVED_MODEL else {})}


def _try_keras(path: str, meta: Facts, example: Any) -> Tried:
    name = describe.keras_module(meta["keras"], meta["requirements"])
    loader = _framework(name + ".models")
    try:
        model = loader.load_model(path, compile=False)
    except Exception as error:
        raise Fault(customs.why_not(error, describe.configuration(path))) from error
    inputs = _ends(getattr(model, "input", None), getattr(model, "inputs", None))
    outputs = _ends(getattr(model, "output", None), getattr(model, "outputs", None), getattr(model, "output_names", None))
    found: Facts = {key: ends for key, ends in (("inputs", inputs), ("outputs", outputs)) if ends}

    def predict(batch: Mapping[Optional[str], Any]) -> Any:
        return model.predict(next(iter(batch.values())) if len(batch) == 1 else dict(batch), verbose=0)

    return _tried(predict, found, inputs or meta.get("inputs") or [], example)


def _try_saved_model(path: str, meta: Facts, example: Any) -> Tried:
    tensorflow = _framework("tensorflow")
    try:
        model = tensorflow.saved_model.load(path, tags=["serve"])
    except Exception as error:
        raise Fault("TensorFlow can't load it: %s" % customs.first_line(error)) from error
    keys = list(model.signatures)
    if not keys:
        raise Fault(
            "it has no signature that could be served: save it with model.export(FOLDER), or with"
            " tf.saved_model.save(module, FOLDER, signatures=...)"
        )
    key = models.SERVING if models.SERVING in keys else keys[0]
    function = model.signatures[key]
    inputs = [_tensor(name, spec) for name, spec in sorted(function.structured_input_signature[1].items())]
    outputs = [_tensor(name, spec) for name, spec in sorted(function.structured_outputs.items())]

    def predict(batch: Mapping[Optional[str], Any]) -> Any:
        given = {str(name): tensorflow.constant(value) for name, value in batch.items()}
        return {name: value.numpy() for name, value in function(**given).items()}

    return _tried(predict, {"inputs": inputs, "outputs": outputs, "signature": key}, inputs, example)


def _try_mlflow(path: str, meta: Facts, example: Any) -> Tried:
    pyfunc = _framework("mlflow.pyfunc")
    try:
        model = pyfunc.load_model(path)
    except Exception as error:
        if "python_function" in str(error):
            raise Unchecked("its MLmodel has no python_function flavor") from error
        raise Fault("MLflow can't load it: %s" % customs.first_line(error)) from error
    given = model.metadata.load_input_example(path)
    if given is not None:
        return Tried({}, _shown(_predicted(lambda: model.predict(given))))
    schema = model.metadata.get_input_schema()
    if schema is None or not schema.is_tensor_spec():
        return Tried({}, note="it was loaded, and not tried: it has no input example")
    inputs = [{"name": spec.name, "shape": list(spec.shape), "dtype": str(spec.type)} for spec in schema.inputs]

    def predict(batch: Mapping[Optional[str], Any]) -> Any:
        return model.predict(dict(batch) if schema.has_input_names() else next(iter(batch.values())))

    return _tried(predict, {}, inputs, example)


_TRIALS: Dict[str, Callable[[str, Facts, Any], Tried]] = {
    models.H5: _try_keras,
    models.KERAS: _try_keras,
    models.SAVED_MODEL: _try_saved_model,
    models.MLFLOW: _try_mlflow,
}


def _framework(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        # One that is broken in this environment raises whatever it likes.
        package = name.split(".")[0]
        what = "has no %s" % package if isinstance(error, ImportError) else "can't import %s" % package
        raise Unchecked("%s %s (%s)" % (sys.executable, what, customs.first_line(error))) from error


def _tried(
    predict: Callable[[Mapping[Optional[str], Any]], Any], found: Facts, inputs: List[Dict[str, Any]], example: Any
) -> Tried:
    """Have a loaded model predict what the script gave as an example, else zeros."""
    if not inputs:
        return Tried(found, note="it was loaded, and not tried: it doesn't tell the shape and type of its inputs")
    batches = [_given(example, inputs)] if example is not None else _zeros(inputs)
    for number, batch in enumerate(batches):
        try:
            result = _predicted(lambda batch=batch: predict(batch))  # type: ignore[misc]
        except Fault as error:
            if number + 1 < len(batches):
                continue
            if len(batches) > 1:
                return Tried(found, note="it was loaded, and not tried: its inputs have no fixed size (%s)" % error)
            raise
        output = _shown(result)
        if "outputs" not in found:
            found["outputs"] = [
                {"name": one["name"], "shape": [-1, *one["shape"][1:]], "dtype": one["dtype"]} for one in output
            ]
        return Tried(found, output, _not_numbers(result))
    raise AssertionError("there is a batch")


def _predicted(predict: Callable[[], Any]) -> Any:
    try:
        return predict()
    except Exception as error:
        raise Fault("it was loaded, and can't predict: %s" % customs.first_line(error)) from error


def _given(example: Any, inputs: List[Dict[str, Any]]) -> Dict[Optional[str], Any]:
    import numpy

    values = example if isinstance(example, dict) else {inputs[0]["name"]: example}
    types = {one["name"]: one["dtype"] for one in inputs}
    if set(values) != set(types):
        raise Fault("its inputs are %s, and the example has %s" % (_names(types), _names(values)))
    return {name: numpy.asarray(values[name], dtype=_numpy_type(types[name])) for name in values}


def _names(mapping: Mapping[Any, Any]) -> str:
    return ", ".join(sorted(str(name) for name in mapping))


def _zeros(inputs: List[Dict[str, Any]]) -> List[Dict[Optional[str], Any]]:
    """Batches of one, for each of the sizes that may be tried."""
    import numpy

    is_open = any(size == -1 for one in inputs for size in one["shape"][1:])
    batches: List[Dict[Optional[str], Any]] = []
    for size in SIZES if is_open else SIZES[:1]:
        batch: Dict[Optional[str], Any] = {}
        for one in inputs:
            first, rest = one["shape"][:1], one["shape"][1:]
            shape = [max(1, length) for length in first] + [size if length == -1 else length for length in rest]
            batch[one["name"]] = numpy.zeros(shape, dtype=_numpy_type(one["dtype"]))
        batches.append(batch)
    return batches


def _numpy_type(name: str) -> str:
    """Of types that NumPy doesn't know the one that frameworks take for them."""
    return {"string": "str", "bfloat16": "float32"}.get(name, name)


def _ends(struct: Any, tensors: Any, names: Any = None) -> List[Dict[str, Any]]:
    """Input or output tensors of a Keras model; a mapping's keys are their names."""
    if isinstance(struct, dict):
        return [_tensor(name, tensor) for name, tensor in struct.items()]
    tensors = list(tensors or [])
    if not names or len(names) != len(tensors):
        names = [tensor.name for tensor in tensors]
    return [_tensor(name, tensor) for name, tensor in zip(names, tensors)]


def _tensor(name: Any, tensor: Any) -> Dict[str, Any]:
    shape = [-1 if length is None else int(length) for length in tensor.shape]
    return {"name": str(name), "shape": shape, "dtype": str(getattr(tensor.dtype, "name", tensor.dtype))}


def _parts(result: Any) -> List[Tuple[Optional[str], Any]]:
    import numpy

    if isinstance(result, dict):
        return [(str(name), numpy.asarray(value)) for name, value in result.items()]
    if isinstance(result, (list, tuple)):
        return [(None, numpy.asarray(value)) for value in result]
    return [(None, numpy.asarray(result))]


def _shown(result: Any) -> List[Dict[str, Any]]:
    """A prediction as JSON has it, no more of it than a person looks at."""
    shown = []
    for name, array in _parts(result):
        values = [_plain(value) for value in array.ravel()[:MOST_VALUES].tolist()]
        shown.append({"name": name, "shape": list(array.shape), "dtype": str(array.dtype), "values": values})
    return shown


def _plain(value: Any) -> Any:
    """JSON has no word for some numbers."""
    is_plain = isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else str(value)


def _not_numbers(result: Any) -> Optional[str]:
    import numpy

    arrays = [array for _, array in _parts(result) if array.dtype.kind == "f"]
    bad = any(bool(numpy.isnan(array).any()) for array in arrays)
    return "it predicts NaN: its training may have diverged" if bad else None
