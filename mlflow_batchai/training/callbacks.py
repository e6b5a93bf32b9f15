"""Horovod's Keras callbacks for Keras 3, on all its backends, and CheckpointCallback."""

from __future__ import annotations

import math
from typing import Any, Callable

import keras

from mlflow_batchai.training import _hvd, _watch
from mlflow_batchai.training._checkpoint import CheckpointCallback

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "CheckpointCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Gives all ranks the root's weights and optimizer state when training begins, also after a restart.

    A model that Keras builds from its first batch only (a Sequential or subclassed model without an Input, on
    TensorFlow) is sent after that batch instead; build it first if the first step has to be exact.
    Seeds of dropout and the like are not sent, so that ranks may draw different numbers.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        del device
        self.root_rank = root_rank
        self.broadcast_done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Send the weights and the state, if the model has them by now."""
        if _watch.is_built(self.model):
            self._broadcast()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Send them after the first batch otherwise: before the second one, or at the end of the epoch (``_watch``).

        A callback that has ``on_train_batch_end`` would have Keras wait for every step's logs.
        """
        if batch > 0 and not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        self.broadcast_done = True
        hvd = _hvd.active()
        if hvd is None:
            return
        _hvd.sync(self.model)
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        state = optimizer.variables if optimizer is not None else []
        _hvd.broadcast_variables(hvd, [*self.model.weights, *state], self.root_rank, "weights")


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces the logs of every epoch by their plain mean over the ranks, in sorted order, for the callbacks after it.

    A metric that only some ranks have (validation on rank 0) is the mean over those, and is known to all.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        del device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        hvd = _hvd.active()
        if hvd is None or logs is None:
            return
        numbers = {key: float(value) for key, value in sorted(logs.items()) if not isinstance(value, str)}
        ranks = _hvd.gather_json(hvd, numbers, "metrics")
        for key in sorted(set().union(*ranks)):
            values = [one[key] for one in ranks if key in one]
            logs[key] = math.fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values)


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` from ``start_epoch`` up to before ``end_epoch``.

    ``multiplier`` is a function of the epoch (a fraction of it with ``staircase=False``, which sets the rate before
    every batch) or a number taken to the power of the epochs since ``start_epoch``. With ``momentum_correction`` the
    momentum of SGD and RMSprop is scaled as the rate changes (Goyal et al. 2017, remark 2); since Keras 3 compiles the
    momentum coefficient in, its buffers are scaled, which is the same.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._multiplier = multiplier
        self._epoch = 0

    def multiplier(self, epoch: float) -> float:
        if callable(self._multiplier):
            return self._multiplier(epoch)
        return float(self._multiplier ** (epoch - self.start_epoch))

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out the steps per epoch if they are needed; raise ValueError if they can't be known."""
        rate = getattr(_hvd.optimizer_core(self.model.optimizer), "_learning_rate", None)
        if not hasattr(rate, "assign"):
            raise ValueError(
                f"{type(self).__name__} can't set the learning rate, as the optimizer was made with a schedule: "
                "give the optimizer a number."
            )
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__} needs steps_per_epoch, as the length of this data is not known: "
                    "pass it to the callback."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate, before the first batch of an epoch only with ``staircase``."""
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if self.staircase:
            if batch == 0:
                self._set_rate(self._epoch)
        elif self.steps_per_epoch:
            self._set_rate(self._epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = self._rate()

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set_rate(self, epoch: float) -> None:
        _hvd.sync(self.model)
        optimizer = _hvd.optimizer_core(self.model.optimizer)
        old, new = self._rate(), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        if self.momentum_correction and old and new != old:
            _hvd.scale_momentum(optimizer, new / old)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate batch by batch from ``initial_lr / size`` to ``initial_lr`` over ``warmup_epochs``.

    ``initial_lr`` is the rate for all ranks together, usually the rate of one process times ``size()``.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._warmup,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def _warmup(self, epoch: float) -> float:
        size = _hvd.binding().size()
        done = epoch + 1.0 / (self.steps_per_epoch or 1)
        return float((done * (size - 1) / self.warmup_epochs + 1) / size)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose > 0 and _hvd.binding().rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")
