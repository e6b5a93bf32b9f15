"""Trains, stops and goes on: rank 0 alone before Horovod starts, then two ranks; at last SIGTERM ends both while they train.

resume.py OUT EXAMPLE      OUT/<rank>.npz gets weights, OUT/<rank>.json everything else, OUT/term the last checkpoints

EXAMPLE is a script that lacks its model and data: the one of docs/reference.md.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import mlflow_batchai.training.horovod as hvd
from mlflow_batchai.training.checkpoints import Checkpoints

OUT, EXAMPLE = Path(sys.argv[1]), Path(sys.argv[2]).read_text()
FACTS, WEIGHTS = {}, {}
RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(40, 6)).astype("float32"), RNG.normal(size=(40, 2)).astype("float32")
BATCHES = 5  # an epoch


class Tell(keras.callbacks.Callback):
    """Sends this process SIGTERM within a batch."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.at, self.epoch = (epoch, batch), None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


class AtEpochEnd(keras.callbacks.Callback):
    """Does something when an epoch has ended."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def on_epoch_end(self, epoch, logs=None):
        self.what()


class Told(Exception):
    """What SIGTERM raises in a script that handles it."""


def net(seed, outputs=2):
    keras.utils.set_random_seed(seed)
    ranks = hvd.size() if hvd.is_initialized() else 1
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(outputs)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05 * ranks, momentum=0.9)), "mse")
    return model


def train(folder, epochs, seed=1, more=(), after=()):
    """Go on to so many epochs; the model, and what ``restore`` gave."""
    rank = hvd.rank() if hvd.is_initialized() else 0
    model, checkpoint = net(seed), hvd.callbacks.CheckpointCallback(OUT / folder, settings={"a": 1})
    first = checkpoint.restore(model)
    rows = slice(rank * 20, rank * 20 + 20)
    calls = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *more, checkpoint, *after]
    model.fit(X[rows], Y[rows], batch_size=4, shuffle=False, initial_epoch=first, epochs=epochs, verbose=0, callbacks=calls)
    return model, [first, checkpoint.worker_epochs]


def keep(name, model):
    for i, value in enumerate([*model.get_weights(), *hvd_state(model)]):
        WEIGHTS[f"{name}/{i}"] = value


def hvd_state(model):
    return [keras.ops.convert_to_numpy(variable) for variable in model.optimizer.variables]


def raising(number, frame):
    raise Told


def alone():
    """One process without Horovod: a SIGTERM of its own in the third epoch, which is trained again."""
    train("one", 2)
    signal.signal(signal.SIGTERM, raising)
    for again in range(2):
        try:
            train("one", 4, seed=5, after=[Tell(2, 1)])
        except Told:
            FACTS[f"told {again}"] = sorted(path.name for path in (OUT / "one").glob("*.json"))
    try:
        train("ended", 4, after=[AtEpochEnd(lambda: os.kill(os.getpid(), signal.SIGTERM))])
    except Told:
        FACTS["told at the end"] = sorted(path.name for path in (OUT / "ended").glob("*.json"))
    FACTS["handler"] = signal.getsignal(signal.SIGTERM) is raising and sys.excepthook is sys.__excepthook__
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    model, FACTS["alone"] = train("one", 3, seed=6)
    FACTS["alone iterations"] = int(model.optimizer.iterations)
    keep("one", model)
    shutil.copytree(OUT / "one", OUT / "to two")
    refused()


def refused():
    """A share that refuses, scripts that lack a line, and a checkpoint that a script has saved by itself."""
    _, FACTS["full"] = train("full", 2, more=[AtEpochEnd(lambda: (OUT / "full").touch())])
    checkpoint = hvd.callbacks.CheckpointCallback(OUT / "no share")
    FACTS["no restore"] = told(lambda: net(1).fit(X, Y, verbose=0, callbacks=[checkpoint]))
    FACTS["no Input"] = told(lambda: checkpoint.restore(keras.Sequential([keras.layers.Dense(2)])))
    FACTS["no folder"] = told(lambda: hvd.callbacks.CheckpointCallback(OUT / "full" / "a").restore(net(1)))
    Checkpoints(OUT / "plain").save(3, net(1).save_weights)
    checkpoint = hvd.callbacks.CheckpointCallback(OUT / "plain")
    FACTS["plain"] = [checkpoint.restore(net(2)), checkpoint.worker_epochs]


def told(what):
    try:
        what()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def patience():
    """Another rank than 0 that was told goes on for a minute."""
    signal.signal(signal.SIGTERM, raising)
    checkpoint = hvd.callbacks.CheckpointCallback(OUT / "patience")
    checkpoint.restore(net(1))
    checkpoint.on_train_begin()
    for seconds in (50, 70):
        checkpoint._told = time.monotonic() - seconds
        FACTS[f"told {seconds} s ago"] = told(lambda: checkpoint.on_train_batch_begin(1)) if hvd.rank() else None
    checkpoint._told = None
    checkpoint.on_train_end()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def together():
    """Two ranks: in one go and in two, from one rank's checkpoint, a damaged one, one that doesn't fit."""
    keep("unbroken", train("unbroken", 4)[0])
    train("two", 2)
    model, FACTS["two"] = train("two", 4, seed=7 + hvd.rank())
    keep("resumed", model)

    model, checkpoint = net(8 + hvd.rank()), hvd.callbacks.CheckpointCallback(OUT / "to two", settings={"a": 1})
    FACTS["to two"] = [checkpoint.restore(model), checkpoint.worker_epochs]
    keep("restored", model)
    model, FACTS["to two trained"] = train("to two", 4, seed=9 + hvd.rank())
    keep("to two", model)

    if hvd.rank() == 0:
        newest = OUT / "two" / "epoch-0004.weights.h5"
        newest.write_bytes(newest.read_bytes()[:-100])
    hvd.allreduce(0)
    FACTS["damaged"] = train("two", 4, seed=10)[1]
    try:
        hvd.callbacks.CheckpointCallback(OUT / "two", settings={"a": 1}).restore(net(1, outputs=3))
    except RuntimeError as error:
        FACTS["misfit"] = str(error)
    FACTS["done already"] = train("two", 4, seed=11)[1]


def documented():
    """The documentation's script, twice: as the first attempt and as one after all epochs."""
    os.environ["AZ_BATCHAI_OUTPUT_MODEL"] = str(OUT / "example")
    for attempt in range(2):
        names = {"keras": keras, "os": os, "model": net(20 + hvd.rank()), "loss": "mse", "x": X, "y": Y}
        exec(EXAMPLE, names)
        FACTS[f"example {attempt}"] = [names["done"], names["checkpoint"].worker_epochs]


if os.environ["HOROVOD_RANK"] == "0":
    alone()
hvd.init()
together()
patience()
documented()
np.savez(OUT / f"{hvd.rank()}.npz", **WEIGHTS)
(OUT / f"{hvd.rank()}.json").write_text(json.dumps(FACTS))
# Rank 1 is told earlier than rank 0, which saves; neither waits for the other.
train("term", 1000, after=[Tell(3, 1 if hvd.rank() else 3)])
