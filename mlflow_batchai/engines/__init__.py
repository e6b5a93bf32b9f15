"""Engines: each starts one command on N nodes, and knows nothing of Horovod, metrics or success."""

from mlflow_batchai.engines.base import CheckResult, Engine, NodeCommand, Poll, PollState, StartRequest

__all__ = ["CheckResult", "Engine", "NodeCommand", "Poll", "PollState", "StartRequest"]
