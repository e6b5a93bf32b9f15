"""Callbacks for ``Model.fit`` on several ranks: end epochs together and compare the ranks' weights."""

from __future__ import annotations

import hashlib
from typing import Any

import keras

from mlflow_batchai.training import _hvd, _optimizer, _tensors, constants

_STOCK = (
    "With Keras 3 use mlflow_batchai.training.horovod in place of horovod.keras or horovod.tensorflow.keras, whose "
    "DistributedOptimizer does not reduce gradients there, with its callbacks.BroadcastGlobalVariablesCallback(0)."
)
_OURS = "Pass callbacks.BroadcastGlobalVariablesCallback(0) to fit, and change weights on all ranks or on none."


class RanksDisagreeError(RuntimeError):
    """The ranks were given different epochs and would wait for each other forever."""


def with_watch(model: Any, callbacks: Any) -> Any:
    """Return the callbacks of one ``fit`` with ours around them, or as they are if the ranks train on their own.

    They train together if the model's optimizer was wrapped by us or by stock Horovod, or if one of the callbacks
    is Horovod's. Ours are the first (so that a checkpoint sees the weights all ranks agree on) and the last (so that
    all ranks stop in the same epoch if a callback asked one of them to).
    """
    hvd = _hvd.active()
    if hvd is None:
        return callbacks
    given = list(keras.tree.flatten(getattr(callbacks, "callbacks", callbacks) or []))
    ours = _optimizer.concerns(model)
    stock = type(_hvd.optimizer_core(model.optimizer)).__module__.startswith("horovod.")
    if not ours and not stock and not any(_is_horovods(callback) for callback in given):
        return callbacks
    first, last = _First(hvd, ours, [callback for callback in given if hasattr(callback, "broadcast_done")]), _Last(hvd, ours)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        for callback in (first, last):
            callback.set_params(callbacks.params)
            callback.set_model(model)
        callbacks.callbacks[:] = [first, *callbacks.callbacks, last]
        return callbacks
    return [first, *given, last]


def _is_horovods(callback: Any) -> bool:
    modules = {kind.__module__ for kind in type(callback).__mro__}
    return any(m.startswith("horovod.") or m == "mlflow_batchai.training.callbacks" for m in modules)


class _First(keras.callbacks.Callback):  # type: ignore[misc]
    """Lets ranks with more batches finish, averages statistics, and compares weights, before any other callback."""

    def __init__(self, hvd: Any, ours: bool, broadcasts: list[Any]) -> None:
        super().__init__()
        self._hvd = hvd
        self._ours = ours
        self._broadcasts = broadcasts
        self._first_epoch = True
        self._open = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._open = True
        if not self._first_epoch:
            return
        self._first_epoch = False
        told = _hvd.gather_json(self._hvd, [epoch, self.params["epochs"]], "epochs")
        if any(one != told[0] for one in told):
            raise RanksDisagreeError(
                "The ranks would wait for each other for ever, as they train different epochs: {}. Give all ranks the "
                "same initial_epoch and epochs (for example hvd.broadcast(epoch, 0) after a restart).".format(
                    ", ".join(f"rank {r} from {a} to {b}" for r, (a, b) in enumerate(told))
                )
            )

    def on_test_begin(self, logs: Any = None) -> None:
        self._close()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._close()
        check_weights(self._hvd, self.model, self._ours, f"after epoch {epoch + 1}")

    def _close(self) -> None:
        """End the training part of an epoch: once, before validation if there is one."""
        if not self._open:
            return
        self._open = False
        for broadcast in self._broadcasts:
            broadcast.on_train_batch_begin(1)  # an epoch of one batch
        if self._ours:
            _optimizer.finish_epoch(self.model, self._hvd)
            _hvd.average_variables(self._hvd, self.model.non_trainable_weights)


class _Last(keras.callbacks.Callback):  # type: ignore[misc]
    """Compare the weights at the start, and stop all ranks when one was asked to."""

    def __init__(self, hvd: Any, ours: bool) -> None:
        super().__init__()
        self._hvd = hvd
        self._ours = ours

    def on_train_begin(self, logs: Any = None) -> None:
        if self._ours and is_built(self.model):
            check_weights(self._hvd, self.model, True, "before the first step")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        stops = _hvd.gather_json(self._hvd, bool(self.model.stop_training), "stop")
        self.model.stop_training = any(stops)


def is_built(model: Any) -> bool:
    return bool(model.built) and all(layer.built for layer in model._flatten_layers())


def check_weights(hvd: Any, model: Any, ours: bool, when: str) -> None:
    """Compare the weights of all ranks; raise RanksDivergedError on all of them if they differ.

    With our optimizer all weights are compared, else the trainable ones (whose statistics nobody averages). Ranks on
    unlike processors may differ by rounding: up to ``constants.tolerance()`` is mended from rank 0 with a notice.
    """
    allowed = constants.tolerance()
    if allowed is None:
        return
    variables = list(model.weights if ours else model.trainable_weights)
    sums = _hvd.gather_json(hvd, _checksum(hvd, variables), "checksum")
    if len(set(sums)) == 1:
        return
    difference, name = _largest_difference(hvd, variables, _hvd.arrays(variables))
    if difference > allowed:
        raise constants.diverged(when, sums, name, difference, _OURS if ours else _STOCK)
    if ours:
        _hvd.broadcast_variables(hvd, [*variables, *model.optimizer.variables], 0, "weights")
        _hvd.notice(hvd, f"weights differed by {difference:.2g} {when} (rounding), all took rank 0's.")


def _checksum(hvd: Any, variables: list[Any]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    if _hvd.keras_on("torch"):
        digest.update(_tensors.checksums(_tensors.of(variables)))  # reckoned where they are: they may be on a GPU, and many
    else:
        for variable in variables:
            digest.update(_hvd.arrays([variable])[0].tobytes())
    return digest.hexdigest()


def _largest_difference(hvd: Any, variables: list[Any], mine: list[Any]) -> Any:
    """Return (difference, variable path): the largest over ranks and variables, relative to rank 0's largest weight."""
    import numpy

    worst: tuple[float, str] = (0.0, "no variable")
    for variable, own, root in zip(variables, mine, _hvd.root_arrays(hvd, mine, 0, "compare", "weights")):
        if own.size == 0 or own.tobytes() == root.tobytes():
            continue
        a, b = own.astype(numpy.float64), root.astype(numpy.float64)
        with numpy.errstate(all="ignore"):
            value = float(numpy.max(numpy.abs(a - b)) / max(float(numpy.max(numpy.abs(b))), 1e-12))
        value = value if numpy.isfinite(value) else float("inf")
        if value > worst[0]:
            worst = (value, getattr(variable, "path", variable.name))
    return max(_hvd.gather_json(hvd, worst, "difference"), key=lambda pair: pair[0])
