"""What both trainings share: arguments, images, and the digest of a model's weights."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np
import torch


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--images", type=int, default=2000)
    return parser.parse_args()


def images(source: str, count: int) -> torch.utils.data.TensorDataset:
    """Images (n, 3, 32, 32) from 0 to 1 and their classes: an .npz as Keras has CIFAR-10, or a pattern a class in noise."""
    if source != "synthetic":
        with np.load(Path(source)) as arrays:
            x, y = arrays["x_train"].transpose(0, 3, 1, 2) / np.float32(255), arrays["y_train"].reshape(-1)
    else:
        rng = np.random.default_rng(1)
        y = rng.integers(0, 10, count)
        x = (rng.random((10, 3, 32, 32))[y] * 0.5 + rng.random((count, 3, 32, 32)) * 0.5).astype(np.float32)
    return torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)))


def digest(model: torch.nn.Module) -> str:
    """Sixteen letters that are the same for the same weights."""
    found = hashlib.sha256()
    for weight in model.parameters():
        found.update(weight.detach().cpu().numpy().tobytes())
    return found.hexdigest()[:16]
