"""Trains a network on random images that lie on the device in several ways, and measures an allreduce.

speed.py NETWORK WAYS BATCH_SIZE PIXELS STEPS PRECISION MEGABYTES      rank 0 prints one line `RESULT {...}`

NETWORK is resnet50 or the tutorial's, cifar10. WAYS are some of, by commas: `keras` (Keras' own `fit` with its own optimizer),
`horovod` (ours), `exchange` (ours, which exchanges although there is one rank), `pytorch` (PyTorch without Keras).
"""

import contextlib
import hashlib
import json
import os
import sys
import time

import keras
import torch
from keras import layers

import mlflow_batchai.training.horovod as hvd
from mlflow_batchai.training import _hvd, report

WARM_UP = 10  # steps, of which the first ones choose algorithms

network, ways = sys.argv[1], sys.argv[2].split(",")
batch_size, pixels, steps, precision, megabytes = (*map(int, sys.argv[3:6]), sys.argv[6], int(sys.argv[7]))
hvd.init()
gpu = torch.cuda.is_available()
if gpu:
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
device = "cuda" if gpu else "cpu"
on_torch = keras.backend.backend() == "torch"
first = network == "resnet50" and (on_torch or ways == ["pytorch"])
shape = (3, pixels, pixels) if first else (pixels, pixels, 3)
classes = 1000 if network == "resnet50" else 10


def moment(model=None):
    """The time now, when the device has done what it was told to."""
    if model is not None:
        _hvd.sync(model)
        keras.ops.convert_to_numpy(model.weights[0])
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


class Timer(keras.callbacks.Callback):
    """Notes when the first step after the warm-up begins, and when the last has ended; both with the CPU's seconds."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == min(WARM_UP, steps - 1):
            self.begun, self.first, self.cpu = moment(self.model), batch, sum(os.times()[:2])

    def on_train_batch_end(self, batch, logs=None):
        if batch == steps - 1:
            self.seconds = moment(self.model) - self.begun
            self.cpu = sum(os.times()[:2]) - self.cpu


def endless(x, y):
    while True:
        yield x, y


def of_keras():
    """The network, without its softmax."""
    if network == "resnet50":
        return keras.applications.ResNet50(weights=None, input_shape=shape, classifier_activation=None)
    convolution = {"kernel_size": 3, "activation": "relu"}
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(32, padding="same", **convolution),
            layers.Conv2D(32, **convolution),
            layers.MaxPooling2D(2),
            layers.Dropout(0.25),
            layers.Conv2D(64, padding="same", **convolution),
            layers.Conv2D(64, **convolution),
            layers.MaxPooling2D(2),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(512, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(classes, dtype="float32"),
        ]
    )


def of_pytorch():
    """The same network of PyTorch's own modules, in the memory format that is fastest there."""
    from torch import nn

    if network == "resnet50":
        import torchvision

        return torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(64 * ((pixels // 2 - 1) // 2 - 1) ** 2, 512), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(512, classes),
    ).to(device, memory_format=torch.channels_last)


def fit(way):
    """Train by Keras; the timer and the model."""
    keras.utils.set_random_seed(1 + hvd.rank())
    model = of_keras()
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9) if network == "resnet50" else keras.optimizers.RMSprop(1e-4)
    calls = [timer := Timer()]
    if way != "keras":
        optimizer = hvd.DistributedOptimizer(optimizer)
        calls.insert(0, hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False if on_torch else "auto")
    x, y = keras.random.uniform((batch_size, *shape)), keras.random.randint((batch_size,), 0, classes)
    model.fit(endless(x, y), steps_per_epoch=steps, epochs=1, verbose=0, callbacks=calls)
    return timer, model


def loop():
    """Train by PyTorch's own loop; the timer."""
    model, timer = of_pytorch(), Timer()
    optimizer = torch.optim.SGD if network == "resnet50" else torch.optim.RMSprop
    optimizer = optimizer(model.parameters(), 0.001, momentum=0.9 if network == "resnet50" else 0.0)
    halves = torch.autocast(device, torch.bfloat16) if precision == "mixed_bfloat16" else contextlib.nullcontext()
    x = torch.rand((batch_size, 3, pixels, pixels), device=device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, classes, (batch_size,), device=device)
    for batch in range(steps):
        timer.on_train_batch_begin(batch)
        optimizer.zero_grad()
        with halves:
            loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        timer.on_train_batch_end(batch)
    return timer


keras.config.set_image_data_format("channels_first" if first else "channels_last")
keras.config.set_dtype_policy(precision)
active, rates, cores, sums = _hvd.active, {}, {}, set()
for way in ways:
    if way == "pytorch":
        timer = loop()
    else:
        _hvd.active = _hvd.binding if way == "exchange" else active
        timer, model = fit(way)
        digest = hashlib.sha256(b"".join(value.tobytes() for value in _hvd.arrays(model.trainable_weights)))
        sums |= set(hvd.allgather_object(digest.hexdigest())) if way != "keras" and hvd.size() > 1 else set()
        del model
    rates[way] = hvd.size() * batch_size * (steps - timer.first) / max(hvd.allgather_object(timer.seconds))
    cores[way] = timer.cpu / timer.seconds
_hvd.active = active

bandwidth, right = 0.0, None
if megabytes and hvd.size() > 1:
    buffer = torch.ones(megabytes * 1024 * 1024 // 4, device=device)
    times = []
    for _ in range(8):
        begun = moment()
        buffer = _hvd.binding().allreduce(buffer, op=hvd.Average, name="buffer")
        times.append(moment() - begun)
    seconds = min(hvd.allgather_object(sorted(times[2:])[3]))
    bandwidth = megabytes / 1024 * 1.073741824 / seconds * 2 * (hvd.size() - 1) / hvd.size()
    right = bool((buffer == 1).all())
if hvd.rank() == 0:
    found = {
        "ranks": hvd.size(),
        "images_per_second": rates,
        "cores": cores,
        "weights_equal": len(sums) == 1 if hvd.size() > 1 else None,
        "allreduce_right": right,
        "bus_gigabytes_per_second": bandwidth,
        "device": torch.cuda.get_device_name() if gpu else "cpu",
    }
    report.log(**{f"images_per_second_{way}": rate for way, rate in rates.items()})
    print("RESULT " + json.dumps(found), flush=True)
