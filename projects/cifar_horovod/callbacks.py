"""What each rank does at the ends of an epoch besides what Horovod's callbacks do."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np


class OwnDropout(keras.callbacks.Callback):
    """Seed dropout by (seed, rank, epoch).

    So ranks, which get their weights from one seed, don't drop the same units, and a resumed run drops what an
    unbroken one would.
    """

    def __init__(self, seed: int, rank: int) -> None:
        super().__init__()
        self.seed = seed
        self.rank = rank
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if batch != 0:
            return
        rng = np.random.default_rng((self.seed, self.rank, self._epoch, 1))
        for layer in self.model.layers:
            if isinstance(layer, keras.layers.Dropout):
                state = layer.seed_generator.state
                state.assign(rng.integers(2**31, size=state.shape).astype(state.dtype))
        if keras.backend.backend() == "torch":  # dropout draws from torch's own generator, as does its data loader
            import torch

            torch.manual_seed(int(rng.integers(2**31)))


class EpochNumbers(keras.callbacks.Callback):
    """Add `learning_rate` and `images_per_second` to the epoch's logs, and weigh its validation.

    images_per_second counts the images of all ranks over the time of training, without validation. Each rank
    validates on its own share of the images. Shares may differ by one image: `validation_weight`, a rank's
    share of the images times the number of ranks, makes the plain average over ranks that follows exact.
    """

    def __init__(self, images: int, validation_weight: float) -> None:
        super().__init__()
        self.images = images
        self.validation_weight = validation_weight
        self._start = 0.0
        self._seconds = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._start = time.perf_counter()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        int(self.model.optimizer.iterations)  # a device may still compute: this waits for it
        self._seconds = time.perf_counter() - self._start

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert logs is not None
        for key in logs:
            if key.startswith("val_"):
                logs[key] *= self.validation_weight
        logs["learning_rate"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        logs["images_per_second"] = self.images / self._seconds
