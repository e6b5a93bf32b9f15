"""mlflow-batchai: Batch AI jobs as an MLflow project backend.

Importing this package is free: the backend (and with it MLflow, 2 s and 170 MB) is loaded only when it is asked for.
The same file travels to the nodes, so it keeps to Python 3.8.
"""

__version__ = "0.1.0"
__all__ = ["BatchAIBackend", "__version__"]


def __getattr__(name: str) -> object:
    if name == "BatchAIBackend":
        from mlflow_batchai.backend import BatchAIBackend

        return BatchAIBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
