"""The container in which a job's processes on a node run, by docker, podman or Apptainer."""

from __future__ import annotations

from mlflow_batchai.agent.containers.engines import Engine, engine, has_one, missing, sweep

__all__ = ["Engine", "engine", "has_one", "missing", "sweep"]
