"""File shares: their interface, its implementations, and functions over it."""

from mlflow_batchai.storage.base import Entry, Share, job_file
from mlflow_batchai.storage.opening import open_share

__all__ = ["Entry", "Share", "job_file", "open_share"]
