"""Makes one Keras 3 optimizer train on all ranks' gradients, exactly as one process on the joined batch would."""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any, Callable, Iterator

from mlflow_batchai.training import _gradients, _hvd, guard

_MARK = "_batchai_horovod"


class Settings:
    """How one optimizer reduces its gradients."""

    def __init__(self, op: Any, compression: Any, sparse_as_dense: bool) -> None:
        self.op = op
        self.compression = compression
        self.sparse_as_dense = sparse_as_dense


class _Step:
    """The train step that runs (or is traced) in this process: this rank's share of it, and what it applied."""

    share: Callable[[bool], Any] | None = None
    applied: list[tuple[Any, list[Any], Any]] | None = None


class _State:
    """What we remember of one model's train step, so that a rank without data can take part in it."""

    plan: list[tuple[Any, list[Any], Any]] | None = None
    idle: Callable[[], Any] | None = None
    idle_plan: Any = None


def distribute(optimizer: Any, settings: Settings) -> Any:
    """Wrap ``optimizer.apply`` on this instance and return the instance; its class stays Keras' own.

    The wrapper is a bound method, which a deep copy or a pickle binds to the copy.
    """
    setattr(optimizer, _MARK, settings)
    optimizer.apply = types.MethodType(_apply, optimizer)
    _patch_make_train_function()
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Say whether ``optimizer`` was wrapped here."""
    return hasattr(optimizer, _MARK)


def _apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    inner = type(self).apply
    hvd = _hvd.active()
    if hvd is None:
        return inner(self, grads, trainable_variables)
    grads = list(grads)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    settings = getattr(self, _MARK)
    if settings.sparse_as_dense:
        grads = [g if g is None or not _gradients.is_sparse(g) else _gradients.densify(g) for g in grads]
    if _Step.applied is not None:
        _Step.applied.append((self, [_gradients.spec(g) for g in grads], trainable_variables))
    weighted = settings.op != hvd.Sum
    if _Step.share is not None:
        share = _Step.share(weighted)
    else:
        share = 1.0 / hvd.size() if weighted else None
    return inner(self, _gradients.reduce(hvd, settings, grads, share), trainable_variables)


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
        if hvd is None or not concerns(self):
            return original(self, force)
        _lift_over_loss_scale(self)
        if not hasattr(self.train_step, "batchai"):
            self.train_step = _shared_step(self.train_step)
            force = True
        compiled = self.jit_compile
        if compiled:
            _hvd.notice(hvd, "the train step runs without jit_compile, as Horovod has no operation for XLA.")
            self.jit_compile = False
        try:
            return original(self, force)
        finally:
            if compiled:
                self.jit_compile = compiled

    make_train_function.batchai = True  # type: ignore[attr-defined]
    keras.Model.make_train_function = make_train_function
    guard.patch_fit(keras)


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
        distribute(outer, getattr(inner, _MARK))
        del inner.apply
        delattr(inner, _MARK)


def _shared_step(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a train step that first learns this rank's share of the joined batch (its rows over all rows)."""
    state = _State()

    def train_step(data: Any) -> Any:
        hvd = _hvd.active()
        if hvd is None:
            return inner(data)
        total, share = _share(hvd, _rows(data))
        with _step(share) as applied:
            result = inner(data)
        total()
        state.plan = applied
        return result

    train_step.batchai = state  # type: ignore[attr-defined]
    return train_step


@contextlib.contextmanager
def _step(share: Callable[[bool], Any]) -> Iterator[list[tuple[Any, list[Any], Any]]]:
    before = (_Step.share, _Step.applied)
    applied: list[tuple[Any, list[Any], Any]] = []
    _Step.share, _Step.applied = share, applied
    try:
        yield applied
    finally:
        _Step.share, _Step.applied = before


def _rows(data: Any) -> Any:
    """Return the number of rows of this rank's batch (as a tensor with TensorFlow), 1 if it can't be known."""
    import keras

    x = keras.utils.unpack_x_y_sample_weight(data)[0]
    first = next((leaf for leaf in keras.tree.flatten(x) if leaf is not None), None)
    if first is None or len(first.shape) == 0:
        return 1
    if keras.backend.backend() == "torch":
        return first.shape[0]
    import tensorflow as tf

    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    return tf.shape(first)[0]


def _share(hvd: Any, rows: Any) -> tuple[Callable[[], Any], Callable[[bool], Any]]:
    """Start adding up all ranks' rows; return functions for the sum, and for this rank's share of it.

    Where rows don't count (``op=hvd.Sum``) the share is 1, but made from the sum: TensorFlow drops an exchange that
    nothing depends on.
    """
    if hvd.__name__ == "horovod.torch":
        import torch

        handle = hvd.allreduce_async(torch.tensor(float(rows)), op=hvd.Sum, name="batchai_rows")
        sums: list[float] = []

        def total() -> float:
            if not sums:
                sums.append(float(hvd.synchronize(handle)))
            return sums[0]

        return total, lambda weighted: float(rows) / total() if weighted else 1.0
    import tensorflow as tf

    with tf.device("/CPU:0"):
        mine = tf.cast(rows + _gradients.none(), tf.float32)
        joined = hvd.allreduce(mine, op=hvd.Sum, name="batchai_rows", ignore_name_scope=True)
    return lambda: joined, lambda weighted: mine / joined if weighted else tf.minimum(joined, 1.0)


# --- ranks with fewer batches ---------------------------------------------------------------------------------------


def finish_epoch(model: Any, hvd: Any) -> None:
    """Take part, with no rows, in the steps that other ranks still have in this epoch; return when none has.

    So ranks may have different numbers of batches: a step counts the rows of the ranks that have one, and every
    rank makes every update. Costs two exchanges of a few numbers an epoch if all have the same.
    """
    state = getattr(model.train_step, "batchai", None)
    if state is None:
        return
    if state.idle is None or state.idle_plan is not state.plan:
        state.idle_plan = state.plan
        state.idle = _idle_step(hvd, state.plan or [], bool(model.run_eagerly))
    while float(state.idle()) > 0:
        if not state.plan:
            raise RuntimeError(
                f"Rank {hvd.rank()} had no batch at all while other ranks train: give every rank some of the data."
            )
    _agree_on_counters(hvd, [optimizer for optimizer, _, _ in state.plan or []])


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
    def updates() -> None:
        for optimizer, specs, variables in plan:
            known = variables if variables is not None else optimizer._trainable_variables
            grads = [_gradients.empty(spec, variable) for spec, variable in zip(specs, known)]
            optimizer.apply(grads, variables)

    if hvd.__name__ == "horovod.torch":
        import torch

        def torch_step() -> Any:
            total, share = _share(hvd, 0)
            if total() > 0:
                with torch.no_grad(), _step(share):
                    updates()
            return total()

        return torch_step
    import tensorflow as tf

    def step() -> Any:
        total, share = _share(hvd, 0)

        def train() -> Any:
            with _step(share):
                updates()
            return tf.identity(total())

        return tf.cond(total() > 0, train, lambda: tf.identity(total()))

    return step if eager else tf.function(step, autograph=False)  # type: ignore[no-any-return]
