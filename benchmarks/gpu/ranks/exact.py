"""Trains a network twice on the same batches, by recorded and by plain steps of Keras on PyTorch, and compares the weights.

exact.py STEPS      rank 0 prints one line `RESULT {...}`
"""

import json
import os
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not deterministic

import keras
import numpy as np
import torch
from keras import layers

import mlflow_batchai.training.horovod as hvd
from mlflow_batchai.training import _hvd, _torch_step

hvd.init()
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
torch.use_deterministic_algorithms(True)
# Shorter mantissas make a large difference of one in a last digit: 4e-9 after a step was 0.01 after 62.
torch.backends.cudnn.allow_tf32 = False
steps = int(sys.argv[1])
random = np.random.default_rng(hvd.rank())
images = random.random((32 * steps + 8, 16, 16, 3), np.float32)  # the last batch is a short one, run as it is
labels = random.integers(0, 10, len(images))
recorded = 0
record = _torch_step.Recording.__init__


def counting(self, step, data):
    global recorded
    record(self, step, data)
    recorded += 1


_torch_step.Recording.__init__ = counting


def weights(eagerly, optimizer):
    """The weights after two epochs."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(optimizer(0.01)), loss, metrics=["accuracy"], run_eagerly=eagerly, jit_compile=False)
    keras.utils.set_random_seed(2 + hvd.rank())
    calls = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(images, labels, batch_size=32, epochs=2, shuffle=False, verbose=0, callbacks=calls)
    return _hvd.arrays(model.weights)


differences = {}
for optimizer in (keras.optimizers.RMSprop, keras.optimizers.Adam, keras.optimizers.SGD):
    pairs = zip(weights(False, optimizer), weights(True, optimizer), strict=True)
    differences[optimizer.__name__] = max(float(np.abs(one - two).max()) for one, two in pairs)
found = {"ranks": hvd.size(), "recordings": recorded, "differences": differences}
if hvd.rank() == 0:
    print("RESULT " + json.dumps(found), flush=True)
