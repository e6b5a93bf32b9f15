"""What has become of a sweep's jobs, as their runs say: order, best, words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sweep_world import plan

from mlflow_batchai import runs
from mlflow_batchai.cli.sweep import table
from mlflow_batchai.sweep.results import Results, judge


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


def names(results: Results) -> str:
    return " ".join(row.name.removeprefix("toy-") for row in results.rows)


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
def test_the_best_is_first_and_failures_are_last(metric: str | None, mode: str | None, order: str) -> None:
    name = metric or "unusual"
    jobs = {
        1: job(**{name: 0.1}),
        2: job(**{name: 0.2}),
        3: job(**{name: float("nan")}),
        4: job("FAILED", "failed", **{name: 0.15}),
    }
    assert names(judge(plan(metric=metric, mode=mode), jobs, 0)) == order


def test_a_usual_metric_is_found() -> None:
    found = judge(plan(), {1: job(loss=1.0, val_accuracy=0.5), 2: job(loss=0.5)}, 0)
    assert (found.metric, names(found), found.best and found.best.name) == ("val_accuracy", "1 2 3 4", "toy-1")
    assert found.metrics == ["val_accuracy", "loss"]
    assert judge(plan(metric="f1"), {1: job(loss=1.0)}, 0).best is None


def test_the_best_is_named_below_the_table() -> None:
    found = judge(plan(), {1: job(loss=1.0), 2: job(loss=0.5), 3: job(loss=0.1, stage="deleted")}, 0)
    assert table(found).splitlines()[-1] == "best is toy-2 with loss 0.5 (lr=0.1, bs=8)"
    assert found.counts == "2 succeeded, 1 deleted, 1 not started"


def test_rows_and_words() -> None:
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
    note = found.description
    assert "- `toy-3` failed: `rank 1 died: ValueError: no`" in note and "batchai sweep attach toy" in note
    lines = table(found).splitlines()
    assert lines[0].split() == ["lr", "bs", "State", "acc", "Duration", "Job"]
    assert lines[1].split() == ["0.1", "4", "running", "0.99", "0:00:10", "toy-1"]
    assert lines[2].split() == ["0.2", "8", "not", "started", "toy-4"]
    assert lines[-1] == "toy-3 failed: rank 1 died: ValueError: no"
    assert len(lines) == 6
