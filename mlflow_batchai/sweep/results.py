"""What has become of a sweep's jobs, as their runs say: rows, the best one first, and sentences. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlflow_batchai import runs
from mlflow_batchai.description import code
from mlflow_batchai.documents.batchai import Promotion
from mlflow_batchai.node import protocol
from mlflow_batchai.sweep.grid import shown
from mlflow_batchai.sweep.plan import USUAL_METRICS, SweepPlan

if TYPE_CHECKING:
    from mlflow.entities import Run

NOT_STARTED, TERMINATED, DELETED = "not started", "terminated", "deleted"
LONGEST_REASON = 300
# Beside the one that jobs are compared by.
MORE_METRICS = 3
_SYSTEM = "system/"


@dataclass(frozen=True)
class Row:
    """One job of a sweep.

    Attributes:
        parameters: those that tell the sweep's jobs apart.
        state: an execution state, ``terminated``, ``not started``, or ``deleted``: its run was, and nothing is made of it.
        metrics: the last value of each, but for those of the system.
        seconds: since its nodes were taken, until its end; None: they weren't.
        reason: why it did not succeed.
    """

    index: int
    name: str
    run_id: str | None
    parameters: Mapping[str, str]
    state: str
    metrics: Mapping[str, float]
    seconds: float | None
    reason: str

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without success."""
        return self.state in (protocol.FAILED, TERMINATED, DELETED)

    def data(self) -> dict[str, Any]:
        """Plain data; what is no number of JSON is a text."""
        return {
            "index": self.index,
            "name": self.name,
            "runId": self.run_id,
            "parameters": dict(self.parameters),
            "state": self.state,
            "metrics": {name: value if math.isfinite(value) else str(value) for name, value in self.metrics.items()},
            "seconds": self.seconds,
            "reason": self.reason or None,
        }


@dataclass(frozen=True)
class Results:
    """All jobs of a sweep, the best first, then those without a value of the metric, then those that failed.

    Attributes:
        metric: what they are compared by; None: nothing was said, and no job has a usual one.
    """

    plan: SweepPlan
    rows: Sequence[Row]
    metric: str | None

    @property
    def best(self) -> Row | None:
        """The best of those that succeeded."""
        comparable = (row for row in self.rows if row.state == protocol.SUCCEEDED and _comparable(row, self.metric))
        return next(comparable, None)

    @property
    def metrics(self) -> list[str]:
        """Those that a table has room for: what jobs are compared by, and some more."""
        first = [self.metric] if self.metric else []
        names = sorted({name for row in self.rows for name in row.metrics} - set(first))
        return [*first, *names[:MORE_METRICS]]

    @property
    def all_ended(self) -> bool:
        """Whether no job goes on, or has yet to begin."""
        return all(row.has_failed or row.state == protocol.SUCCEEDED for row in self.rows)

    def count(self, state: str) -> int:
        """How many jobs are in a state."""
        return sum(row.state == state for row in self.rows)

    @property
    def counts(self) -> str:
        """``2 succeeded, 1 failed, 1 not started``."""
        ended = (protocol.SUCCEEDED, protocol.FAILED, TERMINATED, DELETED)
        states = (*ended, protocol.TERMINATING, protocol.RUNNING, protocol.QUEUED, NOT_STARTED)
        found = [(self.count(state), state) for state in states]
        return ", ".join(f"{count} {state}" for count, state in found if count)

    @property
    def best_in_words(self) -> str:
        """The best job, its metric and parameters; empty: there is none."""
        best = self.best
        if best is None or self.metric is None:
            return ""
        which = shown(best.parameters)
        return f"best is {best.name} with {self.metric} {best.metrics[self.metric]:.6g}" + (f" ({which})" if which else "")

    def data(self, run_id: str, status: str) -> dict[str, Any]:
        """Plain data of the whole."""
        best = self.best
        return {
            "name": self.plan.name,
            "runId": run_id,
            "runStatus": status,
            "metric": self.metric,
            "best": best.data() if best else None,
            "jobs": [row.data() for row in self.rows],
        }


def judge(plan: SweepPlan, jobs: Mapping[int, Run], now: int) -> Results:
    """What the runs of a sweep's jobs say.

    Args:
        jobs: number -> run of those that were started.
        now: milliseconds since 1970.
    """
    rows = [_row(plan, index, jobs.get(index), now) for index in plan.indices]
    logged = {name for row in rows for name in row.metrics}
    metric = plan.metric or next((name for name in USUAL_METRICS if name in logged), None)
    sign = 1 if metric and Promotion(metric=metric, mode=plan.mode).better == "min" else -1

    def order(row: Row) -> tuple[bool, bool, float, int]:
        value = sign * row.metrics[metric] if metric is not None and _comparable(row, metric) else None
        return row.has_failed, value is None, value or 0.0, row.index

    return Results(plan, sorted(rows, key=order), metric)


def _comparable(row: Row, metric: str | None) -> bool:
    return metric is not None and not math.isnan(row.metrics.get(metric, math.nan))


def _row(plan: SweepPlan, index: int, run: Run | None, now: int) -> Row:
    given = plan.combinations[index - 1]
    parameters = {name: given[name] for name in plan.varying if name in given}
    if run is None:
        return Row(index, plan.job_name(index), None, parameters, NOT_STARTED, {}, None, "")
    tags, info = run.data.tags, run.info
    state = TERMINATED if info.status == "KILLED" else tags.get(runs.TAG_STATE, protocol.QUEUED)
    if info.lifecycle_stage == "deleted":
        state = DELETED
    # The state in the tags is the job's; the row's is that of its run, whose results may still be on their way.
    ended = info.status in ("FINISHED", "FAILED", "KILLED")
    started, until = runs.started(tags), info.end_time if ended else now
    seconds = max(0.0, (until - started) / 1000) if started is not None and until else None
    reason = _sentence(tags.get(runs.TAG_REASON, ""))
    failed = state in (protocol.FAILED, TERMINATED)
    name, run_id = tags.get(runs.TAG_JOB, plan.job_name(index)), str(info.run_id)
    metrics = {key: value for key, value in run.data.metrics.items() if not key.startswith(_SYSTEM)}
    return Row(index, name, run_id, parameters, state, metrics, seconds, reason if failed else "")


def _sentence(reason: str) -> str:
    """A reason in one line: what happened, and the last line of the log that stands below it."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return ": ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))[:LONGEST_REASON]


def describe(results: Results) -> str:
    """The parent run's description, as Markdown."""
    plan = results.plan
    lines = [f"Sweep of {len(results.rows)} jobs: {results.counts}."]
    if best := results.best_in_words:
        lines.append(f"The best is {code(best.removeprefix('best is '))}.")
    lines += [f"- {code(row.name)} {row.state}: {code(row.reason)}" for row in results.rows if row.reason][:10]
    if not results.all_ended:
        lines.append(f"Go on with it: `batchai sweep attach {plan.name}`. End it: `batchai sweep terminate {plan.name}`.")
    return "\n\n".join(lines)
