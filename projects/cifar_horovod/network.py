"""The tutorial's network and optimizer: Keras' cifar10_cnn example of 2018, in Keras 3."""

from __future__ import annotations

import keras
from keras import layers


def cifar10_cnn(shape: tuple[int, int, int] = (32, 32, 3), classes: int = 10) -> keras.Model:
    """Two blocks of two convolutions, then 512 units: 1,250,858 parameters. Takes float32 from 0 to 1."""
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Dropout(0.25),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(512, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(classes, activation="softmax", dtype="float32"),  # with halves too
        ],
        name="cifar10_cnn",
    )


def rmsprop(learning_rate: float) -> keras.optimizers.Optimizer:
    """RMSprop as `rmsprop(lr, decay=1e-6)` was in 2018.

    That decay is a schedule now. Keras added epsilon (1e-7) to the root then and adds it under the root now,
    hence its square.
    """
    schedule = keras.optimizers.schedules.InverseTimeDecay(learning_rate, decay_steps=1, decay_rate=1e-6)
    return keras.optimizers.RMSprop(schedule, epsilon=1e-14)
