"""Trains small models: as one of several ranks on its own batches, or alone on the joined batches; writes what came out.

exact.py OUT            OUT/<rank or alone>.npz gets every case's weights, OUT/<rank or alone>.json everything else
exact.py OUT CASE ...   these cases' weights only; of four ranks each has half of what one of two would have
"""

import copy
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np

OUT = Path(sys.argv[1])
RANKS = "HOROVOD_SIZE" in os.environ
FACTS = {}

if RANKS:
    import mlflow_batchai.training.horovod as hvd

    FACTS["imported nothing"] = not {"keras", "tensorflow", "torch", "mlflow"} & set(sys.modules)
    hvd.init()
    RANK, SIZE, WHO = hvd.rank(), hvd.size(), str(hvd.rank())
else:
    RANK, SIZE, WHO = 0, 1, "alone"

import keras  # noqa: E402

BACKEND = keras.backend.backend()
APPLY = "stateless_apply" if BACKEND == "jax" else "apply"
RNG = np.random.default_rng(3)
X = RNG.normal(size=(40, 6)).astype("float32")
Y = RNG.normal(size=(40, 2)).astype("float32")
OVERFLOWING = np.concatenate([X[:19], X[19:20] * 1e5, X[20:]])
IDS = RNG.integers(0, 9, size=(40, 3)).astype("int32")

# (rows of rank 0, rows of rank 1) step by step; None = the rank has no batch any more in this epoch
EQUAL = [((0, 4), (4, 8)), ((8, 12), (12, 16)), ((16, 20), (20, 24))]
LAST_SHORT = [((0, 6), (6, 12)), ((12, 18), (18, 24)), ((24, 30), (30, 31))]
UNEVEN = [((0, 6), (6, 12)), ((12, 18), (18, 20)), ((20, 23), None)]


def dense_net(*more):
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), *more, keras.layers.Dense(2, kernel_regularizer="l2")]
    )


def embedding_net():
    return keras.Sequential(
        [keras.Input((3,), dtype="int32"), keras.layers.Embedding(9, 4), keras.layers.Flatten(), keras.layers.Dense(2)]
    )


class Unused(keras.layers.Layer):
    """A layer with a weight that no output depends on, so that its gradient is None."""

    def build(self, shape):
        self.unused = self.add_weight(shape=(3,), initializer="ones")

    def call(self, x):
        return x


def sgd(**more):
    return keras.optimizers.SGD(0.1, momentum=0.9, **more)


def mixed_net():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        halves = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(4)]
        return keras.Sequential([keras.Input((6,)), *halves, keras.layers.Dense(2, dtype="float32")])
    finally:
        keras.config.set_dtype_policy("float32")


def loss_scaled(wrap):
    return keras.optimizers.LossScaleOptimizer(wrap(sgd()), initial_scale=8.0, dynamic_growth_steps=2)


# name -> (model, optimizer (given a wrapper for it), steps, data, compile arguments)
CASES = {
    "sgd": (dense_net, lambda w: w(sgd()), EQUAL, X, {"jit_compile": True}),
    "rmsprop": (dense_net, lambda w: w(keras.optimizers.RMSprop(0.01)), LAST_SHORT, X, {"jit_compile": "auto"}),
    "uneven steps": (dense_net, lambda w: w(keras.optimizers.Adam(0.01, weight_decay=0.01)), UNEVEN, X, {}),
    "none, global clip": (
        lambda: dense_net(Unused()),
        lambda w: w(sgd(global_clipnorm=0.05, nesterov=True)),
        LAST_SHORT,
        X,
        {},
    ),
    "rows, clip": (embedding_net, lambda w: w(sgd(clipnorm=0.1)), UNEVEN, IDS, {}),
    "accumulate, average": (
        dense_net,
        lambda w: w(keras.optimizers.Adam(0.01, clipvalue=0.3, gradient_accumulation_steps=2, use_ema=True)),
        LAST_SHORT,
        X,
        {},
    ),
    "loss scale": (dense_net, loss_scaled, UNEVEN, X, {}),
    # compile scales the loss by itself. Rank 1's rows of one step are too large for halves: all skip it, and halve the scale.
    # A small loss, since half a batch has larger gradients than the whole one, and with JAX's weights overflows where that doesn't.
    "half precision": (mixed_net, lambda w: w(sgd()), UNEVEN, OVERFLOWING, {"loss_weights": [0.1]}),
    "sum": (embedding_net, lambda w: w(sgd(), op=True), UNEVEN, IDS, {"loss": keras.losses.MeanSquaredError(reduction="sum")}),
    "eager": (dense_net, lambda w: w(sgd()), UNEVEN, X, {"run_eagerly": True}),
    "halves": (dense_net, lambda w: w(sgd(), compression=True), EQUAL, X, {}),
    "batch norm": (lambda: dense_net(keras.layers.BatchNormalization()), lambda w: w(sgd()), EQUAL, X, {}),
}


