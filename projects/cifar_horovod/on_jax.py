"""The images on JAX's device: batches of the same distribution as those of `images`, made there, several in a compiled call."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from images import LARGEST_SHIFT

AT_ONCE = 16  # batches that one call makes: the call takes as long as a small network's step


def batches(
    x: np.ndarray, y: np.ndarray, *, batch_size: int, augment: bool, seed: int, rank: int, epoch: int = 0
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Batches without end, as `images.batches` makes them, but with JAX's random numbers.

    All images lie on the device as bytes, twice: as they are, and as this epoch has them.
    """
    images, classes = jnp.asarray(x), jnp.asarray(y, jnp.int32)
    while True:
        key = jax.random.key(int(np.random.default_rng((seed, rank, epoch)).integers(2**31)))
        mixed, targets = _shuffled(images, classes, key, augment)
        whole = len(x) // batch_size
        for first in range(0, whole, AT_ONCE):
            yield from _batches(mixed, targets, first * batch_size, batch_size, min(AT_ONCE, whole - first))
        epoch += 1


@functools.partial(jax.jit, static_argnums=3)
def _shuffled(images: jax.Array, classes: jax.Array, key: jax.Array, augment: bool) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(key)
    order = jax.random.permutation(keys[0], len(images))
    return augmented(images, order, keys[1]) if augment else images[order], classes[order]


@functools.partial(jax.jit, static_argnums=(3, 4))
def _batches(mixed: jax.Array, targets: jax.Array, start: int, size: int, count: int) -> list[tuple[jax.Array, jax.Array]]:
    images = jax.lax.dynamic_slice_in_dim(mixed, start, size * count).astype(jnp.float32) / 255
    classes = jax.lax.dynamic_slice_in_dim(targets, start, size * count)
    return list(zip(jnp.split(images, count), jnp.split(classes, count), strict=True))


def augmented(x: jax.Array, order: jax.Array, key: jax.Array) -> jax.Array:
    """The images in this order, each moved by up to 3 pixels each way, its border repeated, and about half mirrored."""
    count, height, width = len(order), *x.shape[1:3]
    keys = jax.random.split(key)
    moves = jax.random.randint(keys[0], (2, count, 1), -LARGEST_SHIFT, LARGEST_SHIFT + 1)
    rows = jnp.clip(jnp.arange(height) + moves[0], 0, height - 1)
    columns = jnp.clip(jnp.arange(width) + moves[1], 0, width - 1)
    columns = jnp.where(jax.random.bernoulli(keys[1], shape=(count, 1)), columns[:, ::-1], columns)
    return x[order[:, None, None], rows[:, :, None], columns[:, None, :]]
