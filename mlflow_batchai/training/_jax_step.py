"""The train step of Keras on JAX in two compiled halves: gradients, Horovod's exchange of them, update.

JAX compiles a step as a whole, and Horovod has no operation that could be compiled into it. So the first half is Keras' own
``train_step`` with an optimizer that only hands out the gradients: one flat buffer for each of their types (on one H200 a small
network made 59,900 images/s so, and 32,700 with the gradients one by one). The second half cuts the sums up again and is the
optimizer's own update. Between a GPU and Horovod's torch binding buffers go by DLPack, without a copy.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, ClassVar

from mlflow_batchai.training import _hvd

Buffers = dict[str, Any]


class _Running:
    """The step that runs, or is traced, in this process.

    Attributes:
        rows: of its batch; None outside ``fit``, where ranks count alike.
        captured: the buffers of the optimizer, while a first half is traced.
        applied: each optimizer that was applied, and the elements of its buffers.
        sent: the last buffers that torch's binding was given.
    """

    rows: float | None = None
    captured: list[Buffers] | None = None
    applied: ClassVar[list[tuple[Any, dict[str, int]]]] = []
    sent: ClassVar[Buffers] = {}


def stateless_apply(self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
    """Replace ``Optimizer.stateless_apply`` on one instance: all ranks' gradients are applied.

    Raises RuntimeError inside ``jax.jit``, where nothing can be exchanged.
    """
    import jax

    hvd = _hvd.active()
    if hvd is None:
        return type(self).stateless_apply(self, optimizer_variables, grads, trainable_variables)
    if _Running.captured is not None:
        _Running.captured.append(_packed(self, hvd, grads, _Running.rows))
        return trainable_variables, optimizer_variables
    if any(isinstance(grad, jax.core.Tracer) for grad in grads):
        raise RuntimeError(
            "Horovod can't exchange gradients inside jax.jit: train with model.fit, or call the optimizer's stateless_apply"
            " outside of the function that is compiled."
        )
    buffers = _packed(self, hvd, grads, _Running.rows)
    if _Running.rows is not None:
        _Running.applied.append((self, _sizes(buffers)))
    sums = _exchanged(hvd, buffers)
    return _apply_sums(self, sums, optimizer_variables, trainable_variables, _Running.rows is not None)


class TrainStep:
    """A model's train step on several ranks, in place of its compiled one: (state, batch) -> (logs, state).

    A ``train_step`` of the user's own may compute with updated weights, so it is run as it is written, uncompiled.
    """

    def __init__(self, model: Any) -> None:
        import jax
        import keras

        self._model = model
        self._plan: list[tuple[Any, dict[str, int]]] = []
        ours = hasattr(model.optimizer, _hvd.MARK) and type(model).train_step is keras.Model.train_step
        if ours and model.jit_compile and not model.run_eagerly:
            self._first = jax.jit(self._gradients, donate_argnums=(1, 3))
            self._step = self._in_halves
        else:
            self._step = self._as_written
            if not model.run_eagerly:
                notice = "this model's train step runs without jit_compile, as Horovod has no operation for XLA."
                _hvd.notice(_hvd.active(), notice)

    def __call__(self, state: Any, data: Any) -> Any:
        return self._step(state, data)

    def _as_written(self, state: Any, data: Any) -> Any:
        self._plan = _Running.applied = []
        _Running.rows = _hvd.row_count(data)
        try:
            return self._model.train_step(state, data)
        finally:
            _Running.rows = None

    def _in_halves(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer_variables, metrics = state
        logs, non_trainable, metrics, buffers = self._first(trainable, non_trainable, optimizer_variables, metrics, data)
        self._plan = [(self._model.optimizer, _sizes(buffers))]
        sums = _exchanged(_hvd.active(), buffers)
        trainable, optimizer_variables = _update(self._model.optimizer)(sums, optimizer_variables, trainable, True)
        return logs, (trainable, non_trainable, optimizer_variables, metrics)

    def _gradients(self, trainable: Any, non_trainable: Any, optimizer_variables: Any, metrics: Any, data: Any) -> Any:
        """Keras' own step, whose optimizer changes nothing."""
        _Running.rows, _Running.captured = _hvd.row_count(data), []
        try:
            logs, state = self._model.train_step((trainable, non_trainable, optimizer_variables, metrics), data)
            [buffers] = _Running.captured
        finally:
            _Running.rows, _Running.captured = None, None
        return logs, state[1], state[3], buffers

    def finish_epoch(self, hvd: Any) -> list[Any]:
        """Take part, with no rows, in the steps that other ranks still have in this epoch; return the optimizers.

        Raises RuntimeError if this rank had no batch at all, as it doesn't know the gradients then.
        """
        import jax.numpy as jnp

        if not self._plan:
            raise RuntimeError(f"Rank {hvd.rank()} had no batch at all: give every rank some of the data.")
        while True:
            for number, (optimizer, sizes) in enumerate(self._plan):
                sums = _exchanged(hvd, {kind: jnp.zeros(size, kind) for kind, size in sizes.items()})
                if number == 0 and float(sums["float32"][0]) == 0:
                    return [optimizer for optimizer, _ in self._plan]
                groups = [optimizer.variables, optimizer._trainable_variables]
                updated = _update(optimizer)(sums, *([variable.value for variable in group] for group in groups), True)
                for group, values in zip(groups, reversed(updated)):
                    for variable, value in zip(group, values):
                        variable.assign(value)


