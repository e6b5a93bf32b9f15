"""The tutorial's script: a small convolutional network, trained on every node at once by Horovod.

It stands alone: no MLproject, no other file. On one's own machine: `python cifar_cnn_distributed.py --data digits --epochs 2`.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import keras
import numpy as np

# Both travel with the job: a node needs Horovod and its framework, and nothing of this package.
import mlflow_batchai.training.horovod as hvd
from mlflow_batchai.training import report


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=["cifar10", "digits"], default="cifar10", help="cifar10 is downloaded by Keras")
    parser.add_argument("--epochs", type=int, default=100, help="of one worker: each of n ranks trains a part of them")
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("AZ_BATCHAI_OUTPUT_MODEL") or "."))
    return parser.parse_args()


def load(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(images, labels) to train on and to test with; images are float32 from 0 to 1, (number, height, width, channels)."""
    if name == "cifar10":
        (x, y), (x_test, y_test) = keras.datasets.cifar10.load_data()
        return x.astype("float32") / 255, y[:, 0], x_test.astype("float32") / 255, y_test[:, 0]
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[..., None] / 16).astype("float32")
    return images[:1500], digits.target[:1500], images[1500:], digits.target[1500:]


def network(shape: tuple[int, ...]) -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input(shape),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Dropout(0.25),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    first = hvd.rank() == 0
    epochs = math.ceil(arguments.epochs / hvd.size())
    keras.utils.set_random_seed(1)
    x, y, x_test, y_test = load(arguments.data)
    if first:
        print(f"{len(x)} train samples, {len(x_test)} test samples; {hvd.size()} ranks train {epochs} epochs each", flush=True)

    model = network(x.shape[1:])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    model.fit(
        x[hvd.rank() :: hvd.size()],
        y[hvd.rank() :: hvd.size()],
        batch_size=arguments.batch_size,
        epochs=epochs,
        verbose=2 if first else 0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            report.keras_callback(),
        ],
    )
    if first:
        loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
        report.log(step=epochs, test_loss=loss, test_accuracy=accuracy)
        print(f"Test accuracy: {accuracy:.3f}", flush=True)
        path = arguments.output / "cifar_cnn.h5"
        path.parent.mkdir(parents=True, exist_ok=True)
        model.save(path)
        report.model(path, model)


if __name__ == "__main__":
    main()
