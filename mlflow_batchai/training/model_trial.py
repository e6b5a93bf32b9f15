"""Load a saved model and have it predict once, with the interpreter that trained.

It is done without the training script: what can't be loaded here can't be loaded where the model is served. Rank 0 has a copy
of itself for it, made when Keras had just been imported (``stand_by``), which costs no second import; a model that the copy
could not pass is tried by a process of its own (``python agent.pyz try-model ...``, started by the agent).
Standard library, and the framework that the model is of.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fcntl
import importlib
import json
import os
import re
import signal
import socket
import sys
import time
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional

from mlflow_batchai.training import report, saved_models
from mlflow_batchai.training.constants import FACTS

Facts = dict[str, Any]
Batch = Mapping[Optional[str], Any]

# How versions of Keras name a class or function that they don't find.
_NOT_FOUND = re.compile(
    r"(?:Unknown [\w ]{1,80}: *|Could not locate (?:class|function) |Unable to find (?:class|function) )'?([\w>.]+)"
)
# A model is tried on the CPU: GPUs may be full or belong to others by then, and one that fails says nothing of the model.
NO_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
# For how long rank 0 waits for its copy at most; and of how much memory a copy is made: what rank 0 writes over stays in it.
COPY_SECONDS = 30.0
MOST_COPIED_BYTES = 2 << 30
_CURE = "save it with model.export(FOLDER), which needs no code, or as an MLflow model with its code (code_paths)"


def stand_by() -> None:
    """Called when Keras has been imported: where the job's model is to be checked, have a copy of rank 0 wait for it.

    The copy (a fork) exists before the framework has threads, GPUs or connections, and shares this process's memory until one
    of them writes to it. Whatever becomes of it, this process goes on as without it: it is no child of this process, so nobody
    waits for it by accident, it dies with it, and when memory runs out it is the one that the kernel kills.
    """
    with contextlib.suppress(Exception):
        wanted = _wanted()
        if not wanted or report.rank() != 0 or not _is_unused():
            return
        # Of all processes that rank 0 starts one at a time has a copy.
        lock = os.open(
            os.path.join(os.environ["BATCHAI_SPOOL"], "model-trial.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        limit = min(float(wanted["seconds"]), COPY_SECONDS)
        here, there = socket.socketpair()
        with there, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forks beside threads; NumPy's are made to bear it
            child = os.fork()
            if not child:
                try:
                    here.close()
                    if not os.fork():
                        _wait_for_model(there, limit)
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
        atexit.register(_hand_over, here, os.getpid(), wanted.get("path"), limit)


def _wanted() -> Facts | None:
    spool = os.environ.get("BATCHAI_SPOOL")
    if not spool:
        return None
    with open(os.path.join(spool, FACTS), encoding="utf-8") as file:
        model: Facts | None = json.load(file).get("model")
    return model


def _is_unused() -> bool:
    """Whether the framework that Keras has imported was not used yet, so that a copy of this process can use it."""
    with open("/proc/self/statm", encoding="ascii") as file:
        if int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") > MOST_COPIED_BYTES:
            return False  # the script has loaded its data first
    context, cuda = sys.modules.get("tensorflow.python.eager.context"), sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return False  # the CUDA context of a process is of no use in its copy
    return sys.modules["keras"].backend.backend() in ("tensorflow", "torch") and getattr(context, "_context", None) is None


def _wait_for_model(link: socket.socket, limit: float) -> None:
    """In the copy: try the model that this process's original names, and answer."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    # What the script has open is its own: somebody may wait for its end.
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != link.fileno():
            with contextlib.suppress(OSError):
                os.close(descriptor)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    os.environ.update(NO_GPUS)
    with link.makefile("rb") as stream:
        request = stream.readline()
    if request:
        signal.setitimer(signal.ITIMER_REAL, limit)
        asked = json.loads(request)
        _forget_script()
        with sys.modules["keras"].device("cpu"):
            found = examine(asked["path"], True, asked["example"])
        link.sendall(json.dumps(found).encode())


