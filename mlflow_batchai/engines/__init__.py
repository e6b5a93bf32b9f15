"""Engines: each starts one command on N nodes, and knows nothing of Horovod, metrics or success."""

from mlflow_batchai.engines.base import Engine, NodeCommand, Poll, PollState, StartRequest

__all__ = ["Engine", "NodeCommand", "Poll", "PollState", "StartRequest"]
