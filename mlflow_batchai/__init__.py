"""mlflow-batchai: Batch AI jobs as an MLflow project backend.

Importing this package is free: what needs MLflow (2 s and 170 MB) is loaded only when it is asked for.
The same file travels to the nodes, so it keeps to Python 3.9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow_batchai.api import attach, submit
    from mlflow_batchai.backend import BatchAIBackend
    from mlflow_batchai.client.submitted import SubmittedJob

__version__ = "0.1.0"
__all__ = ["BatchAIBackend", "SubmittedJob", "__version__", "attach", "submit"]

_MODULES = {"BatchAIBackend": "backend", "SubmittedJob": "client.submitted", "attach": "api", "submit": "api"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
