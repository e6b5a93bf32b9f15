"""Compute the results of a sweep from the runs of its jobs: rows, the best job first, and text. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mlflow_batchai.agent import protocol
from mlflow_batchai.documents.batchai import BatchaiFile, Promotion
from mlflow_batchai.job.metrics import metric_key
from mlflow_batchai.sweep.parameters import shown, varying
from mlflow_batchai.sweep.sweeps import TAG_STOPPED, Mode, SweepPlan
from mlflow_batchai.tracking import runs
from mlflow_batchai.tracking.description import code

if TYPE_CHECKING:
    from mlflow.entities import Run

NOT_STARTED, TERMINATED, DELETED, STOPPED = "not started", "terminated", "deleted", "stopped early"
UNSUCCESSFUL = (STOPPED, protocol.FAILED, TERMINATED, DELETED)
STATES = (protocol.SUCCEEDED, *UNSUCCESSFUL, protocol.TERMINATING, protocol.RUNNING, protocol.QUEUED, NOT_STARTED)
# What jobs are compared by if nobody said: the first of these that a job has.
USUAL_METRICS = ("val_accuracy", "val_loss", "accuracy", "loss")
MORE_METRICS = 3
LONGEST_REASON = 300


@dataclass(frozen=True)
class Row:
    """One job.

    Attributes:
        parameters: those that differ between the sweep's jobs.
        state: one of ``STATES``.
        metrics: last values, without system metrics.
        seconds: from the start on all nodes to the end or now; None: not started.
    """

    index: int
    name: str
    runId: str | None  # the fields are the keys of the JSON output
    parameters: Mapping[str, str]
    state: str
    metrics: Mapping[str, float]
    seconds: float | None
    reason: str

    def data(self) -> dict[str, Any]:
        """Plain data for JSON, which has no infinite numbers."""
        metrics = {name: value if math.isfinite(value) else str(value) for name, value in self.metrics.items()}
        return {**asdict(self), "metrics": metrics, "reason": self.reason or None}

    def sentence(self, metric: str | None) -> str:
        """Describe how the job has ended."""
        value = f", {metric} {self.metrics[metric]:.6g}" if metric is not None and metric in self.metrics else ""
        why = f": {self.reason}" if self.state == protocol.FAILED and self.reason else ""
        state = self.reason if self.state == STOPPED else self.state
        return f"job {self.name} {state}{value}{_which(self)}{why}"


@dataclass(frozen=True)
class Results:
    """All jobs: the best first, those without the metric later, those without success last.

    Attributes:
        metric: what they are compared by; None: no job has a usual metric.
        columns: names of the parameters that differ.
    """

    name: str
    rows: Sequence[Row]
    metric: str | None
    columns: Sequence[str]

    @property
    def best(self) -> Row | None:
        """The best job that succeeded."""
        return next((row for row in self.rows if row.state == protocol.SUCCEEDED and _has(row.metrics, self.metric)), None)

    @property
    def metrics(self) -> list[str]:
        """Metrics for the table: the one that jobs are compared by, and a few more."""
        first = [self.metric] if self.metric else []
        return first + sorted({name for row in self.rows for name in row.metrics} - set(first))[:MORE_METRICS]

    @property
    def counts(self) -> str:
        """``2 succeeded, 1 failed, 1 not started``."""
        found = Counter(row.state for row in self.rows)
        return ", ".join(f"{found[state]} {state}" for state in STATES if found[state])

    @property
    def summary(self) -> str:
        """The best job with its metric and parameters; empty: there is none."""
        best = self.best
        if best is None or self.metric is None:
            return ""
        return f"best is {best.name} with {self.metric} {best.metrics[self.metric]:.6g}{_which(best)}"

    def data(self, run_id: str, status: str) -> dict[str, Any]:
        """Plain data."""
        best = self.best.data() if self.best else None
        jobs = [row.data() for row in self.rows]
        return {"name": self.name, "runId": run_id, "runStatus": status, "metric": self.metric, "best": best, "jobs": jobs}

    @property
    def description(self) -> str:
        """The ended parent run's description, as Markdown."""
        lines = [f"Sweep of {len(self.rows)} jobs: {self.counts}."]
        if self.summary:
            lines.append(f"The best is {code(self.summary.removeprefix('best is '))}.")
        lines += [
            f"- {code(row.name)} {row.state}: {code(row.reason)}" for row in self.rows if row.reason and row.state != STOPPED
        ][:10]
        return "\n\n".join(lines)


def _which(row: Row) -> str:
    return f" ({shown(row.parameters)})" if row.parameters else ""


def judge(plan: SweepPlan, jobs: Mapping[int, Run], now: int) -> Results:
    """Work out the results.

    Args:
        jobs: number -> run of the jobs that were started.
        now: milliseconds since 1970.
    """
    columns = list(plan.space) or varying(plan.combinations)
    rows = [_row(plan, columns, number, jobs.get(number), now) for number in plan.numbers]
    logged = {name for row in rows for name in row.metrics}
    metric = plan.metric or next((name for name in USUAL_METRICS if name in logged), None)
    sign = 1 if metric and is_less_better(metric, plan.mode) else -1

    def order(row: Row) -> tuple[bool, bool, float, int]:
        has_value = _has(row.metrics, metric)
        return row.state in UNSUCCESSFUL, not has_value, sign * row.metrics[metric or ""] if has_value else 0.0, row.index

    return Results(plan.name, sorted(rows, key=order), metric, columns)


def comparison(metric: str | None, mode: Mode, config: BatchaiFile) -> tuple[str | None, Mode]:
    """The metric, as MLflow names it, and its mode: those that a person has given, else those of the model (``promoteIf``)."""
    promotion = config.model.promote_if if config.model else None
    if promotion is not None and metric in (None, promotion.metric):
        metric, mode = promotion.metric, mode or promotion.mode
    return metric_key(metric) if metric else None, mode


def is_less_better(metric: str, mode: Mode) -> bool:
    """Whether the smaller one of two values is the better one."""
    return Promotion(metric=metric, mode=mode).better == "min"


def _has(metrics: Mapping[str, float], metric: str | None) -> bool:
    """Whether a job can be compared by a metric."""
    return metric is not None and not math.isnan(metrics.get(metric, math.nan))


def _row(plan: SweepPlan, columns: Sequence[str], number: int, run: Run | None, now: int) -> Row:
    given, name = plan.parameters(number, run), plan.job_name(number)
    parameters = {column: given[column] for column in columns if column in given}
    if run is None:
        return Row(number, name, None, parameters, NOT_STARTED, {}, None, "")
    tags, info = runs.tags_of(run), run.info
    state = TERMINATED if info.status == "KILLED" else tags.get(runs.TAG_STATE, protocol.QUEUED)
    if state == TERMINATED and TAG_STOPPED in tags:
        state = STOPPED
    if info.lifecycle_stage == "deleted":
        state = DELETED
    started, until = runs.started(tags), info.end_time if info.status in ("FINISHED", "FAILED", "KILLED") else now
    seconds = max(0.0, (until - started) / 1000) if started is not None and until else None
    metrics = {key: value for key, value in run.data.metrics.items() if not key.startswith("system/")}
    reason = _one_line(tags.get(runs.TAG_REASON, "")) if state in (protocol.FAILED, TERMINATED) else ""
    reason = tags[TAG_STOPPED] if state == STOPPED else reason
    return Row(number, tags.get(runs.TAG_JOB, name), str(info.run_id), parameters, state, metrics, seconds, reason)


def _one_line(reason: str) -> str:
    """The first line says what happened; the last one is the last line of the rank's log."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return ": ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))[:LONGEST_REASON]
