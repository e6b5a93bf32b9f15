"""What can't be done from a node is refused, in a sentence instead of a page of MLflow's own calls."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import mlflow
from mlflow.exceptions import MlflowException

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