def wrap(optimizer, op=None, compression=None):
    if not RANKS:
        return optimizer
    return hvd.DistributedOptimizer(
        optimizer, op=hvd.Sum if op else None, compression=hvd.Compression.fp16 if compression else None
    )


def joined(steps, data):
    for parts in steps:
        rows = np.concatenate([np.arange(*part) for part in parts if part is not None])
        yield data[rows], Y[rows]


def parts_of(steps):
    """The rows of this rank, step by step."""
    parts = [pair[RANK * 2 // SIZE] for pair in steps if pair[RANK * 2 // SIZE] is not None]
    if SIZE == 4:
        middles = [(low + high) // 2 for low, high in parts]
        halves = [(m, high) if RANK % 2 else (low, m) for (low, high), m in zip(parts, middles, strict=True)]
        parts = [(low, high) for low, high in halves if low < high]
    return parts


def own(steps, data):
    parts = parts_of(steps)
    while True:
        for low, high in parts:
            yield data[low:high], Y[low:high]


def train(name, epochs=2):
    net, optimizer, steps, data, options = CASES[name]
    keras.utils.set_random_seed(11 + RANK)  # ranks start apart: the broadcast has to mend it
    model = net()
    model.compile(optimizer(wrap), **{"loss": keras.losses.MeanSquaredError(), **options})
    if RANKS:
        count = len(parts_of(steps))
        calls = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        model.fit(own(steps, data), steps_per_epoch=count, epochs=epochs, verbose=0, callbacks=calls)
    elif name == "batch norm":
        by_halves(model, steps, data, epochs)
    else:
        if not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
            model.jit_compile = False
        for _ in range(epochs):
            for x, y in joined(steps, data):
                model.train_on_batch(x, y)
        model.optimizer.finalize_variable_values(model.trainable_variables)
    return model


def gradients(model, x, y):
    """Of the mean squared error and what the layers add to it."""

    def loss():
        return keras.ops.mean((model(x, training=True) - keras.ops.convert_to_tensor(y)) ** 2) + sum(model.losses)

    if BACKEND == "torch":
        model.zero_grad()
        loss().backward()
        return [variable.value.grad.clone() for variable in model.trainable_variables]
    import tensorflow as tf

    with tf.GradientTape() as tape:
        value = loss()
    return tape.gradient(value, model.trainable_variables)


def by_halves(model, steps, data, epochs):
    """What several ranks do by design: each half is normalised by itself; gradients and statistics are averaged."""
    other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    for _ in range(epochs):
        for parts in steps:
            grads = []
            for one, (low, high) in zip((model, other), parts, strict=True):
                grads.append(gradients(one, data[low:high], Y[low:high]))
            model.optimizer.apply([(a + b) / 2 for a, b in zip(*grads, strict=True)], model.trainable_variables)
            for mine, its in zip(model.trainable_variables, other.trainable_variables, strict=True):
                its.assign(mine)
        for mine, its in zip(model.non_trainable_variables, other.non_trainable_variables, strict=True):
            mine.assign((mine + its) / 2)
            its.assign(mine)


def main():
    weights = {}
    for name in sys.argv[2:] or CASES:
        if BACKEND == "jax" and name == "batch norm":
            continue
        model = train(name)
        for i, value in enumerate(model.get_weights()):
            weights[f"{name}/{i}"] = value
        FACTS[f"{name}/iterations"] = int(model.optimizer.iterations)
    if RANKS and not sys.argv[2:]:
        saving(weights)
        talking()
        callbacks()
        refusing()
        FACTS["mlflow"] = "mlflow" in sys.modules
    np.savez(OUT / f"{WHO}.npz", **weights)
    (OUT / f"{WHO}.json").write_text(json.dumps(FACTS))


def saving(weights):
    """Saved files know nothing of us; a loaded model trains on with its state."""
    model = train("sgd", epochs=1)
    for suffix in ("keras", "h5"):  # the other way round Keras 3.15.1 writes the second with a default optimizer
        path = OUT / f"model-{RANK}.{suffix}"
        model.save(path)
        plain, ours = keras.models.load_model(path), hvd.load_model(path)
        FACTS[f"saved {suffix}"] = [
            type(plain.optimizer).__module__,
            type(plain.optimizer).__name__,
            int(plain.optimizer.iterations),
        ]
        FACTS[f"loaded {suffix}"] = [len(ours.optimizer.variables), int(ours.optimizer.iterations)]
        FACTS[f"plain {suffix}"] = APPLY not in vars(plain.optimizer) and APPLY in vars(ours.optimizer)
    ours = hvd.load_model(OUT / f"model-{RANK}.h5")
    ours.fit(own(EQUAL, X), steps_per_epoch=3, initial_epoch=1, epochs=2, verbose=0)
    for i, value in enumerate(ours.get_weights()):
        weights[f"resumed/{i}"] = value
    FACTS["copy"] = APPLY not in vars(copy.deepcopy(model.optimizer))


def talking():
    """The functions by which a script speaks to the other ranks."""
    FACTS["ranks"] = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    FACTS["allreduce"] = [float(hvd.allreduce(RANK)), float(hvd.allreduce([1.0, RANK], op=hvd.Sum)[1])]
    tensor = hvd.allreduce(keras.ops.ones((2,)))
    FACTS["tensor"] = bool(keras.ops.is_tensor(tensor))
    FACTS["allgather"] = hvd.allgather([RANK] * (RANK + 1)).tolist()
    FACTS["broadcast"] = list(range(10))[hvd.broadcast(RANK + 3, 1)]
    FACTS["objects"] = [hvd.broadcast_object({"a": RANK}, 1), hvd.allgather_object(RANK)]


def callbacks():
    """Warm-up, averages with a metric that one rank lacks, and one rank that wants to stop."""

    class Note(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.rates = []

        def on_train_batch_begin(self, batch, logs=None):
            if BACKEND == "jax":
                self.model.jax_state_sync()
            self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

        def on_epoch_end(self, epoch, logs=None):
            if RANK == 1:
                logs["only1"] = 5.0
            if RANK == 1 and epoch == 1:
                self.model.stop_training = True

    keras.utils.set_random_seed(1)
    model, note = dense_net(), Note()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.8, momentum=0.5)), loss="mse")
    calls = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2, verbose=1),
        note,
        hvd.callbacks.MetricAverageCallback(),
    ]
    data = X[RANK : RANK + 8], Y[RANK : RANK + 8]
    history = model.fit(*data, batch_size=4, epochs=5, verbose=0, callbacks=calls, validation_data=data).history
    FACTS["rates"], FACTS["history"] = note.rates, history
    FACTS["momentum"] = float(np.sum(keras.ops.convert_to_numpy(model.optimizer.momentums[0])))