def _forget_script() -> None:
    """Leave what any other process knows: the script's own classes and modules go, and the folders that they come from."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    folders = {os.getcwd(), os.path.dirname(os.path.abspath(script))} if script else {os.getcwd()}

    def is_scripts(path: str | None) -> bool:
        path = os.path.abspath(path) + os.sep if path else ""
        installed = path.startswith((sys.prefix + os.sep, sys.base_prefix + os.sep)) or "-packages" + os.sep in path
        return not installed and any(path.startswith(os.path.join(folder, "")) for folder in folders)

    sys.path[:] = [folder for folder in sys.path if not is_scripts(folder or os.getcwd())]
    for name, module in list(sys.modules.items()):
        # A package without __init__.py has folders only.
        if any(map(is_scripts, [getattr(module, "__file__", None), *(getattr(module, "__path__", None) or [])])):
            del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["keras"].saving.get_custom_objects().clear()
    os.chdir("/")


def _hand_over(link: socket.socket, owner: int, wanted: str | None, limit: float) -> None:
    """At the end of rank 0: have its copy try the job's model, and report it if that passes."""
    if os.getpid() != owner or hasattr(sys, "last_value"):  # another copy of this process; or the script has failed
        return
    with contextlib.suppress(Exception), link:
        folders = [path for name, path in sorted(os.environ.items()) if name.startswith("AZ_BATCHAI_OUTPUT_")]
        chosen = saved_models.choose(saved_models.known(list(report.models().values()), folders, wanted), wanted)
        if chosen is None or not os.path.isfile(chosen["path"]):
            return
        tried = saved_models.stamp(chosen["path"])
        link.settimeout(limit)
        asked = {"path": chosen["path"], "example": chosen.get("meta", {}).get("example")}
        link.sendall(json.dumps(asked).encode() + b"\n")
        with link.makefile("rb") as stream:
            found = json.loads(stream.read())
        if found["check"]["outcome"] == saved_models.PASSED:
            report.append({"type": "trial", "path": chosen["path"], "stamp": tried, **found})


class Fault(Exception):
    """The model can't be used as it was saved; ``str(error)`` is the reason, for a sentence."""


class Unchecked(Exception):
    """This interpreter can't tell whether the model is good; ``str(error)`` is the reason, for a sentence."""


class Loaded(NamedTuple):
    """A model that was loaded.

    Attributes:
        facts: what it tells of itself: ``inputs``, ``outputs``, ``signature``.
        inputs: its input tensors; empty if it doesn't tell them.
        predict: takes a batch of arrays by the inputs' names.
        example: a batch that was saved with it, as ``predict`` takes it.
    """

    facts: Facts
    inputs: list[Facts]
    predict: Callable[[Any], Any]
    example: Any = None


