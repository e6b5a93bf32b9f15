"""The probe that the benchmark trains both ways: a small Keras network with Horovod, its moments written to a file."""

import json
import os
import sys
import time

born = time.time()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402

import mlflow_batchai.training.horovod as hvd  # noqa: E402
from mlflow_batchai.training import report  # noqa: E402

marks, epochs, megabytes = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
hvd.init()
keras.utils.set_random_seed(1)
generator = np.random.default_rng(hvd.rank())
images = generator.random((2048, 16, 16, 3), dtype=np.float32)
labels = generator.integers(0, 10, 2048)
model = keras.Sequential(
    [
        keras.layers.Input((16, 16, 3)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        # One wide layer makes the saved file as large as asked for, at little cost in training.
        keras.layers.Dense(max(10, int(megabytes * 1e6 / 4 / 75)), activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "sparse_categorical_crossentropy", jit_compile=False)


class Moments(keras.callbacks.Callback):
    """Notes when the first step begins and the last epoch ends; reports as a user's script would."""

    def on_train_batch_begin(self, batch, logs=None):
        moments.setdefault("first_step", time.time())

    def on_epoch_end(self, epoch, logs=None):
        moments["trained"] = time.time()
        if hvd.rank() == 0:
            report.log(step=epoch, loss=logs["loss"])


moments = {"born": born}
model.fit(
    images,
    labels,
    batch_size=32,
    epochs=epochs,
    verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Moments()],
)
if hvd.rank() == 0:
    folder = os.environ.get("AZ_BATCHAI_OUTPUT_MODEL", os.path.dirname(marks))
    path = os.path.join(folder, "model.h5")
    model.save(path)
    report.model(path, model)
moments["end"] = time.time()
with open(f"{marks}.{hvd.rank()}", "w") as file:
    json.dump(moments, file)
