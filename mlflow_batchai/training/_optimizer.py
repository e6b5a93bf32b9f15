"""Make a Keras 3 optimizer train on all ranks' gradients, exactly as one process on the joined batch would."""

from __future__ import annotations

import contextlib
import functools
import types
import zlib
from collections.abc import Iterator
from typing import Any, Callable

from mlflow_batchai.training import _hvd, _jax_step, _torch_step


def reduce_gradients(hvd: Any, settings: Any, grads: list[Any], rows: Any) -> tuple[list[Any], Any]:
    """Return the mean over all ranks' rows of each gradient (None where it is None), and a number.

    ``rows`` are those behind this rank's gradients; the number is above 0 as long as any rank has some. It travels
    with the gradients, in the same exchange. With ``rows=None`` (not known, outside ``fit``) ranks count alike, and
    the number is None. With ``op=hvd.Sum`` the gradients are added up.

    Names are made of counts only, so that they are the same on a rank that has built other models as well.
    """
    weighted = settings.op != hvd.Sum
    unit = None if rows is None else rows / (_hvd.ROWS * hvd.size())
    weight = (1.0 / hvd.size() if unit is None else unit) if weighted else None
    dense = {i: g for i, g in enumerate(grads) if g is not None and not is_sparse(g)}
    packed = dict(zip(dense, map(settings.compression.compress, _scaled(list(dense.values()), weight))))
    tensors = {i: tensor for i, (tensor, _) in packed.items()}
    if unit is not None:
        tensors[-1] = _as_tensor(hvd, unit, next(iter(dense.values()), None))
    sums = _sums(hvd, tensors)
    total = sums.pop(-1, None)
    divisor = total if weighted else None
    result = list(grads)
    means = _divided([settings.compression.decompress(value, packed[i][1]) for i, value in sums.items()], divisor)
    for i, value in zip(sums, means):
        result[i] = value
    for i, value in _gathered(hvd, {i: g for i, g in enumerate(grads) if is_sparse(g)}, weight, divisor).items():
        result[i] = value
    return result, total


def _sums(hvd: Any, tensors: dict[int, Any]) -> dict[int, Any]:
    """Return the sums over the ranks; one group of tensors for each type, all under way at once."""
    groups: dict[str, list[int]] = {}
    for i, tensor in tensors.items():
        kind = getattr(tensor.dtype, "name", None) or str(tensor.dtype).split(".")[-1]
        groups.setdefault(kind, []).append(i)
    sums: dict[int, Any] = {}
    flats: dict[str, tuple[list[int], Any]] = {}
    for kind, members in sorted(groups.items()):
        values = [tensors[i] for i in members]
        name = f"batchai_{kind}_{len(members)}_{sum(_elements(value) for value in values)}"
        if _hvd.on_torch(hvd):
            # Horovod compares lengths only.
            shapes = repr([(i, tuple(tensors[i].shape)) for i in members])
            flats[f"{name}_{zlib.crc32(shapes.encode()):08x}"] = members, _flat(values)
        else:
            sums.update(zip(members, hvd.grouped_allreduce(values, op=hvd.Sum, name=name, ignore_name_scope=True)))
    if flats:
        _exchange(hvd, {name: flat for name, (_, flat) in flats.items()})
    for members, flat in flats.values():
        parts = flat.split([tensors[i].numel() for i in members])
        sums.update((i, part.view(tensors[i].shape)) for i, part in zip(members, parts))
    return sums


def _flat(tensors: list[Any]) -> Any:
    """Return torch's tensors as one, each in the order of its elements; in memory convolutions' may lie in another."""
    import torch

    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _exchange(hvd: Any, flats: dict[str, Any]) -> None:
    """Add up torch's tensors, by name, over the ranks, in place; between two graphs, while a step is recorded."""

    def exchange() -> None:
        for handle in [hvd.allreduce_async_(flat, op=hvd.Sum, name=name) for name, flat in flats.items()]:
            hvd.synchronize(handle)

    recording = _torch_step.Recording.current
    if recording is None:
        exchange()
    else:
        recording.cut(exchange)


def _gathered(hvd: Any, slices: dict[int, Any], weight: Any, divisor: Any) -> dict[int, Any]:
    """Return all ranks' rows of each table, as one process would have them."""
    if not slices:
        return {}
    import tensorflow as tf

    name = f"batchai_slices_{len(slices)}"
    sent = _scaled([part.values for part in slices.values()], weight)
    values = hvd.grouped_allgather(sent, name=name, ignore_name_scope=True)
    indices = hvd.grouped_allgather([part.indices for part in slices.values()], name=name + "_at", ignore_name_scope=True)
    means = _divided(values, divisor)
    return {
        i: tf.IndexedSlices(mean, index, dense_shape=part.dense_shape)
        for (i, part), mean, index in zip(slices.items(), means, indices)
    }


