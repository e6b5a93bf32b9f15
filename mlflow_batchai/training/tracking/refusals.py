"""What can't be done from a node is refused, in a sentence instead of a page of MLflow's own calls."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import mlflow
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.abstract_store import AbstractStore

_OURS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (mlflow.__file__, os.path.dirname(os.path.abspath(__file__)))
)


class RefusedError(MlflowException):
    """A call that no node can answer. A script that doesn't catch it ends with one line."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        _install_hook()


def _install_hook() -> None:
    before = sys.excepthook
    if getattr(before, "batchai", False):
        return

    def hook(kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, RefusedError):
            sys.stderr.write(f"{_where(trace)}mlflow: {error.message}\n")
        else:
            before(kind, error, trace)

    hook.batchai = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _where(trace: Any) -> str:
    """The line of the script that has called MLflow."""
    called = ""
    for frame in traceback.extract_tb(trace):
        if os.path.abspath(frame.filename).startswith(_OURS):
            break
        called = f"{frame.filename}:{frame.lineno}: "
    return called


# What AbstractStore itself makes of the calls that a store answers.
_INHERITED = frozenset(
    [
        "end_async_logging",
        "flush_async_logging",
        "log_batch_async",
        "log_metric",
        "log_metric_async",
        "log_param",
        "log_param_async",
        "search_runs",
        "set_tag",
        "set_tag_async",
        "shut_down_async_logging",
        "supports_trace_archival",
        "supports_workspaces",
    ]
)


def _refusing(name: str) -> Any:
    def refuse(self: Any, *arguments: Any, **options: Any) -> Any:
        raise RefusedError(
            f"{name} can't be done from a node, which has no tracking server: a script there writes to its job's run only;"
            " do it where the server is, with MLflow's client"
        )

    return refuse


# A store that refuses every call but those.
Refusing: Any = type(
    "Refusing",
    (AbstractStore,),
    {
        name: _refusing(name)
        for name in dir(AbstractStore)
        if callable(getattr(AbstractStore, name)) and not name.startswith("_") and name not in _INHERITED
    },
)
