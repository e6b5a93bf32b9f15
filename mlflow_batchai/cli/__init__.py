"""The command ``batchai``: one file for each noun, loaded only when that noun is used."""

from mlflow_batchai.cli.main import main

__all__ = ["main"]
