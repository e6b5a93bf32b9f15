"""Keras callback that saves checkpoints and resumes from the newest, also with another number of ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import keras

from mlflow_batchai.training import _hvd, _watch
from mlflow_batchai.training.checkpoints import CheckpointError, Checkpoints, read_aside

# Nodes learn of an end one after the other: so long another rank than 0 trains on after SIGTERM.
PATIENCE_SECONDS = 60.0


class CheckpointCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps weights and optimizer after every epoch, and at SIGTERM; ``restore`` goes on from the newest.

        checkpoint = hvd.callbacks.CheckpointCallback(folder)
        first = checkpoint.restore(model)
        model.fit(..., initial_epoch=first, callbacks=[Broadcast..., MetricAverage..., report..., checkpoint])

    It belongs on every rank, after the callback that reports: then a step whose checkpoint exists was reported, and one
    that is trained again is reported again, of which the first value stands. Rank 0 alone writes.

    At SIGTERM rank 0 saves when the present batch has ended, and ends as it would have without this callback. The other
    ranks train on until the end of rank 0 ends them (or, where rank 0 was not told, for a minute): one that
    stopped at once could leave rank 0 in an allreduce that never ends. So nothing is exchanged for it, and a batch costs
    nothing more.

    An epoch that was interrupted is trained again as a whole, from the weights of the newest checkpoint. Not kept are
    what callbacks remember (EarlyStopping's patience) and the seeds of dropout; within an epoch the statistics of
    BatchNormalization are those of rank 0.

    Args:
        folder: on a share, so that the next attempt finds it on other nodes too.
        settings: anything JSON can hold; a checkpoint made under other settings is not gone on from, and is removed
            when the first one of these is saved.

    Attributes:
        worker_epochs: epochs trained so far times the ranks that trained them, for scripts whose ranks each pass over
            all of the data and divide the epochs among them.
    """

    def __init__(self, folder: Any, settings: Any = None) -> None:
        super().__init__()
        self.checkpoints = Checkpoints(folder, settings)
        self.worker_epochs = 0
        self._compiled_rate: float | None = None
        self._first_epoch = 0
        self._epoch = 0
        self._batches = 0
        self._batches_before = 0
        self._saved: str | None = None
        self._told: float | None = None
        self._before: tuple[Any, Any] | None = None

    def restore(self, model: Any) -> int:
        """Load the newest checkpoint into a compiled model, and return the number of epochs that are done (0: begins anew).

        Every rank calls it, before ``fit``; rank 0 reads, and BroadcastGlobalVariablesCallback gives the others its
        weights. The learning rate is the one that the checkpoint has, times this script's rate over the one it began with
        then: who multiplies the rate by ``size()`` gets the rate for the ranks of now. Momentum is scaled with it.

        Raises CheckpointError, on every rank, if a checkpoint doesn't fit the model or the share can't be read, ValueError
        if the model has no optimizer or no weights yet.
        """
        if getattr(model, "optimizer", None) is None or not _watch.is_built(model):
            raise ValueError("CheckpointCallback.restore: compile and build the model first (give it an Input, or call build).")
        hvd = _hvd.active()
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self._compiled_rate = _rate(model)
        told: dict[str, Any] = {}
        if hvd is None or hvd.rank() == 0:
            try:
                told = self._load(model)
            except (CheckpointError, OSError) as error:
                told = {"error": str(error)}
        if hvd is not None:
            told = _hvd.gather_json(hvd, told, "resume")[0]
        if "error" in told:
            raise CheckpointError(told["error"])
        self._first_epoch = int(told.get("epochs_done", 0))
        self._batches_before = int(told.get("batches", 0))
        self.worker_epochs = int(told.get("worker_epochs", 0))
        return self._first_epoch

    def _load(self, model: Any) -> dict[str, Any]:
        found = self.checkpoints.newest()
        if found is None:
            return {}
        try:
            with read_aside(found.path) as local:
                model.load_weights(local)
        except (ValueError, KeyError) as error:
            first_line = (str(error).splitlines() or [repr(error)])[0]
            raise CheckpointError(
                f"The checkpoint {found.path} doesn't fit this model ({first_line}): "
                "train the model that it was made of, or remove it to begin anew."
            ) from error
        # One that a script has saved by itself, with Checkpoints, is taken for one rank's.
        ranks, state = int(found.state.get("ranks", 1)), found.state
        _adapt_rate(model, state.get("learning_rate", 0.0), state.get("compiled_rate", 0.0), self._compiled_rate)
        inside = f" and {found.batches} batches of the next one" if found.batches else ""
        trained = f"{ranks} rank" + ("s" if ranks != 1 else "")
        name = os.path.basename(found.path)
        print(f"Resuming after epoch {found.epochs_done}{inside}, trained by {trained}, from {name}", flush=True)
        worker_epochs = state.get("worker_epochs", found.epochs_done)
        return {"epochs_done": found.epochs_done, "batches": found.batches, "worker_epochs": worker_epochs}

    def on_train_begin(self, logs: Any = None) -> None:
        """Take SIGTERM from now on; raise RuntimeError if ``restore`` was not called."""
        if self._compiled_rate is None:
            raise RuntimeError("CheckpointCallback: call restore(model) before fit, and give fit its result as initial_epoch.")
        self._told = None
        if threading.current_thread() is threading.main_thread():
            self._before = (signal.signal(signal.SIGTERM, self._take), sys.excepthook)
            sys.excepthook = self._end_by_exception

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._told is not None and _writes():
            self._end_saved()
        self._epoch, self._batches = epoch, 0
        if epoch != self._first_epoch:
            self._batches_before = 0

    # Begins, not ends: a callback that has ``on_train_batch_end`` would have Keras wait for every step's logs.

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._batches = batch
        self._save_if_told()

    def on_test_begin(self, logs: Any = None) -> None:
        """Count the epoch's last batch."""
        self._batches = max(self._batches + 1, self.params.get("steps") or 0)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._save_if_told()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save; if the share refuses, say so and train on."""
        self.worker_epochs += _ranks()
        self._batches = self._batches_before = 0
        if _writes():
            self._save(epoch + 1, 0)

    def on_train_end(self, logs: Any = None) -> None:
        """Leave SIGTERM to whoever had it before; one that came is given to him."""
        if self._told is not None:
            self._end()
        self._give_back()

    def _save_if_told(self) -> None:
        if self._told is None:
            return
        if _writes():
            self._save(self._epoch, self._batches_before + self._batches)
            self._end_saved()
        elif time.monotonic() - self._told > PATIENCE_SECONDS:
            self._end()

    def _save(self, epochs_done: int, batches: int) -> None:
        _hvd.sync(self.model)
        after = f"after epoch {epochs_done}" + (f" and {batches} batches" if batches else "")
        state = {
            "ranks": _ranks(),
            "worker_epochs": self.worker_epochs,
            "learning_rate": _rate(self.model),
            "compiled_rate": self._compiled_rate,
        }
        try:
            path = self.checkpoints.save(epochs_done, self.model.save_weights, batches, state)
        except OSError as error:
            print(f"No checkpoint {after}: {error}", flush=True)
            self._saved = None
        else:
            self._saved = f"{after} as {os.path.basename(path)}"

    def _take(self, number: int, frame: Any) -> None:
        if self._told is None:
            self._told = time.monotonic()

    def _end_saved(self) -> None:
        if self._saved:
            print(f"SIGTERM: saved {self._saved}", flush=True)
        self._end()

    def _end(self) -> None:
        """Let SIGTERM do what it would have done; it may be an end, an exception or nothing."""
        self._told = None
        self._give_back()
        sys.stdout.flush()
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGTERM)

    def _give_back(self) -> None:
        if self._before is not None:
            handler, hook = self._before
            self._before = None
            signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
            sys.excepthook = hook

    def _end_by_exception(self, kind: Any, error: Any, traceback: Any) -> None:
        """End a process that was asked to end: its exception says that another rank has ended before."""
        told, hook = self._told, self._before[1] if self._before else sys.__excepthook__
        self._give_back()
        if told is not None:
            self._end()
        hook(kind, error, traceback)


def _ranks() -> int:
    hvd = _hvd.active()
    return 1 if hvd is None else int(hvd.size())


def _writes() -> bool:
    hvd = _hvd.active()
    return hvd is None or hvd.rank() == 0


def _rate(model: Any) -> float:
    return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


def _adapt_rate(model: Any, saved: float, compiled_then: float, compiled_now: float | None) -> None:
    """Scale a loaded learning rate as the script's own has changed since; a schedule is this script's own already."""
    optimizer = _hvd.optimizer_core(model.optimizer)
    if compiled_now != compiled_then and compiled_then and hasattr(getattr(optimizer, "_learning_rate", None), "assign"):
        optimizer.learning_rate = saved * (compiled_now or 0.0) / compiled_then
    now = _rate(model)
    if saved and abs(now - saved) > 1e-6 * abs(saved):
        _hvd.scale_momentum(optimizer, now / saved)
