"""The job's run as the agent describes it to ranks, and which ranks' calls count."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

import mlflow
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.abstract_store import AbstractStore

from mlflow_batchai.training import report
from mlflow_batchai.training.constants import FACTS, TRACKING_URI

_OURS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (mlflow.__file__, os.path.dirname(os.path.abspath(__file__)))
)

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


class JobRun(NamedTuple):
    """The job's run as a rank knows it.

    Attributes:
        run_id: MLflow's, as are ``name``, ``experiment_id`` and ``experiment``.
        params: the run's, when it was made.
        started: milliseconds since the epoch.
        artifacts: the folder on the share that artifacts are put into.
        bits: what other users may do with them (group and world bits).
        heard: whether what this rank says reaches the run.
    """

    run_id: str
    name: str
    experiment_id: str
    experiment: str
    params: Mapping[str, str]
    started: int
    artifacts: str
    bits: int
    rank: int
    heard: bool

    @property
    def prefix(self) -> str:
        """Prefix of this rank's params, tags and artifacts in the run."""
        return f"rank_{self.rank}/" if self.rank else ""

    @property
    def uri(self) -> str:
        return f"{TRACKING_URI}/run/{self.prefix}".rstrip("/")

    def model_uri(self, model_id: str) -> str:
        return f"{TRACKING_URI}/models/{model_id}"

    def say(self, kind: str, **body: Any) -> None:
        if self.heard:
            report.append({"type": kind, "rank": self.rank, **body})


def opened() -> JobRun:
    """The run of the job that this process belongs to. Raises RefusedError: it belongs to none."""

    spool = os.environ.get("BATCHAI_SPOOL", "")
    try:
        with open(os.path.join(spool, FACTS), encoding="utf-8") as file:
            facts = json.load(file)
    except (OSError, ValueError):
        raise RefusedError(
            f"{TRACKING_URI} is there for the ranks of a job only: set MLFLOW_TRACKING_URI to a server"
        ) from None
    rank = report.rank()
    return JobRun(
        run_id=facts["runId"],
        name=facts["runName"],
        experiment_id=facts["experimentId"],
        experiment=facts["experiment"],
        params=facts["params"],
        started=facts["started"],
        artifacts=facts["artifacts"],
        bits=facts["bits"],
        rank=rank,
        heard=rank == 0 or facts["allRanks"],
    )
