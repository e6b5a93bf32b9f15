"""The images on a GPU: batches of the same distribution as those of `images`, made there by torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from images import LARGEST_SHIFT


def batches(
    x: np.ndarray,
    y: np.ndarray,
    *,
    batch_size: int,
    augment: bool,
    seed: int,
    rank: int,
    epoch: int = 0,
    device: str = "cuda",
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches without end, as `images.batches` makes them, but with torch's random numbers.

    All images lie on the device as bytes, twice: as they are, and as this epoch has them. A step costs two small
    operations and no copy to the device, and nothing waits for it.
    """
    images, classes = torch.from_numpy(np.ascontiguousarray(x)).to(device), torch.from_numpy(y).to(device).long()
    while True:
        generator = torch.Generator(device).manual_seed(int(np.random.default_rng((seed, rank, epoch)).integers(2**63)))
        order = torch.randperm(len(images), generator=generator, device=device)
        mixed = augmented(images, order, generator) if augment else images[order]
        for start in range(0, len(order) - batch_size + 1, batch_size):
            chosen = slice(start, start + batch_size)
            yield mixed[chosen].float().div_(255), classes[order[chosen]]
        epoch += 1


def augmented(x: torch.Tensor, order: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The images in this order, each moved by up to 3 pixels each way, its border repeated, and about half mirrored."""
    count, height, width = len(order), *x.shape[1:3]

    def random(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=x.device)

    moves = random(-LARGEST_SHIFT, LARGEST_SHIFT + 1, (2, count, 1))
    rows = (torch.arange(height, device=x.device) + moves[0]).clamp_(0, height - 1)
    columns = (torch.arange(width, device=x.device) + moves[1]).clamp_(0, width - 1)
    columns = torch.where(random(0, 2, (count, 1)) == 0, columns.flip(1), columns)
    return x[order[:, None, None], rows[:, :, None], columns[:, None, :]]
