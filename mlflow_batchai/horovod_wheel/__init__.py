"""Build a Horovod wheel that works with today's TensorFlow or PyTorch.

Standard library only and Python 3.9 syntax: this folder also travels to nodes inside a zip.
"""

from __future__ import annotations

from .builder import build
from .interpreter import HorovodBuildError
from .source import HOROVOD_VERSION

__all__ = ["HOROVOD_VERSION", "HorovodBuildError", "build"]