def _scaled(tensors: list[Any], factor: Any) -> list[Any]:
    """Return new tensors, each times ``factor``; one call for all of them with torch, where each call would take its time."""
    if factor is None or not tensors:
        return tensors
    if hasattr(tensors[0], "data_ptr"):
        import torch

        return list(torch._foreach_mul(tensors, factor))
    return [tensor * (factor if isinstance(factor, float) else _cast(factor, tensor.dtype)) for tensor in tensors]


def _divided(tensors: list[Any], divisor: Any) -> list[Any]:
    """Return the tensors, each over ``divisor``."""
    if divisor is None or not tensors:
        return tensors
    if hasattr(tensors[0], "data_ptr"):
        import torch

        # By a tensor, which stays on the GPU: a number would have to be waited for.
        try:
            return list(torch._foreach_div(tensors, divisor))
        except TypeError:  # torch 2.1 takes no tensor there
            return [tensor / divisor for tensor in tensors]
    return [tensor / _cast(divisor, tensor.dtype) for tensor in tensors]


def _cast(number: Any, dtype: Any) -> Any:
    import tensorflow as tf

    return tf.cast(number, dtype)


def _as_tensor(hvd: Any, number: Any, like: Any) -> Any:
    """Return a number as a tensor that can go into one group with ``like``."""
    if not _hvd.on_torch(hvd):
        return number
    import torch

    # Filled there: a number that is copied to a GPU would make it wait.
    return torch.full((), number, dtype=torch.float32, device=None if like is None else like.device)


def is_sparse(gradient: Any) -> bool:
    """Say whether a gradient is TensorFlow's IndexedSlices, some rows of a table."""
    return hasattr(gradient, "indices") and hasattr(gradient, "values") and hasattr(gradient, "dense_shape")


def densify(gradient: Any) -> Any:
    """Return IndexedSlices as a tensor."""
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)


def _elements(gradient: Any) -> int:
    count = 1
    for length in gradient.shape:
        count *= int(length or 1)
    return count


def gradient_spec(gradient: Any) -> Any:
    """Return what is needed to make an empty gradient of the same kind: None, or (kind, row shape, dtypes)."""
    if gradient is None:
        return None
    if is_sparse(gradient):
        return ("rows", list(gradient.values.shape[1:]), gradient.values.dtype, gradient.indices.dtype)
    return ("dense", list(gradient.shape), gradient.dtype, None)


def empty_gradient(spec: Any, variable: Any) -> Any:
    """Return a gradient of zeros, or of no rows, as ``gradient_spec`` describes it."""
    if spec is None:
        return None
    kind, shape, dtype, index_dtype = spec
    import keras

    if keras.backend.backend() == "torch":
        import torch

        return torch.zeros(shape, dtype=dtype, device=variable.value.device)
    import tensorflow as tf

    zero = no_rows()
    if kind == "dense":
        return tf.fill(shape, tf.cast(zero, dtype))
    return tf.IndexedSlices(
        tf.fill(tf.stack([zero, *shape]), tf.cast(zero, dtype)),
        tf.fill(tf.stack([zero]), tf.cast(zero, index_dtype)),
        dense_shape=tf.constant(list(variable.shape), index_dtype),
    )


class _Zero:
    """The variable that ``no_rows`` reads, made when it is first needed."""

    variable: Any = None


def no_rows() -> Any:
    """Return a TensorFlow zero that is read from a variable.

    Horovod's operations look free of side effects to TensorFlow, which would run one of constants once, while it
    optimises the graph, and never again.
    """
    import tensorflow as tf

    if _Zero.variable is None:
        with tf.init_scope(), tf.device("/CPU:0"):
            _Zero.variable = tf.Variable(0, dtype=tf.int32, trainable=False)
    return _Zero.variable.read_value()


class Settings:
    """How one optimizer reduces its gradients; with JAX also its compiled update, once there is one."""

    def __init__(self, op: Any, compression: Any, sparse_as_dense: bool) -> None:
        self.op = op
        self.compression = compression
        self.sparse_as_dense = sparse_as_dense
        self.update: Any = None


class _Step:
    """The train step that runs (or is traced) in this process: the rows of its batch, and what it applied."""

    rows: Any = None
    applied: list[tuple[Any, list[Any], Any]] | None = None


class _State:
    """State of one model's train step, so that a rank without data can take part in it."""

    plan: list[tuple[Any, list[Any], Any]] | None = None
    idle: Callable[[], Any] | None = None
    idle_plan: Any = None


