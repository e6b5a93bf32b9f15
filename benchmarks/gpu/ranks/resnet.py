"""Trains ResNet-50 on images that lie on the device, and measures an allreduce: what one rank does of the scaling part.

resnet.py BATCH_SIZE PIXELS STEPS PRECISION MEGABYTES      rank 0 prints one line `RESULT {...}`
"""

import hashlib
import json
import sys
import time

import keras
import torch

import mlflow_batchai.training.horovod as hvd
from mlflow_batchai.training import _hvd, report

WARM_UP = 10  # steps, of which the first ones choose algorithms

batch_size, pixels, steps, precision, megabytes = (*map(int, sys.argv[1:4]), sys.argv[4], int(sys.argv[5]))
hvd.init()
gpu = torch.cuda.is_available()
if gpu:
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
device = "cuda" if gpu else "cpu"


def moment(model=None):
    """The time now, when the device has done what it was told to."""
    if model is not None:
        _hvd.sync(model)
        keras.ops.convert_to_numpy(model.weights[0])
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


class Timer(keras.callbacks.Callback):
    """Notes when the first step after the warm-up begins, and when the last has ended."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == min(WARM_UP, steps - 1):
            self.begun, self.first = moment(self.model), batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == steps - 1:
            self.seconds = moment(self.model) - self.begun


def endless():
    x = keras.random.uniform((batch_size, *shape))
    y = keras.random.randint((batch_size,), 0, 1000)
    while True:
        yield x, y


keras.utils.set_random_seed(1 + hvd.rank())
on_torch = keras.backend.backend() == "torch"
shape = (3, pixels, pixels) if on_torch else (pixels, pixels, 3)
keras.config.set_image_data_format("channels_first" if on_torch else "channels_last")
keras.config.set_dtype_policy(precision)
model = keras.applications.ResNet50(weights=None, input_shape=shape, classifier_activation=None)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
model.compile(optimizer, loss, jit_compile=False if on_torch else "auto")
timer = Timer()
calls = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), timer]
model.fit(endless(), steps_per_epoch=steps, epochs=1, verbose=0, callbacks=calls)
digest = hashlib.sha256(b"".join(value.tobytes() for value in _hvd.arrays(model.trainable_weights)))
sums = hvd.allgather_object(digest.hexdigest())

buffer = torch.ones(megabytes * 1024 * 1024 // 4, device=device)
times = []
for _ in range(8):
    begun = moment()
    buffer = _hvd.binding().allreduce(buffer, op=hvd.Average, name="buffer")
    times.append(moment() - begun)
seconds = min(hvd.allgather_object(sorted(times[2:])[3])) if hvd.size() > 1 else 0.0
bandwidth = megabytes / 1024 * 1.073741824 / seconds * 2 * (hvd.size() - 1) / hvd.size() if seconds else 0.0
rate = hvd.size() * batch_size * (steps - timer.first) / max(hvd.allgather_object(timer.seconds))
if hvd.rank() == 0:
    found = {
        "ranks": hvd.size(),
        "images_per_second": rate,
        "weights_equal": len(set(sums)) == 1,
        "allreduce_right": bool((buffer == 1).all()),
        "bus_gigabytes_per_second": bandwidth,
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "parameters": model.count_params(),
    }
    report.log(**{name: float(found[name]) for name in ("images_per_second", "bus_gigabytes_per_second", "weights_equal")})
    print("RESULT " + json.dumps(found), flush=True)
