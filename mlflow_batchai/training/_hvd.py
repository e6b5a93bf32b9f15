"""Find Horovod's binding for the Keras backend in use, and exchange small plain data between ranks."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mlflow_batchai.training import _tensors

# Where an optimizer that was wrapped keeps how its gradients are reduced (``_optimizer.Settings``).
MARK = "_batchai_horovod"
# Gradients are sent times rows / (ROWS * ranks), so that they keep about their size, which matters for halves only.
ROWS = 32

BINDINGS = {"tensorflow": "horovod.tensorflow", "torch": "horovod.torch"}
_said: set[str] = set()
_CHUNK = 256 * 1024 * 1024


def binding() -> Any:
    """Return ``horovod.tensorflow`` or ``horovod.torch``, whichever serves the Keras backend; imports both.

    Raises RuntimeError for Keras 2 and for backends Horovod has no binding for, ImportError if the installed
    Horovod was built without the binding.
    """
    keras = importlib.import_module("keras")
    if major_version(keras) < 3:
        raise RuntimeError(
            f"mlflow_batchai.training.horovod is for Keras 3 and this is Keras {keras.__version__}: "
            "use horovod.tensorflow.keras, which is right there."
        )
    backend = keras.backend.backend()
    if backend not in (*BINDINGS, "jax"):
        raise RuntimeError(
            f"Horovod has no binding for the Keras backend '{backend}': set KERAS_BACKEND to one of jax,"
            f" {', '.join(sorted(BINDINGS))}."
        )
    framework = _for_jax() if backend == "jax" else backend
    if backend == "jax":
        # Read at ``init``: the GPU waits for an exchange, Python goes on (ResNet-50 on an H200: 5,070 images/s, not 4,050).
        os.environ.setdefault("HOROVOD_ENABLE_ASYNC_COMPLETION", "1")
    try:
        found = importlib.import_module(BINDINGS[framework])
    except ImportError as error:
        raise ImportError(
            f"The Keras backend is '{backend}' but {BINDINGS[framework]} can't be imported ({error}): "
            f"install a Horovod that was built for {framework}, for example with `batchai horovod build`."
        ) from error
    if (backend, framework) == ("jax", "tensorflow"):
        importlib.import_module("tensorflow").config.set_visible_devices([], "GPU")  # it would take the card's memory
    return found


@functools.cache
def _for_jax() -> str:
    """Return the framework whose binding exchanges JAX's gradients: torch, unless Horovod was built for TensorFlow only."""
    horovod = importlib.util.find_spec("horovod")
    folders = [] if horovod is None else horovod.submodule_search_locations or []
    built = [name for name in ("torch", "tensorflow") for folder in folders if list(Path(folder, name).glob("mpi_lib*.so"))]
    return built[0] if built else "torch"


def active() -> Any:
    """Return the binding if Horovod is initialised in this process with more than one rank, else None.

    Imports nothing: a script that never used Horovod pays two dictionary look-ups.
    """
    keras = sys.modules.get("keras")
    if keras is None or not any(name in sys.modules for name in BINDINGS.values()):
        return None
    backend = keras.backend.backend()
    hvd = sys.modules.get(BINDINGS.get(_for_jax() if backend == "jax" else backend, ""))
    if hvd is None or not hvd.is_initialized() or hvd.size() < 2:
        return None
    return hvd


def major_version(module: Any) -> int:
    return int(str(module.__version__).split(".")[0])


def on_torch(hvd: Any) -> bool:
    return bool(hvd.__name__ == "horovod.torch")


def keras_on(backend: str) -> bool:
    return bool(importlib.import_module("keras").backend.backend() == backend)


def first_input(data: Any) -> Any:
    import keras

    x = keras.utils.unpack_x_y_sample_weight(data)[0]
    return next((leaf for leaf in keras.tree.flatten(x) if leaf is not None), None)


def row_count(data: Any) -> float:
    """Return the number of rows of this rank's batch, whose shape is known, 1 if it can't be known."""
    first = first_input(data)
    return float(first.shape[0]) if first is not None and len(first.shape) else 1.0


def sync(model: Any) -> None:
    """Give a model's variables their values in the midst of an epoch, where Keras on JAX keeps them elsewhere."""
    if keras_on("jax"):
        model.jax_state_sync()


def to_tensor(hvd: Any, array: Any) -> Any:
    """Return a NumPy array as a tensor of the binding's framework, in the main memory."""
    if on_torch(hvd):
        import numpy
        import torch

        return torch.from_numpy(numpy.array(array, order="C"))
    import tensorflow

    with tensorflow.device("/CPU:0"):
        return tensorflow.constant(array)


def gather(hvd: Any, array: Any, name: str) -> Any:
    """Return the ranks' NumPy arrays joined along the first axis, in rank order."""
    return hvd.allgather(to_tensor(hvd, array), name="batchai." + name).numpy()


