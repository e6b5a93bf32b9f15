"""Train the tutorial's network on CIFAR-10 (or digits), on as many ranks as Horovod was started with.

By hand, one process: `python train.py --data digits --epochs 2`;
two: `horovodrun -np 2 --gloo python train.py --data digits --epochs 4`.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import images
import numpy as np

MODEL_NAME = Path("saved_models", "keras_cifar10_trained_model.h5")
VALIDATION_BATCH = 256
QUIET_EXIT_SECONDS = 2.0
BACKENDS = ("default", "tensorflow", "torch", "jax")
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")


class OneSentenceParser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, on rank 0, and exits with 2."""

    def error(self, message: str) -> NoReturn:
        if (rank := int(os.environ.get("HOROVOD_RANK", "0"))) == 0:
            print(f"{self.prog}: {message}", file=sys.stderr, flush=True)
        let_rank_0_end_first(rank)
        sys.exit(2)


def let_rank_0_end_first(rank: int) -> None:
    """Wait a moment on the other ranks: the first one that fails is the one whose output gets shown."""
    if rank != 0:
        time.sleep(QUIET_EXIT_SECONDS)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments, checked. Exits with 2 and a sentence when one is wrong."""
    parser = OneSentenceParser(prog="train.py", description="Train a small network on images, with Horovod.")
    parser.add_argument(
        "--epochs",
        type=positive_int,
        default=100,
        help="of one worker: n ranks divide them, so each trains ceil(epochs / n): 6 of 12 on two ranks",
    )
    parser.add_argument("--batch-size", type=positive_int, default=32, help="images a rank and step")
    parser.add_argument("--learning-rate", type=positive_float, default=1e-4, help="times the number of ranks")
    parser.add_argument("--data", default="cifar10", help="cifar10, digits, or the path of an .npz like Keras' CIFAR-10")
    parser.add_argument("--augment", type=boolean, default=True, help="shift and mirror the images: true or false")
    parser.add_argument("--backend", choices=BACKENDS, default="default", help="of Keras (default: $KERAS_BACKEND)")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32", help="mixed ones reckon in halves, on GPUs")
    parser.add_argument("--seed", type=natural_int, default=1, help="of weights, order, augmentation and dropout")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(os.environ.get("AZ_BATCHAI_OUTPUT_MODEL") or "outputs"),
        help="folder of saved_models/ and checkpoints/ (default: $AZ_BATCHAI_OUTPUT_MODEL, else outputs)",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(cache) if (cache := os.environ.get("CIFAR_CACHE")) else None,
        help="folder that keeps the downloaded CIFAR-10 (default: $CIFAR_CACHE, else only Keras' own)",
    )
    return parser.parse_args(argv)


def positive_int(text: str) -> int:
    if (number := natural_int(text)) == 0:
        raise argparse.ArgumentTypeError("it must be 1 or more")
    return number


def natural_int(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 0:
        raise argparse.ArgumentTypeError(f"it must not be negative, and is {number}")
    return number


def positive_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"it must be a number above 0, and is {text}")
    return number


def boolean(text: str) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"it must be true or false, and is {text!r}")
    return words[text.lower()]


def share_threads() -> None:
    """Divide this machine's cores among its ranks, where whoever started us didn't."""
    ranks_here = int(os.environ.get("HOROVOD_LOCAL_SIZE", "1"))
    threads = max(1, len(os.sched_getaffinity(0)) // ranks_here)
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))


def main(argv: list[str] | None = None) -> int:
    """Train, save, test; returns the exit status. Only rank 0 speaks."""
    arguments = parse_arguments(argv)
    share_threads()
    if arguments.backend != "default":
        os.environ["KERAS_BACKEND"] = arguments.backend
    try:
        import keras

        import mlflow_batchai.training.horovod as hvd
        from mlflow_batchai.training import report

        hvd.init()
    except ImportError as error:
        print(f"train.py needs Keras, Horovod and mlflow_batchai: {error}", file=sys.stderr)
        return 1
    import callbacks as ours
    import network

    pin_gpu(keras.backend.backend(), hvd.local_rank())
    speaks = hvd.rank() == 0

    status, data = load_on_rank_0(arguments, hvd)
    if data is None:
        return status
    if speaks:
        print(f"{len(data.x_train)} train samples\n{len(data.x_test)} test samples", flush=True)

    keras.utils.set_random_seed(arguments.seed)
    keras.config.set_dtype_policy(arguments.precision)  # compile scales the loss where it has to be
    model = network.cifar10_cnn()
    model.compile(
        hvd.DistributedOptimizer(network.rmsprop(arguments.learning_rate * hvd.size())),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile="auto" if keras.backend.backend() == "jax" else False,  # Horovod has no XLA operation
    )

    checkpoint = hvd.callbacks.CheckpointCallback(arguments.output / "checkpoints", settings_of(arguments, data))
    first_epoch = checkpoint.restore(model)
    epochs_left = epochs_of_each(arguments.epochs - checkpoint.worker_epochs, hvd.size())
    total_epochs = first_epoch + epochs_left
    if speaks:
        more = " more" if first_epoch else ""
        whole = f"--epochs {arguments.epochs} is what one worker would train: " if hvd.size() > 1 else ""
        epochs = "epoch" if epochs_left == 1 else "epochs"
        ranks, each = ("1 rank trains", "") if hvd.size() == 1 else (f"{hvd.size()} ranks train", " each")
        print(f"{whole}{ranks} {epochs_left}{more} {epochs}{each}.", flush=True)

    steps = len(data.x_train) // arguments.batch_size
    share = slice(hvd.rank(), None, hvd.size())
    x_share, y_share = images.scaled(data.x_test[share]), data.y_test[share]
    weight = len(x_share) * hvd.size() / len(data.x_test)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        ours.OwnDropout(arguments.seed, hvd.rank()),
        ours.EpochNumbers(steps * arguments.batch_size * hvd.size(), weight),
        hvd.callbacks.MetricAverageCallback(),
    ]
    if speaks:
        callbacks.append(report.keras_callback())
    batches = batches_for(keras.backend.backend())
    model.fit(
        batches(
            data.x_train,
            data.y_train,
            batch_size=arguments.batch_size,
            augment=arguments.augment,
            seed=arguments.seed,
            rank=hvd.rank(),
            epoch=first_epoch,
        ),
        steps_per_epoch=steps,
        initial_epoch=first_epoch,
        epochs=total_epochs,
        validation_data=(x_share, y_share),
        validation_batch_size=VALIDATION_BATCH,
        shuffle=False,  # the batches come in their own order
        callbacks=[*callbacks, checkpoint],
        verbose=2 if speaks else 0,
    )

    scores = np.array(model.evaluate(x_share, y_share, batch_size=VALIDATION_BATCH, verbose=0)) * weight
    test_loss, test_accuracy = (float(score) for score in hvd.allreduce(scores))
    if speaks:
        path = arguments.output / MODEL_NAME
        save(model, path)
        if "BATCHAI_RANK" not in os.environ:  # by hand, the next training in this folder is a new one
            checkpoint.checkpoints.clear()
        print(f"Saved trained model at {path}")
        report.log(step=total_epochs - 1, test_loss=test_loss, test_accuracy=test_accuracy)
        report.model(path, model)
        print(f"Test loss: {test_loss:.4f}\nTest accuracy: {test_accuracy:.4f}", flush=True)
    return 0


def pin_gpu(backend: str, local_rank: int) -> None:
    """Give this rank one GPU of those it sees, if it sees any."""
    if backend == "tensorflow":
        import tensorflow as tf

        if gpus := tf.config.list_physical_devices("GPU"):
            mine = gpus[local_rank % len(gpus)]
            tf.config.set_visible_devices(mine, "GPU")
            tf.config.experimental.set_memory_growth(mine, True)
    elif backend == "torch":
        import torch

        if count := torch.cuda.device_count():
            torch.cuda.set_device(local_rank % count)
    elif backend == "jax":
        import jax

        devices = jax.local_devices()
        jax.config.update("jax_default_device", devices[local_rank % len(devices)])


def batches_for(backend: str) -> Callable[..., Iterator[Any]]:
    """What makes batches: JAX, or torch on this rank's GPU, where it trains with it; else NumPy."""
    if backend == "jax":
        import on_jax

        return on_jax.batches
    if backend == "torch":
        import torch

        if torch.cuda.is_available():
            import on_gpu

            return on_gpu.batches
    return images.batches


