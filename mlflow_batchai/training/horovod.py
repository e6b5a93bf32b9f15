"""The Horovod API for Keras 3: the names of ``horovod.keras``, on the TensorFlow, torch and JAX backends.

    import mlflow_batchai.training.horovod as hvd

    hvd.init()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size())), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

What is exact. N ranks end with the weights that one process would have, had it seen the ranks' batches joined
into one, up to rounding: a rank's gradients count by its share of the rows, so unequal (last) batches, and
ranks that have fewer batches in an epoch, are right too. It holds for losses that are means over the batch,
for every Keras optimizer, clipping, weight decay, moving averages, gradient accumulation and loss scaling,
all of which see the reduced gradient. What is not: BatchNormalization normalises by each rank's own batch (as
everywhere with Horovod), and its moving statistics are averaged over the ranks at the end of an epoch; a loss
that divides by something else than the rows (a mask, the sum of the weights) is weighted by the rows; a loss
that is a sum needs ``op=hvd.Sum``.

Every epoch the ranks compare their weights (``guard``), and stop in the same epoch. Importing this module
imports neither Keras nor a framework; ``init`` does.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Callable

from mlflow_batchai.training import _hvd, _torch_step, guard

_FROM_BINDING = [
    "init",
    "shutdown",
    "is_initialized",
    "rank",
    "size",
    "local_rank",
    "local_size",
    "cross_rank",
    "cross_size",
    "Average",
    "Sum",
    "Min",
    "Max",
    "Product",
    "Adasum",
    "Compression",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "gloo_built",
    "gloo_enabled",
    "nccl_built",
    "cuda_built",
    "rocm_built",
    "ddl_built",
    "ccl_built",
    "start_timeline",
    "stop_timeline",
]
_ERRORS = {"RanksDivergedError": "constants", "RanksDisagreeError": "_watch"}


def __getattr__(name: str) -> Any:
    if name == "callbacks":
        return importlib.import_module("mlflow_batchai.training.callbacks")
    if name in _ERRORS:
        return getattr(importlib.import_module(f"mlflow_batchai.training.{_ERRORS[name]}"), name)
    if name in _FROM_BINDING:
        return getattr(_hvd.binding(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def allreduce(value: Any, name: str | None = None, average: bool | None = None, op: Any = None) -> Any:
    """Return the mean of ``value`` over the ranks (with ``op=hvd.Sum`` or ``average=False`` the sum).

    A tensor of the backend gives a tensor; a number or array gives a NumPy number or array (the mean of
    integers is a float). Shapes must be the same on all ranks.
    """
    hvd = _hvd.binding()
    if op is None:
        op = hvd.Sum if average is False else hvd.Average
    if not _is_tensor(value):
        value = _array(value)
        if op == hvd.Average and value.dtype.kind in "iub":
            value = value.astype("float64")
    return _exchanged(hvd, lambda tensor: hvd.allreduce(tensor, op=op, name=name), value)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the ranks' values joined along the first axis (which may differ in length); types as in ``allreduce``."""
    hvd = _hvd.binding()
    return _exchanged(hvd, lambda tensor: hvd.allgather(tensor, name=name), value)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the root's ``value``; types as in ``allreduce``."""
    hvd = _hvd.binding()
    return _exchanged(hvd, lambda tensor: hvd.broadcast(tensor, root_rank, name=name), value)


def _exchanged(hvd: Any, exchange: Callable[[Any], Any], value: Any) -> Any:
    """Return what ``exchange`` makes of a value as a tensor of the binding: a tensor for a tensor, else NumPy's."""
    keras = importlib.import_module("keras")
    if _torch_step.Recording.current is not None:
        raise RuntimeError("Horovod's operations can't be recorded in a CUDA graph")  # so the step is run as it is
    if not _is_tensor(value):
        return exchange(_hvd.to_tensor(hvd, _array(value))).numpy()[()]
    if not _hvd.keras_on("jax"):
        return exchange(value)
    return keras.ops.convert_to_tensor(exchange(_hvd.to_tensor(hvd, keras.ops.convert_to_numpy(value))).numpy())