def distribute(optimizer: Any, settings: Settings) -> Any:
    """Wrap ``optimizer.apply`` (on JAX ``stateless_apply``) of this instance and return it; its class stays Keras' own.

    Keras copies an optimizer by its saved form, so a copy is not wrapped.
    """
    setattr(optimizer, _hvd.MARK, settings)
    replacement = _jax_step.stateless_apply if _hvd.keras_on("jax") else _apply
    setattr(optimizer, replacement.__name__.lstrip("_"), types.MethodType(replacement, optimizer))
    _patch_make_train_function()
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Say whether ``optimizer`` was wrapped here."""
    return hasattr(optimizer, _hvd.MARK)


def _apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    hvd = _hvd.active()
    if hvd is None:
        return type(self).apply(self, grads, trainable_variables)
    grads = list(grads)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    settings = getattr(self, _hvd.MARK)
    if settings.sparse_as_dense:
        grads = [g if g is None or not is_sparse(g) else densify(g) for g in grads]
    if _Step.applied is not None:
        _Step.applied.append((self, [gradient_spec(g) for g in grads], trainable_variables))
    reduced, _ = reduce_gradients(hvd, settings, grads, _Step.rows)
    return _updated(hvd, self, reduced, trainable_variables)


def _updated(hvd: Any, optimizer: Any, grads: list[Any], variables: Any) -> Any:
    """Apply the sums as Keras does; with torch on a GPU in the operations of a recording, as other ranks may replay theirs."""
    on_gpu = _hvd.on_torch(hvd) and any(grad is not None and grad.is_cuda for grad in grads)
    with _torch_step.constants_on_device() if on_gpu else contextlib.nullcontext():
        return type(optimizer).apply(optimizer, grads, variables)


# --- the train step -------------------------------------------------------------------------------------------------


def _patch_make_train_function() -> None:
    """Prepare every model that trains with one of our optimizers, just before Keras builds its train function."""
    import keras

    original = keras.Model.make_train_function
    if getattr(original, "batchai", False):
        return

    @functools.wraps(original)
    def make_train_function(self: Any, force: bool = False) -> Any:
        hvd = _hvd.active()
        if not concerns(self):
            return original(self, force)
        recordable = _hvd.keras_on("torch") and _torch_step.on_gpu(self)
        if hvd is None and not recordable:
            return original(self, force)
        _lift_over_loss_scale(self)
        if _hvd.keras_on("jax"):
            if force or not hasattr(self.train_function, "batchai"):
                step = _jax_step.TrainStep(self)
                self.train_function = self._make_function(step)
                self.train_function.batchai = step
            return None
        if not hasattr(self.train_step, "batchai"):
            self.train_step = _shared_step(self.train_step)
            force = True
        if self.train_function is not None and not force:
            if isinstance(self.train_function, _torch_step.TrainStep):
                self.train_function.forget()
            return None
        compiled = self.jit_compile
        self.jit_compile = False
        try:
            original(self, True)
        finally:
            self.jit_compile = compiled
        if recordable and not self.run_eagerly and (compiled or _torch_step.is_keras_own(self)):
            self.train_function = _torch_step.TrainStep(self.train_function)
        elif compiled and hvd is not None:
            _hvd.notice(hvd, "the train step runs without jit_compile, as Horovod has no operation for XLA.")
        return None

    make_train_function.batchai = True  # type: ignore[attr-defined]
    keras.Model.make_train_function = make_train_function


def concerns(model: Any) -> bool:
    """Say whether a model trains with an optimizer that was wrapped here (also under another name than optimizer)."""
    import keras

    found = [o for o in [model.optimizer, *vars(model).values()] if isinstance(o, keras.optimizers.Optimizer)]
    return any(is_distributed(o) or is_distributed(_hvd.optimizer_core(o)) for o in found)


def _lift_over_loss_scale(model: Any) -> None:
    """Wrap the LossScaleOptimizer that ``compile`` put around our optimizer, in place of ours.

    It skips a step whose gradients are not finite. Ranks must agree on that, so gradients are reduced before.
    """
    outer = model.optimizer
    inner = getattr(outer, "inner_optimizer", None)
    if inner is not None and is_distributed(inner) and not is_distributed(outer):
        distribute(outer, getattr(inner, _hvd.MARK))
        for name in ("apply", "stateless_apply", _hvd.MARK):
            vars(inner).pop(name, None)


def _shared_step(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a train step that first learns this rank's share of the joined batch (its rows over all rows)."""
    state = _State()

    @functools.wraps(inner)
    def train_step(data: Any) -> Any:
        hvd = _hvd.active()
        if hvd is None:
            return inner(data)
        with _step(_rows(data)) as applied:
            result = inner(data)
        state.plan = applied
        return result

    train_step.batchai = state  # type: ignore[attr-defined]
    return train_step


