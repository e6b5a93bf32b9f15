"""The job's run as its agent has told it to the ranks, and who of them is heard."""

from __future__ import annotations

import json
import os
from typing import Any, Mapping, NamedTuple

from mlflow_batchai.training import report
from mlflow_batchai.training.constants import FACTS, TRACKING_URI


class JobRun(NamedTuple):
    """What a rank knows of its job's run.

    Attributes:
        run_id: MLflow's, as are ``name``, ``experiment_id`` and ``experiment``.
        params: the run's, when it was made.
        started: milliseconds since the epoch.
        artifacts: the folder on the share that artifacts are put into.
        bits: what other users may do with them (group and world bits).
        rank: this process's.
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
        """What the names of this rank's params, tags and artifacts begin with in the run."""
        return f"rank_{self.rank}/" if self.rank else ""

    @property
    def uri(self) -> str:
        """Where this rank's artifacts of the run are."""
        return f"{TRACKING_URI}/run/{self.prefix}".rstrip("/")

    def model_uri(self, model_id: str) -> str:
        """Where a logged model's artifacts are."""
        return f"{TRACKING_URI}/models/{model_id}"

    def say(self, kind: str, **body: Any) -> None:
        """Append a record, if this rank is heard."""
        if self.heard:
            report.append({"type": kind, "rank": self.rank, **body})


def opened() -> JobRun:
    """The run of the job that this process belongs to.

    Raises:
        RefusedError: it belongs to none.
    """
    from mlflow_batchai.training.tracking.refusals import RefusedError

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