def broadcast_object(value: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the root's ``value``, any object that can be pickled."""
    return _hvd.binding().broadcast_object(value, root_rank, name=name)


def allgather_object(value: Any, name: str | None = None) -> list[Any]:
    """Return the ranks' values in rank order, any objects that can be pickled."""
    return list(_hvd.binding().allgather_object(value, name=name))


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Give all ranks the root's values of Keras variables, for example ``model.weights + model.optimizer.variables``."""
    hvd = _hvd.binding()
    if hvd.size() > 1:
        _hvd.broadcast_variables(hvd, list(variables), root_rank)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise RuntimeError: Keras 3 keeps no list of all variables."""
    raise RuntimeError(
        f"Keras 3 keeps no list of all variables: use callbacks.BroadcastGlobalVariablesCallback({root_rank}), "
        f"or broadcast_variables(model.weights + model.optimizer.variables, {root_rank})."
    )


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: Any = None,
    backward_passes_per_step: int = 1,
    **unsupported: Any,
) -> Any:
    """Make a Keras optimizer apply all ranks' gradients, and return it: the same object, still of Keras' own class.

    Models are saved and loaded as if it had not been wrapped. Horovod has no operation for XLA: on TensorFlow ``jit_compile``
    of the train step is switched off with a notice, on JAX the step is compiled in two halves (``_jax_step``), and with PyTorch
    on a GPU it is recorded as CUDA graphs (``_torch_step``).

    Args:
        optimizer: a ``keras.optimizers.Optimizer`` or its name; a LossScaleOptimizer too.
        name: accepted as in Horovod, without effect.
        compression: ``hvd.Compression.fp16`` to send halves.
        sparse_as_dense: send the gradients of embeddings as dense tensors.
        op: ``hvd.Average`` (weighted by rows, the default) or ``hvd.Sum``.
        backward_passes_per_step: only 1; use Keras' ``gradient_accumulation_steps``.

    Raises TypeError for an object that is not a Keras 3 optimizer or an argument that isn't supported, ValueError
    for an ``op`` other than the two.
    """
    del name
    hvd = _hvd.binding()
    keras = importlib.import_module("keras")
    optimizer_module = importlib.import_module("mlflow_batchai.training._optimizer")
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"DistributedOptimizer wraps a keras.optimizers.Optimizer of Keras 3, not {optimizer!r}.")
    if unsupported:
        raise TypeError(f"DistributedOptimizer for Keras 3 does not take {', '.join(sorted(unsupported))}: leave it out.")
    if backward_passes_per_step != 1:
        raise TypeError(
            "DistributedOptimizer for Keras 3 does not take backward_passes_per_step: "
            f"give the optimizer gradient_accumulation_steps={backward_passes_per_step}."
        )
    op = hvd.Average if op is None else op
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError(f"DistributedOptimizer takes op=hvd.Average or op=hvd.Sum, not {op!r}.")
    settings = optimizer_module.Settings(op, compression or hvd.Compression.none, sparse_as_dense)
    distributed = optimizer_module.distribute(optimizer, settings)
    guard.patch_fit(keras)
    return distributed


def load_model(filepath: Any, custom_optimizers: Any = None, custom_objects: Any = None, compression: Any = None) -> Any:
    """Load a saved Keras model with its optimizer state, and wrap the optimizer in ``DistributedOptimizer``.

    ``custom_optimizers`` are optimizer classes the file names, ``custom_objects`` as in ``keras.models.load_model``.
    """
    keras = importlib.import_module("keras")
    objects = {kind.__name__: kind for kind in custom_optimizers or []}
    objects.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if model.optimizer is not None:
        _complete_optimizer(model, filepath)
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


def _complete_optimizer(model: Any, filepath: Any) -> None:
    """Give a model from an ``.h5`` file the optimizer state that is in the file.

    Keras 3.15 builds the loaded optimizer for no variables, so it has no state and training on ends in
    "Unknown variable".
    """
    optimizer = model.optimizer
    try:
        optimizer._check_variables_are_known(model.trainable_variables)
        return
    except ValueError:
        model.optimizer = optimizer = type(optimizer).from_config(optimizer.get_config())
        optimizer.build(model.trainable_variables)
    h5py = importlib.import_module("h5py")
    with h5py.File(filepath, "r") as file:
        group = file.get("optimizer_weights", {})
        names = [n for key in sorted(getattr(group, "attrs", {}), key=_by_number) for n in group.attrs[key]]
        values = [group[name][()] for name in names]
    if [value.shape for value in values] == [tuple(variable.shape) for variable in optimizer.variables]:
        for variable, value in zip(optimizer.variables, values):
            variable.assign(value)


def _by_number(key: str) -> int:
    """Order the parts of a list of names that was too long for one attribute: weight_names0, weight_names1, ..."""
    return int(key[len("weight_names") :] or 0)


def _is_tensor(value: Any) -> bool:
    keras = importlib.import_module("keras")
    return bool(keras.ops.is_tensor(value))


def _array(value: Any) -> Any:
    import numpy

    return numpy.asarray(value)