@contextlib.contextmanager
def _step(rows: Any) -> Iterator[list[tuple[Any, list[Any], Any]]]:
    before = (_Step.rows, _Step.applied)
    applied: list[tuple[Any, list[Any], Any]] = []
    _Step.rows, _Step.applied = rows, applied
    try:
        yield applied
    finally:
        _Step.rows, _Step.applied = before


def _rows(data: Any) -> Any:
    """Return the number of rows of this rank's batch (with TensorFlow a float32 tensor), 1 if it can't be known."""
    if _hvd.keras_on("torch"):
        return _hvd.row_count(data)
    import tensorflow as tf

    first = _hvd.first_input(data)
    rows: Any = 1
    if isinstance(first, tf.RaggedTensor):
        rows = first.nrows()
    elif isinstance(first, tf.SparseTensor):
        rows = first.dense_shape[0]
    elif first is not None and len(first.shape):
        rows = tf.shape(first)[0]
    with tf.device("/CPU:0"):
        return tf.cast(rows, tf.float32) + tf.cast(no_rows(), tf.float32)


# --- ranks with fewer batches ---------------------------------------------------------------------------------------


def finish_epoch(model: Any, hvd: Any) -> None:
    """Take part, with no rows, in the steps that other ranks still have in this epoch; return when none has.

    So ranks may have different numbers of batches: a step counts the rows of the ranks that have one, and every
    rank makes every update. Costs one exchange of empty gradients an epoch if all have the same.
    Raises RuntimeError if this rank had no batch at all, as it doesn't know the gradients then.
    """
    if _hvd.keras_on("jax"):
        step = getattr(model.train_function, "batchai", None)
        if step is not None:
            _agree_on_counters(hvd, step.finish_epoch(hvd))
        return
    state = getattr(model.train_step, "batchai", None)
    if state is None:
        return
    if state.plan is None:
        raise RuntimeError(f"Rank {hvd.rank()} had no batch at all: give every rank some of the data.")
    if not state.plan:
        return
    if state.idle is None or state.idle_plan is not state.plan:
        state.idle_plan = state.plan
        state.idle = _idle_step(hvd, state.plan, bool(model.run_eagerly))
    while float(state.idle()) > 0:
        pass
    _agree_on_counters(hvd, [optimizer for optimizer, _, _ in state.plan])


def _agree_on_counters(hvd: Any, optimizers: list[Any]) -> None:
    """Give all ranks the largest step counters.

    TensorFlow may count a step that ended with the data, as counting does not wait for the data; whether it does
    is a race.
    """
    counters = [v for o in optimizers for v in o.variables if "int" in str(v.dtype)]
    ranks = _hvd.gather_json(hvd, [int(value) for value in _hvd.arrays(counters)], "counters")
    if any(values != ranks[0] for values in ranks):
        for counter, value in zip(counters, (max(values) for values in zip(*ranks))):
            counter.assign(value)


def _idle_step(hvd: Any, plan: list[tuple[Any, list[Any], Any]], eager: bool) -> Callable[[], Any]:
    """Return a function that makes one train step without rows, and returns 0 if no other rank had rows either."""

    def empties(specs: list[Any], variables: Any) -> list[Any]:
        return [empty_gradient(spec, variable) for spec, variable in zip(specs, variables)]

    def first(rows: Any) -> tuple[list[Any], Any]:
        optimizer, specs, variables = plan[0]
        return reduce_gradients(hvd, getattr(optimizer, _hvd.MARK), empties(specs, _known(optimizer, variables)), rows)

    def update(rows: Any, grads: list[Any]) -> None:
        optimizer, _, variables = plan[0]
        _updated(hvd, optimizer, grads, variables)
        with _step(rows):
            for optimizer, specs, variables in plan[1:]:
                optimizer.apply(empties(specs, _known(optimizer, variables)), variables)

    if _hvd.on_torch(hvd):
        import torch

        def torch_step() -> Any:
            with torch.no_grad():
                grads, total = first(0.0)
                if total > 0:
                    update(0.0, grads)
            return total

        return torch_step
    import tensorflow as tf

    def step() -> Any:
        with tf.device("/CPU:0"):
            rows = tf.cast(no_rows(), tf.float32)
        grads, total = first(rows)

        def train() -> Any:
            update(rows, grads)
            return tf.identity(total)

        return tf.cond(total > 0, train, lambda: tf.identity(total))

    return step if eager else tf.function(step, autograph=False).get_concrete_function()


def _known(optimizer: Any, variables: Any) -> Any:
    return variables if variables is not None else optimizer._trainable_variables
