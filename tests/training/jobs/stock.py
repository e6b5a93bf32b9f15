"""A script as users have it: stock Horovod with Keras 3, seeded; with an argument the broadcast that fails there."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow.keras as hvd
import keras
import numpy as np

hvd.init()
keras.utils.set_random_seed(1)
rng = np.random.default_rng(hvd.rank())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="first")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0) for _ in sys.argv[1:]]
model.fit(rng.normal(size=(16, 4)), rng.normal(size=(16, 3)), batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
print("trained to the end")
