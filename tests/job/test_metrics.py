"""Which numbers a job reports: precedence of sources, the first value stands, and a replay gives the same points."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_folder import line, report

from mlflow_batchai.agent.plan import MetricRule
from mlflow_batchai.job.metrics import MetricFold, metric_key, numeric, whole


def points(fold: MetricFold, *records):
    return [tuple(point) for point in fold.feed(records)]


def goes_on(fold: MetricFold, **how) -> MetricFold:
    """The fold of another process that knows what this one has noted."""
    return MetricFold([], json.loads(json.dumps(fold.remember())), **how)


def test_reports():
    fold = MetricFold([])
    assert points(fold, report(0, loss=1.5, acc=1), report(1, rank=2, loss=2), report(1, rank=3, **{"rank_3/loss": 2.0})) == [
        ("loss", 1.5, 5, 0),
        ("acc", 1.0, 5, 0),
        ("rank_2/loss", 2.0, 5, 1),
        ("rank_3/loss", 2.0, 5, 1),
    ]
    assert points(fold, report(3, loss=1), report(3, loss=2), report(2, loss=3), report(2, loss=4)) == [
        ("loss", 1.0, 5, 3),
        ("loss", 3.0, 5, 2),
    ]
    assert fold.repeated == 2


def by_mlflow(step, value, ts=5, key="loss"):
    record = report(step, ts=ts, **{key: value})
    record["body"]["every"] = True
    return record


def test_mlflow_s_own_calls_count_each_but_not_for_a_step_that_is_trained_again():
    first = MetricFold([])
    without_steps = [by_mlflow(0, value, ts) for ts, value in enumerate((0.9, 0.5, 0.1))]
    assert points(first, *without_steps) == [("loss", 0.9, 0, 0), ("loss", 0.5, 1, 0), ("loss", 0.1, 2, 0)]
    assert points(first, *(by_mlflow(step, step, key="acc") for step in (0, 1, 1))) == [
        ("acc", 0.0, 5, 0), ("acc", 1.0, 5, 1), ("acc", 1.0, 5, 1),
    ]  # fmt: skip
    again = goes_on(first, same_attempt=False)
    assert points(again, by_mlflow(0, 0.05, 9)) == [("loss", 0.05, 9, 0)]
    assert points(again, by_mlflow(1, 7, key="acc"), by_mlflow(2, 8, key="acc"), by_mlflow(2, 9, key="acc")) == [
        ("acc", 8.0, 5, 2), ("acc", 9.0, 5, 2),
    ]  # fmt: skip
    assert (first.repeated, again.repeated) == (0, 1)
    # A relay that goes on in the same attempt knows the same.
    assert points(goes_on(again), by_mlflow(1, 7, key="acc"), by_mlflow(2, 5, key="acc")) == [("acc", 5.0, 5, 2)]


def test_no_second_copy_of_what_a_script_logs_by_mlflow():
    """MLflow's autologging says ``validation_loss``, Keras' own line ``val_loss``."""
    epochs = [line(f"Epoch {epoch}/2\n8/8 - 1s - loss: 0.5 - val_loss: 0.6") for epoch in (1, 2)]
    keras = [("loss", 0.5, 7, 0), ("val_loss", 0.6, 7, 0)]
    tag = {"k": "report", "t": 1, "body": {"type": "tag", "values": {"mlflow.autologging": "tensorflow"}}}
    for before, found in [
        ([], keras),
        ([by_mlflow(0, 7, key="parameters")], [("parameters", 7.0, 5, 0), *keras]),
        ([by_mlflow(0, 0.6, key="validation_loss"), by_mlflow(0, 0.5)], [("validation_loss", 0.6, 5, 0), ("loss", 0.5, 5, 0)]),
        ([tag], []),
    ]:
        fold = MetricFold([])
        assert points(fold, epochs[0], *before) + points(goes_on(fold), epochs[1]) == found


@pytest.mark.parametrize(
    "body",
    [
        {"values": None},
        {"values": [1]},
        {"values": {"a": None, "b": [1], "c": "word", "d": 10**400}},
        {"values": {}, "rank": "x", "step": "x", "ts": "x"},
    ],
)
def test_what_is_no_number_is_passed_over(body):
    assert points(MetricFold([]), {"k": "report", "body": {"type": "metric", **body}}) == []
    assert points(MetricFold([]), {"k": "report", "body": body}, {"k": "beat"}, {"k": "dropped", "lines": 1}) == []


@pytest.mark.parametrize("step", ["x", None, 10**30, float("inf"), float("nan"), [1], {}])
def test_a_step_that_is_none_is_zero(step):
    assert points(MetricFold([]), report(step, loss=1)) == [("loss", 1.0, 5, 0)]


def test_numbers():
    told = (True, "1e-3", "inf", "-inf", math.inf, 3)
    assert [numeric(value) for value in told] == [1.0, 1e-3, 1.797e308, -1.797e308, 1.797e308, 3.0]
    assert math.isnan(numeric("nan"))
    assert [whole(value) for value in (5, 5.9, "7", -(2**63), 2**63 - 1, True)] == [5, 5, 7, 0, 2**63 - 1, 1]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("a/b c-d.e:f", "a/b c-d.e:f"),
        ("größe", "größe"),
        ("loss (train) %", "loss _train_ _"),
        ("a\nb", "a_b"),
        ("", "_"),
        ("/", "_"),
        (".", "_"),
        ("..", "__"),
        ("../x", "__/x"),
        ("..x", "__x"),
        ("/a//b/./c/", "a/b/c"),
        ("a/../b", "a/__/b"),
        ("x" * 300, "x" * 250),
        ("x" * 249 + "/y", "x" * 249),
    ],
)
def test_keys(name, key):
    assert metric_key(name) == key


def test_rules():
    rules = [
        MetricRule("lr", r"(?P<name>lr)=(?P<value>\S+)"),
        MetricRule("loss", r"it (?P<it>\d+) loss (\S+)", "it"),
        MetricRule("f1", r"step (?P<step>\d+): (?:f1|F1) (\S+)"),
    ]
    fold = MetricFold(rules)
    assert points(fold, line("lr=0.1\nit 40 loss 2\nnothing\nlr=x\nlr=0.2 it 50 loss nope")) == [
        ("lr", 0.1, 7, 0),
        ("loss", 2.0, 7, 40),
        ("lr", 0.2, 7, 1),
    ]
    assert points(fold, line("lr=0.3", stream="err"), line("lr=9", rank=1), line("lr=9", rank=None)) == [("lr", 0.3, 7, 2)]
    assert points(fold, line("it 99999999999999999999999 loss 3")) == [("loss", 3.0, 7, 1)]
    assert points(fold, line("step 7: f1 0.5")) == [("f1", 0.5, 7, 7)]


def test_precedence_per_key():
    rules = [MetricRule("loss", r"my loss (\S+)")]
    keras = line("Epoch 1/2\n2/2 - 0s - loss: 0.5 - acc: 0.25 - val: 1.0")
    # Keras prints the epoch's line before the callback reports: the line is held back, and then counts only for other keys.
    fold = MetricFold(rules)
    assert points(fold, keras, report(0, acc=0.24), line("my loss 3")) == [("acc", 0.24, 5, 0), ("loss", 3.0, 7, 0)]
    assert [tuple(point) for point in fold.finish()] == [("val", 1.0, 7, 0)]
    assert points(MetricFold(rules), line("my loss 3"), report(1, loss=4), line("my loss 5")) == [
        ("loss", 3.0, 7, 0),
        ("loss", 4.0, 5, 1),
    ]
    fold = MetricFold(rules)
    assert points(fold, report(0, loss=1), line("my loss 3"), line("my loss 4")) == [("loss", 1.0, 5, 0)]
    assert fold.repeated == 0


@given(st.lists(st.integers(-20, 60), max_size=80), st.randoms())
def test_steps_are_remembered_exactly(steps, chance):
    fold = MetricFold([])
    seen: set[int] = set()
    for step in steps:
        assert bool(points(fold, report(step, loss=1))) == (step not in seen)
        seen.add(step)
        if chance.random() < 0.1:
            fold = goes_on(fold)


@pytest.mark.parametrize("stride", [1, 100])
def test_a_long_run_costs_little_memory(stride):
    fold = MetricFold([])
    for step in range(0, 20_000 * stride, stride):
        assert fold.feed([report(step, loss=1)])
    assert len(json.dumps(fold.remember())) < 500