def gather_json(hvd: Any, value: Any, name: str) -> list[Any]:
    """Return the ranks' JSON values as a list in rank order; every rank must call it at the same point."""
    import numpy

    data = numpy.frombuffer(json.dumps(value).encode("utf-8"), dtype=numpy.uint8)
    sizes = gather(hvd, numpy.array([len(data)], dtype=numpy.int64), name + ".size").tolist()
    text = gather(hvd, data, name).tobytes()
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [json.loads(text[end - size : end].decode("utf-8")) for size, end in zip(sizes, ends)]


def broadcast_bytes(hvd: Any, data: bytes, root_rank: int, name: str) -> bytes:
    """Return the root's bytes; every rank must pass as many bytes as the root."""
    import numpy

    mine = numpy.frombuffer(data, dtype=numpy.uint8)
    parts = []
    for start in range(0, len(mine), _CHUNK):
        tensor = to_tensor(hvd, mine[start : start + _CHUNK])
        parts.append(hvd.broadcast(tensor, root_rank, name="batchai." + name).numpy().tobytes())
    return b"".join(parts)


def arrays(variables: Iterable[Any]) -> list[Any]:
    import keras

    return [keras.ops.convert_to_numpy(variable) for variable in variables]


def root_arrays(hvd: Any, mine: Sequence[Any], root_rank: int, name: str, what: str) -> list[Any]:
    """Return the root's values of a list of arrays, which must have the same shapes and types on all ranks.

    All values travel as the bytes of one message, so any type can be sent and no name has to match.
    Raises ValueError on every rank if the sizes differ.
    """
    import numpy

    sizes = gather_json(hvd, [len(mine), sum(a.nbytes for a in mine)], name + ".shape")
    if any(size != sizes[0] for size in sizes):
        held = ", ".join(f"rank {rank} has {count} of {size} bytes" for rank, (count, size) in enumerate(sizes))
        raise ValueError(f"The ranks hold different {what}, so they can't be sent from rank {root_rank}: {held}.")
    data = broadcast_bytes(hvd, b"".join(a.tobytes() for a in mine), root_rank, name)
    values, start = [], 0
    for array in mine:
        part = data[start : start + array.nbytes]
        values.append(numpy.frombuffer(part, dtype=array.dtype).reshape(array.shape))
        start += array.nbytes
    return values


def broadcast_variables(hvd: Any, variables: Sequence[Any], root_rank: int, what: str = "variables") -> None:
    """Give all ranks the root's values of ``variables``, a list in the same order on all ranks.

    Raises ValueError on every rank if the sizes differ.
    """
    tensors = _tensors_alike(hvd, variables)
    if tensors is not None:
        _tensors.broadcast(hvd, tensors, root_rank, "broadcast")
        return
    values = root_arrays(hvd, arrays(variables), root_rank, "broadcast", what)
    if hvd.rank() != root_rank:
        for variable, value in zip(variables, values):
            variable.assign(value)


def _tensors_alike(hvd: Any, variables: Sequence[Any]) -> list[Any] | None:
    """Return torch's tensors of ``variables``, None with other backends and where ranks hold them on unlike devices."""
    if not keras_on("torch"):
        return None
    tensors = _tensors.of(variables)
    layouts = gather_json(hvd, _tensors.layout(tensors), "layout")
    return tensors if all(one == layouts[0] for one in layouts) else None


def average_variables(hvd: Any, variables: Sequence[Any]) -> None:
    """Give all ranks the plain mean over the ranks of floating point ``variables``; others take rank 0's."""
    import numpy

    tensors = _tensors_alike(hvd, variables)
    if tensors is not None:
        _tensors.average(hvd, [t for t in tensors if t.is_floating_point()], "statistics")
        _tensors.broadcast(hvd, [t for t in tensors if not t.is_floating_point()], 0, "broadcast")
        return
    mine = arrays(variables)
    floats = [i for i, a in enumerate(mine) if numpy.issubdtype(a.dtype, numpy.floating)]
    others = [variables[i] for i in range(len(mine)) if i not in set(floats)]
    if floats:
        flat = numpy.concatenate([mine[i].astype(numpy.float64).reshape(-1) for i in floats])
        total = hvd.allreduce(to_tensor(hvd, flat), op=hvd.Sum, name="batchai.statistics").numpy()
        start = 0
        for i in floats:
            part = total[start : start + mine[i].size] / hvd.size()
            variables[i].assign(part.reshape(mine[i].shape).astype(mine[i].dtype))
            start += mine[i].size
    if others:
        broadcast_variables(hvd, others, 0)


def notice(hvd: Any, text: str) -> None:
    """Say something once a job: on rank 0's standard error."""
    if hvd.rank() == 0 and text not in _said:
        _said.add(text)
        print("mlflow-batchai: " + text, file=sys.stderr, flush=True)


def optimizer_core(optimizer: Any) -> Any:
    """Return the optimizer that holds the learning rate: the inner one of a LossScaleOptimizer."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def scale_momentum(optimizer: Any, factor: float) -> None:
    """Scale the momentum of SGD and RMSprop, which holds the learning rate, as the rate changes by ``factor``."""
    if not getattr(optimizer, "momentum", 0.0):
        return
    for buffer in getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or []:
        if buffer is not None:
            buffer.assign(buffer * factor)