def load_on_rank_0(arguments: argparse.Namespace, hvd: Any) -> tuple[int, images.Images | None]:
    """Rank 0 loads, the others receive: one download, one sentence if it fails. Returns (status, images)."""
    status, data = 0, None
    if hvd.rank() == 0:
        try:
            data = images.load(arguments.data, arguments.cache)
            status = misfit(arguments, data, hvd.size())
        except images.DataError as error:
            print(f"train.py: {error}", file=sys.stderr)
            status = 1
    header = np.array([status, *((len(data.x_train), len(data.x_test)) if data else (0, 0))], np.int64)
    status, train, test = (int(number) for number in hvd.broadcast(header, 0))
    if status:
        let_rank_0_end_first(hvd.rank())
        return status, None
    if data is None:
        data = images.Images(*(np.zeros(shape, np.uint8) for shape in images.shapes(train, test)))
    return 0, images.Images(*(np.asarray(hvd.broadcast(array, 0)) for array in data))


def misfit(arguments: argparse.Namespace, data: images.Images, ranks: int) -> int:
    """0, or 2 after a sentence if the arguments don't suit the images."""
    train, test = len(data.x_train), len(data.x_test)
    if arguments.batch_size > train:
        said = f"--batch-size {arguments.batch_size} is more than the {train} training images"
    elif ranks > test:
        said = f"{ranks} ranks can't share {test} test images"
    else:
        return 0
    print(f"train.py: {said}", file=sys.stderr)
    return 2


def epochs_of_each(epochs: int, ranks: int) -> int:
    """How many epochs each of the ranks trains, of so many of one worker."""
    return max(0, math.ceil(epochs / ranks))


def settings_of(arguments: argparse.Namespace, data: images.Images) -> dict[str, Any]:
    """What must be equal for a run to go on from another's checkpoint."""
    return {
        "batch_size": arguments.batch_size,
        "learning_rate": arguments.learning_rate,
        "augment": arguments.augment,
        "precision": arguments.precision,
        "seed": arguments.seed,
        "classes_crc32": zlib.crc32(data.y_train),
    }


def save(model: Any, path: Path) -> None:
    """Save as .h5, the tutorial's format, without the warning in which Keras calls it legacy."""
    from mlflow_batchai.training.checkpoints import write_aside

    def other(record: logging.LogRecord) -> bool:
        return "saving your model as an HDF5 file" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(other)
    try:
        write_aside(path, model.save)
    finally:
        logger.removeFilter(other)


if __name__ == "__main__":
    sys.exit(main())
