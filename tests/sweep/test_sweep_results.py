"""Results of a sweep's jobs from their runs: order, best, text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sweep_world import plan

from mlflow_batchai.cli.sweep import table
from mlflow_batchai.documents.batchai import parse_batchai
from mlflow_batchai.sweep.results import comparison, judge
from mlflow_batchai.tracking import runs


def job(
    status: str = "FINISHED",
    state: str = "succeeded",
    reason: str = "",
    ended: int = 63_000,
    stage: str = "active",
    **metrics: float,
) -> Any:
    tags = {runs.TAG_STATE: state, runs.TAG_STARTED: runs.time_text(1000), runs.TAG_REASON: reason}
    info = SimpleNamespace(run_id=f"id-{status}", status=status, end_time=ended, lifecycle_stage=stage)
    return SimpleNamespace(info=info, data=SimpleNamespace(tags=tags, metrics=metrics))


@pytest.mark.parametrize(
    ("metric", "mode", "order"),
    [
        ("acc", None, "2 1 3 4"),
        ("acc", "min", "1 2 3 4"),
        ("val_loss", None, "1 2 3 4"),
        ("val_loss", "max", "2 1 3 4"),
        ("Mean_Squared_Error", None, "1 2 3 4"),
        ("perplexity", None, "1 2 3 4"),
        (None, None, "1 2 3 4"),
    ],
)
def test_the_best_is_first_and_failures_are_last(metric: str | None, mode: Any, order: str) -> None:
    name = metric or "unusual"
    values = {1: job(**{name: 0.1}), 2: job(**{name: 0.2}), 3: job(**{name: float("nan")})}
    found = judge(plan(metric=metric, mode=mode), {**values, 4: job("FAILED", "failed", **{name: 0.15})}, 0)
    assert " ".join(str(row.index) for row in found.rows) == order


@pytest.mark.parametrize(
    ("metric", "jobs", "used", "shown", "best"),
    [
        (None, {1: job(loss=1.0, val_accuracy=0.5), 2: job(loss=0.5)}, "val_accuracy", ["val_accuracy", "loss"], "toy-1"),
        (None, {1: job(loss=1.0), 2: job(loss=0.5), 3: job(loss=0.1, stage="deleted")}, "loss", ["loss"], "toy-2"),
        ("f1", {1: job(loss=1.0)}, "f1", ["f1", "loss"], None),
        (None, {1: job(a=1.0)}, None, ["a"], None),
    ],
)
def test_the_metric_and_the_best(metric: str | None, jobs: Any, used: str | None, shown: list[str], best: str | None) -> None:
    found = judge(plan(metric=metric), jobs, 0)
    assert (found.metric, found.metrics, found.best and found.best.name) == (used, shown, best)
    assert table(found).splitlines()[-1].startswith(f"best is {best} with {used}") == bool(best)


@pytest.mark.parametrize(
    ("given", "promotion", "expected"),
    [
        ((None, None), None, (None, None)),
        ((None, None), {"metric": "gap", "mode": "min"}, ("gap", "min")),
        ((None, "max"), {"metric": "gap", "mode": "min"}, ("gap", "max")),
        (("gap", None), {"metric": "gap", "mode": "min"}, ("gap", "min")),
        (("f1", None), {"metric": "gap", "mode": "min"}, ("f1", None)),
        (("acc@5", None), None, ("acc_5", None)),
        ((None, None), {"metric": "gap@1", "mode": "min"}, ("gap_1", "min")),
    ],
)
def test_jobs_are_compared_as_their_models_are(given: Any, promotion: Any, expected: Any) -> None:
    model = {"register": "m", "alias": "champion", "promoteIf": promotion} if promotion else None
    config = parse_batchai({"model": model} if model else {}, "batchai.yaml")[0]
    assert comparison(*given, config) == expected


def test_rows_data_description_and_table() -> None:
    jobs = {
        1: job("RUNNING", "running", ended=0, acc=0.99, **{"system/node-0/cpu": 3.0}),
        2: job("KILLED", "failed", "terminated"),
        3: job("FAILED", "failed", "rank 1 died\nTraceback\n  x\nValueError: no", acc=float("inf")),
    }
    found = judge(plan(metric="acc"), jobs, 11_000)
    rows = {row.index: row for row in found.rows}
    assert [rows[index].state for index in (1, 2, 3, 4)] == ["running", "terminated", "failed", "not started"]
    assert (rows[1].seconds, rows[2].seconds, rows[4].seconds) == (10.0, 62.0, None)
    assert rows[1].parameters == {"lr": "0.1", "bs": "4"} and rows[1].metrics == {"acc": 0.99}
    assert found.best is None, "one that runs is not the best yet"
    assert found.counts == "1 failed, 1 terminated, 1 running, 1 not started"
    data = found.data("r", "RUNNING")
    assert data["best"] is None and data["jobs"][0]["reason"] is None
    failed = next(row for row in data["jobs"] if row["state"] == "failed")
    assert (failed["metrics"], failed["reason"]) == ({"acc": "inf"}, "rank 1 died: ValueError: no")
    assert "- `toy-3` failed: `rank 1 died: ValueError: no`" in found.description
    lines = [line.split() for line in table(found).splitlines()]
    assert lines[0] == ["lr", "bs", "State", "acc", "Duration", "Job"]
    assert lines[2] == ["0.1", "4", "running", "0.99", "0:00:10", "toy-1"]
    assert lines[3] == ["0.2", "8", "not", "started", "toy-4"]
    assert lines[-1] == ["toy-3", "failed:", "rank", "1", "died:", "ValueError:", "no"] and len(lines) == 7
