"""The person's front door, ``batchai``: one file a noun, each loaded only when it is asked for."""

from mlflow_batchai.cli.main import main

__all__ = ["main"]
