"""File shares: one interface of eight methods, and functions over it."""

from mlflow_batchai.shares.base import Entry, Share
from mlflow_batchai.shares.opening import open_share

__all__ = ["Entry", "Share", "open_share"]
