"""What a sweep is, so that it can be gone on with by another process: kept as an artifact of its run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from mlflow_batchai.errors import JobError
from mlflow_batchai.job.places import slug
from mlflow_batchai.node.plan import CodeFile, plain
from mlflow_batchai.sweep.grid import Combination, varying

ARTIFACT = "sweep/plan.json"
LONGEST_NAME = 50
# What jobs are compared by where nobody said: the first that one of them has.
USUAL_METRICS = ("val_accuracy", "val_loss", "accuracy", "loss")


class UnstartableError(JobError):
    """No job of a sweep can be started from here, now or in a minute."""


@dataclass(frozen=True)
class SweepPlan:
    """A sweep as it was asked for; it holds no secret.

    Attributes:
        uri: the project's address, absolute if it is a folder.
        settings: over the keys of batchai.yaml.
        cwd: where relative paths start from.
        combinations: parameter -> value, of one job each; a job's number is the place in it, from 1.
        parallel: how many of its jobs there are at once that have not ended.
        metric: what they are compared by; None: one of ``USUAL_METRICS``.
        mode: whether more of it is better (``max``) or less (``min``); None: less of what is named like a loss.
        code: what tells whether the project is the same.
    """

    name: str
    uri: str
    entry_point: str
    version: str | None
    settings: Mapping[str, Any]
    env_manager: str | None
    cwd: str
    combinations: Sequence[Combination]
    parallel: int
    metric: str | None
    mode: Literal["min", "max"] | None
    code: str

    def job_name(self, index: int) -> str:
        """The name of one of its jobs and of that one's run."""
        return f"{slug(self.name, LONGEST_NAME)}-{index}"

    @property
    def indices(self) -> range:
        """The numbers of its jobs."""
        return range(1, len(self.combinations) + 1)

    @property
    def varying(self) -> list[str]:
        """Parameters that tell its jobs apart."""
        return varying(self.combinations)

    def text(self) -> str:
        """As it is kept."""
        return json.dumps(asdict(self), indent=1)


def read_plan(text: str, source: str) -> SweepPlan:
    """A plan from its text.

    Raises:
        JobError: it is none.
    """
    try:
        data = json.loads(text)
        return SweepPlan(**{field.name: data[field.name] for field in fields(SweepPlan)})
    except (ValueError, KeyError, TypeError) as error:
        raise JobError(f"{source} is no plan of a sweep, or of another version: {type(error).__name__}: {error}") from error


def code_hash(entries: Sequence[CodeFile]) -> str:
    """What tells one state of a project from another: a hash over the files that are sent, as plans have them."""
    return hashlib.sha256(json.dumps(plain(tuple(entries)), sort_keys=True).encode()).hexdigest()