def _sizes(buffers: Buffers) -> dict[str, int]:
    return {kind: len(buffer) for kind, buffer in buffers.items()}


def _packed(optimizer: Any, hvd: Any, grads: Any, rows: float | None) -> Buffers:
    """Return gradients as flat buffers, by type; the float32 one begins with this rank's share of the rows, if that counts."""
    import jax.numpy as jnp

    settings = getattr(optimizer, _hvd.MARK)
    unit = 1.0 / hvd.size() if rows is None else rows / (_hvd.ROWS * hvd.size())
    parts: dict[str, list[Any]] = {} if rows is None else {"float32": [jnp.full((1,), unit, "float32")]}
    for grad in grads:
        flat = grad.reshape(-1) if settings.op == hvd.Sum else grad.reshape(-1) * unit
        flat = flat.astype(_sent(settings, hvd, grad.dtype))
        parts.setdefault(flat.dtype.name, []).append(flat)
    return {kind: jnp.concatenate(members) for kind, members in parts.items()}


def _sent(settings: Any, hvd: Any, dtype: Any) -> Any:
    """Return the type that gradients of a type are sent as."""
    return "float16" if settings.compression is hvd.Compression.fp16 and str(dtype).startswith("float") else dtype


def _update(optimizer: Any) -> Callable[..., Any]:
    """Return the compiled second half: (sums, optimizer variables, weights, whether rows count) -> (weights, variables)."""
    import jax

    settings = getattr(optimizer, _hvd.MARK)
    if settings.update is None:
        settings.update = jax.jit(functools.partial(_apply_sums, optimizer), static_argnums=3, donate_argnums=(1, 2))
    return settings.update  # type: ignore[no-any-return]


def _apply_sums(optimizer: Any, sums: Buffers, optimizer_variables: Any, trainable_variables: Any, counted: bool) -> Any:
    settings, hvd = getattr(optimizer, _hvd.MARK), _hvd.active()
    divisor = sums["float32"][0] if counted and settings.op != hvd.Sum else None
    begins = {kind: int(counted and kind == "float32") for kind in sums}
    grads = []
    for value in trainable_variables:
        kind = str(_sent(settings, hvd, value.dtype))
        flat = sums[kind][begins[kind] : begins[kind] + value.size]
        begins[kind] += value.size
        grad = flat.reshape(value.shape).astype(value.dtype)
        grads.append(grad if divisor is None else grad / divisor.astype(value.dtype))
    return type(optimizer).stateless_apply(optimizer, optimizer_variables, grads, trainable_variables)


def _exchanged(hvd: Any, buffers: Buffers) -> Buffers:
    """Return the sums of the buffers over the ranks."""
    import jax
    import numpy

    names = {kind: f"batchai_{kind}_{len(buffer)}" for kind, buffer in sorted(buffers.items())}
    if not _hvd.on_torch(hvd):
        arrays = {kind: _hvd.to_tensor(hvd, numpy.asarray(buffers[kind])) for kind in names}
        return {kind: hvd.allreduce(arrays[kind], op=hvd.Sum, name=name).numpy() for kind, name in names.items()}
    import torch

    if jax.default_backend() == "cpu":
        jax.block_until_ready(buffers)  # DLPack makes a GPU's stream wait, and nobody a processor
    # Kept until the next exchange: NCCL may still read when its operation counts as done (``_hvd.binding``).
    _Running.sent = {kind: torch.from_dlpack(buffers[kind]) for kind in names}
    handles = {kind: hvd.allreduce_async(_Running.sent[kind], op=hvd.Sum, name=name) for kind, name in names.items()}
    return {kind: jax.dlpack.from_dlpack(hvd.synchronize(handle)) for kind, handle in handles.items()}
