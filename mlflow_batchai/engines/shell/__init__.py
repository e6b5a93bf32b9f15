"""Run commands: on this machine (``local``), or on nodes over SSH (``targets``, ``ssh``)."""

from mlflow_batchai.engines.shell.local import Result, run, spawn

__all__ = ["Result", "run", "spawn"]