def refusing():
    """What ends in one sentence."""

    def told(what):
        try:
            what()
        except Exception as error:
            return [type(error).__name__, str(error)]
        return None

    def fit(**more):
        keras.utils.set_random_seed(2 + RANK)
        model = dense_net()
        model.compile(hvd.DistributedOptimizer("sgd"), loss="mse")
        model.fit(X[:8], Y[:8], verbose=0, **more)

    calls = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if RANKS else []
    FACTS["no broadcast"] = told(fit)
    FACTS["epochs"] = told(lambda: fit(initial_epoch=RANK * 3, epochs=9, callbacks=calls))
    FACTS["not an optimizer"] = told(lambda: hvd.DistributedOptimizer(3))
    FACTS["passes"] = told(lambda: hvd.DistributedOptimizer("sgd", backward_passes_per_step=4))
    FACTS["unknown"] = told(lambda: hvd.DistributedOptimizer("sgd", num_groups=4))
    FACTS["global"] = told(lambda: hvd.broadcast_global_variables(0))
    if BACKEND == "jax":
        import jax

        optimizer, values = hvd.DistributedOptimizer("sgd"), [np.ones(2, "float32")]
        optimizer.build([keras.Variable(values[0])])
        state = [variable.value for variable in optimizer.variables]
        FACTS["in jit"] = told(lambda: jax.jit(optimizer.stateless_apply)(state, values, values))
        FACTS["own loop"] = np.asarray(optimizer.stateless_apply(state, [values[0] * RANK], values)[0][0]).tolist()
    os.environ["BATCHAI_WEIGHT_CHECK"] = "0"
    FACTS["opted out"] = told(fit)
    os.environ["BATCHAI_WEIGHT_CHECK"] = "maybe"
    FACTS["bad switch"] = told(fit)


main()