def main(arguments: list[str]) -> int:
    """``try-model [--load] [--example FILE] MODEL``: one JSON object on standard output; all else goes to standard error.

    The object: ``meta``, the facts of the model, as ``saved_models.describe`` tells them, and with ``--load`` ``check``:
    ``outcome`` (``passed``, ``failed``, ``unchecked``), ``why`` (a sentence's end, or null), ``seconds``.
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


def examine(path: str, load: bool, example: Any = None) -> Facts:
    """Make the record that ``main`` prints.

    Args:
        example: a batch of one that the training script gave: nested lists, or a mapping of the inputs' names to such.
    """
    begun = time.monotonic()
    try:
        meta = facts_of(path)
    except saved_models.DescribeError as error:
        meta = {"error": str(error)}
    if not load:
        return {"meta": meta}
    result, why = saved_models.PASSED, None
    try:
        if "error" in meta:
            raise Fault(meta["error"])
        loaded = _LOADERS[meta["format"]](path, meta)
        meta.update(loaded.facts)
        why = _try(loaded, meta, example)
    except Fault as error:
        result, why = saved_models.FAILED, str(error)
    except Unchecked as error:
        result, why = saved_models.UNCHECKED, str(error)
    return {"meta": meta, "check": saved_models.outcome(result, why, time.monotonic() - begun)}


def facts_of(path: str) -> Facts:
    """Describe a model without loading it. Raises DescribeError."""
    if not os.path.isdir(path):
        return saved_models.describe(path)
    found = saved_models.folder_format(path)
    if found is None:
        raise saved_models.DescribeError(f"{path} is no model: it has neither an MLmodel file nor a saved_model.pb")
    return {"format": found, **(saved_models.environment("tensorflow") if found == saved_models.SAVED_MODEL else {})}


def _keras(path: str, meta: Facts) -> Loaded:
    loader = _framework(saved_models.keras_module(meta["keras"], meta["requirements"]) + ".models")
    try:
        model = loader.load_model(path, compile=False)
    except Exception as error:
        raise Fault(why_not(error)) from error
    inputs = _ends(getattr(model, "input", None), getattr(model, "inputs", None))
    outputs = _ends(getattr(model, "output", None), getattr(model, "outputs", None), getattr(model, "output_names", None))

    def predict(batch: Batch) -> Any:
        return model.predict(next(iter(batch.values())) if len(batch) == 1 else dict(batch), verbose=0)

    found = {key: ends for key, ends in (("inputs", inputs), ("outputs", outputs)) if ends}
    return Loaded(found, inputs, predict)


def _saved_model(path: str, meta: Facts) -> Loaded:
    tensorflow = _framework("tensorflow")
    try:
        model = tensorflow.saved_model.load(path, tags=["serve"])
    except Exception as error:
        raise Fault(f"TensorFlow can't load it: {first_line(error)}") from error
    keys = list(model.signatures)
    if not keys:
        raise Fault(
            "it has no signature that could be served: save it with model.export(FOLDER), or with"
            " tf.saved_model.save(module, FOLDER, signatures=...)"
        )
    key = saved_models.SERVING if saved_models.SERVING in keys else keys[0]
    function = model.signatures[key]
    inputs = [_tensor(name, spec) for name, spec in sorted(function.structured_input_signature[1].items())]
    outputs = [_tensor(name, spec) for name, spec in sorted(function.structured_outputs.items())]

    def predict(batch: Batch) -> Any:
        given = {str(name): tensorflow.constant(value) for name, value in batch.items()}
        return {name: value.numpy() for name, value in function(**given).items()}

    return Loaded({"inputs": inputs, "outputs": outputs, "signature": key}, inputs, predict)


def _mlflow(path: str, meta: Facts) -> Loaded:
    pyfunc = _framework("mlflow.pyfunc")
    try:
        model = pyfunc.load_model(path)
    except Exception as error:
        if "python_function" in str(error):
            raise Unchecked("its MLmodel has no python_function flavor") from error
        raise Fault(f"MLflow can't load it: {first_line(error)}") from error
    example = model.metadata.load_input_example(path)
    schema = model.metadata.get_input_schema()
    if example is not None or schema is None or not schema.is_tensor_spec():
        return Loaded({}, [], model.predict, example)
    inputs = [{"name": spec.name, "shape": list(spec.shape), "dtype": str(spec.type)} for spec in schema.inputs]
    named = schema.has_input_names()
    return Loaded({}, inputs, lambda batch: model.predict(dict(batch) if named else next(iter(batch.values()))))


_LOADERS: dict[str, Callable[[str, Facts], Loaded]] = {
    saved_models.H5: _keras,
    saved_models.KERAS: _keras,
    saved_models.SAVED_MODEL: _saved_model,
    saved_models.MLFLOW: _mlflow,
}


def why_not(error: BaseException) -> str:
    """Why Keras could not load a model, for a sentence: what it names as missing is the script's own code."""
    missing = _NOT_FOUND.search(str(error))
    if missing:
        name = missing.group(1).rpartition(">")[2]
        return f"its file needs '{name}', which is the script's own code and not in the file: {_CURE}"
    if "ambda" in str(error):
        return (
            "it has a Lambda layer, whose code Keras doesn't load from a file (safe_mode): use Keras' own layers, or " + _CURE
        )
    return f"Keras can't load it: {first_line(error)}"


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _framework(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        # One that is broken in this environment raises whatever it likes.
        package = name.split(".")[0]
        what = f"has no {package}" if isinstance(error, ImportError) else f"can't import {package}"
        raise Unchecked(f"{sys.executable} {what} ({first_line(error)})") from error


def _try(loaded: Loaded, meta: Facts, example: Any) -> str | None:
    """Have a model predict what was saved with it, else what the script gave, else zeros; what a person may want to know of it.

    The outputs are put into ``meta``, if the model doesn't tell them itself.
    """
    inputs = loaded.inputs
    batch = loaded.example
    if batch is None:
        if not inputs:
            return "it was loaded, and not tried: it doesn't tell the shape and type of its inputs"
        if example is None and any(size == -1 for one in inputs for size in one["shape"][1:]):
            return "it was loaded, and not tried: its inputs have no fixed size (report.model can be given an example)"
        batch = _zeros(inputs) if example is None else _given(example, inputs)
    try:
        parts = _parts(loaded.predict(batch))
    except Exception as error:
        raise Fault(f"it was loaded, and can't predict: {first_line(error)}") from error
    if not meta.get("outputs"):
        meta["outputs"] = [{"name": name, "shape": [-1, *array.shape[1:]], "dtype": str(array.dtype)} for name, array in parts]
    import numpy

    bad = any(array.dtype.kind == "f" and bool(numpy.isnan(array).any()) for _, array in parts)
    return "it predicts NaN: its training may have diverged" if bad else None


def _given(example: Any, inputs: list[Facts]) -> Batch:
    import numpy

    values = example if isinstance(example, dict) else {inputs[0]["name"]: example}
    types = {one["name"]: _numpy_type(one["dtype"]) for one in inputs}
    if set(values) != set(types):
        wanted, there = (", ".join(sorted(map(str, names))) for names in (types, values))
        raise Fault(f"its inputs are {wanted}, and the example has {there}")
    return {name: numpy.asarray(values[name], dtype=types[name]) for name in values}


def _zeros(inputs: list[Facts]) -> Batch:
    """A batch of one, of the model's own input shape."""
    import numpy

    return {
        one["name"]: numpy.zeros([max(1, length) for length in one["shape"]], dtype=_numpy_type(one["dtype"])) for one in inputs
    }


def _numpy_type(name: str) -> str:
    """NumPy's type for a tensor's; for types that NumPy doesn't know, the one that frameworks accept instead."""
    return {"string": "str", "bfloat16": "float32"}.get(name, name)


def _ends(struct: Any, tensors: Any, names: Any = None) -> list[Facts]:
    """Input or output tensors of a Keras model; a mapping's keys are their names."""
    if isinstance(struct, dict):
        return [_tensor(name, tensor) for name, tensor in struct.items()]
    tensors = list(tensors or [])
    if not names or len(names) != len(tensors):
        names = [tensor.name for tensor in tensors]
    return [_tensor(name, tensor) for name, tensor in zip(names, tensors)]


def _tensor(name: Any, tensor: Any) -> Facts:
    shape = [-1 if length is None else int(length) for length in tensor.shape]
    return {"name": str(name), "shape": shape, "dtype": str(getattr(tensor.dtype, "name", tensor.dtype))}


def _parts(result: Any) -> list[tuple[str | None, Any]]:
    import numpy

    if isinstance(result, dict):
        return [(str(name), numpy.asarray(value)) for name, value in result.items()]
    return [(None, numpy.asarray(value)) for value in (result if isinstance(result, (list, tuple)) else [result])]
