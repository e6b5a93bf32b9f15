"""The images to train on: CIFAR-10, an .npz of its layout, or scikit-learn's digits; and their batches."""

from __future__ import annotations

import contextlib
import io
import socket
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

SHAPE = (32, 32, 3)
CLASSES = 10
LARGEST_SHIFT = 3  # pixels: 10 % of 32
LAYOUT = ("x_train", "y_train", "x_test", "y_test")
DIGITS_FOR_TEST = 297  # of 1797
DOWNLOAD_STALL_SECONDS = 30.0
CACHED_NAME = "cifar10.npz"


class DataError(Exception):
    """The images can't be had; the message is one sentence for the user."""


class Images(NamedTuple):
    """Images to train and to test on, uint8 (n, 32, 32, 3), and their classes, uint8 (n,) from 0 to 9."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def shapes(train: int, test: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of the four arrays of so many images."""
    return (train, *SHAPE), (train,), (test, *SHAPE), (test,)


def load(source: str, cache: Path | None = None) -> Images:
    """Load `cifar10`, `digits` or the .npz file that `source` names.

    `cache` is a folder where the downloaded CIFAR-10 is kept as one file and looked for first.
    Raises DataError.
    """
    if source == "digits":
        return digits()
    if source == "cifar10":
        return cifar10(cache)
    return from_npz(Path(source))


def from_npz(path: Path) -> Images:
    """Read the four arrays that Keras' `cifar10.load_data()` returns. Raises DataError."""
    if not path.is_file():
        raise DataError(f"--data {path} is not a file: give cifar10, digits or the path of an .npz file.")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            missing = [name for name in LAYOUT if name not in arrays]
            if missing:
                raise DataError(f"{path} has no array {', '.join(missing)}: it needs {', '.join(LAYOUT)}.")
            x_train, y_train, x_test, y_test = (arrays[name] for name in LAYOUT)
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a whole .npz file of plain arrays ({error}).") from error
    return Images(
        *_checked(path, "train", x_train, y_train),
        *_checked(path, "test", x_test, y_test),
    )


def _checked(path: Path, split: str, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if x.shape[1:] != SHAPE or x.dtype != np.uint8:
        raise DataError(f"x_{split} in {path} is {x.dtype} of shape {x.shape}: it must be uint8 of shape (n, 32, 32, 3).")
    if y.shape not in ((len(x),), (len(x), 1)) or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"y_{split} in {path} is {y.dtype} of shape {y.shape}: it must be integers, ({len(x)}, 1).")
    if len(x) == 0 or y.min() < 0 or y.max() >= CLASSES:
        raise DataError(f"{split} in {path} must hold at least one image, of classes 0 to {CLASSES - 1}.")
    return x, y.reshape(-1).astype(np.uint8)


def digits() -> Images:
    """Scikit-learn's 1797 scanned digits (8x8 grey, in the package itself): 1500 to train, 297 to test.

    The split keeps each digit's share and is the same in every run.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise DataError("--data digits needs scikit-learn: pip install scikit-learn.") from error
    grey, classes = load_digits(return_X_y=True)
    images = enlarged(grey.reshape(-1, 8, 8) * (255 / 16))
    x_train, x_test, y_train, y_test = train_test_split(
        images, classes.astype(np.uint8), test_size=DIGITS_FOR_TEST, stratify=classes, random_state=0
    )
    return Images(x_train, y_train, x_test, y_test)


def enlarged(grey: np.ndarray) -> np.ndarray:
    """Scale (n, h, w) from 0 to 255 to uint8 (n, 32, 32, 3), linearly between pixel centres."""
    down, across = (_interpolation(size, SHAPE[0]) for size in grey.shape[1:])
    large = down @ grey @ across.T
    return np.repeat(np.rint(large).astype(np.uint8)[..., None], SHAPE[2], axis=-1)


def _interpolation(size: int, target: int) -> np.ndarray:
    """The matrix (target, size) of linear interpolation; the outermost pixels reach to the border."""
    at = np.clip((np.arange(target) + 0.5) * size / target - 0.5, 0, size - 1)
    return np.clip(1 - np.abs(at[:, None] - np.arange(size)), 0, 1)


def cifar10(cache: Path | None) -> Images:
    """CIFAR-10 from `cache`, else by Keras (its own folder, else its download), then kept in `cache`.

    Raises DataError, with the two other sources, if it can't be downloaded.
    """
    if cache is not None and (cache / CACHED_NAME).is_file():
        try:
            return from_npz(cache / CACHED_NAME)
        except DataError as error:
            print(f"The cached CIFAR-10 can't be used: {error}", flush=True)
    from keras.datasets import cifar10 as keras_cifar10

    print("Loading CIFAR-10 (a download of 170 MB the first time) ...", flush=True)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_STALL_SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # a progress bar of thousands of lines in a log
            (x_train, y_train), (x_test, y_test) = keras_cifar10.load_data()
    except Exception as error:  # Keras raises bare Exception for a failed download
        reason = " ".join(str(error).split())
        raise DataError(
            f"CIFAR-10 could not be downloaded ({reason}): use --data digits, which needs no network, or "
            f"--data with the path of an .npz file that holds {', '.join(LAYOUT)}."
        ) from error
    finally:
        socket.setdefaulttimeout(before)
    images = Images(x_train, y_train.reshape(-1), x_test, y_test.reshape(-1))
    if cache is not None:
        _keep(images, cache)
    return images


def _keep(images: Images, cache: Path) -> None:
    """Write the cache under a name of our own, then name it; a failure costs only the next download."""
    part = cache / f"{CACHED_NAME}.{uuid.uuid4().hex}.part"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.savez(file, **images._asdict())
        part.replace(cache / CACHED_NAME)
    except OSError as error:
        print(f"CIFAR-10 is not kept in {cache}: {error}.", flush=True)
        with contextlib.suppress(OSError):
            part.unlink()


def scaled(x: np.ndarray) -> np.ndarray:
    """What the network takes: float32 from 0 to 1."""
    return x.astype(np.float32) / np.float32(255)


def augmented(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Move each image by up to 3 pixels each way, repeating its border, and mirror about half of them."""
    count, height, width = x.shape[:3]
    moves = rng.integers(-LARGEST_SHIFT, LARGEST_SHIFT + 1, size=(2, count, 1))
    rows = np.clip(np.arange(height) + moves[0], 0, height - 1)
    columns = np.clip(np.arange(width) + moves[1], 0, width - 1)
    columns = np.where(rng.random((count, 1)) < 0.5, columns[:, ::-1], columns)
    return x[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


def batches(
    x: np.ndarray, y: np.ndarray, *, batch_size: int, augment: bool, seed: int, rank: int, epoch: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches without end: every epoch passes over `x` once, in another order, and leaves out what fills no batch.

    A last step on a few images would be a noisy one, and the epoch's validation would follow it at once: on two ranks of 64
    images a step, of whose last ones 16 were left, the accuracy was 0.775 so, and 0.793 without that step.
    Order and augmentation depend on (seed, rank, epoch) only: a resumed run sees what an unbroken one would.
    """
    while True:
        rng = np.random.default_rng((seed, rank, epoch))
        order = rng.permutation(len(x))
        for start in range(0, len(x) - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            images = augmented(x[chosen], rng) if augment else x[chosen]
            yield scaled(images), y[chosen]
        epoch += 1
