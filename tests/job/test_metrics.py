"""Which numbers a job reports: precedence of sources, the first value stands, and a replay gives the same points."""

from __future__ import annotations

import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_folder import line, report

from mlflow_batchai.agent.plan import MetricRule
from mlflow_batchai.job.metrics import MetricFold, Point, metric_key, numeric, whole

BAR = "\x1b[1m{done}/2\x1b[0m \x1b[32m━━━━━━━━\x1b[0m\x1b[37m━━\x1b[0m \x1b[1m0s\x1b[0m 27ms/step - {values}"


def points(fold: MetricFold, *records):
    return [tuple(point) for point in fold.feed(records)]


def all_points(fold: MetricFold, *records):
    return [tuple(point) for point in [*fold.feed(records), *fold.finish()]]


def test_reports():
    fold = MetricFold([])
    assert points(fold, report(0, loss=1.5, acc=1), report(1, rank=2, loss=2)) == [
        ("loss", 1.5, 5, 0),
        ("acc", 1.0, 5, 0),
        ("rank_2/loss", 2.0, 5, 1),
    ]


def test_a_report_of_all_ranks_has_the_rank_in_its_names_once():
    assert points(MetricFold([]), report(1, rank=3, **{"rank_3/loss": 2.0})) == [("rank_3/loss", 2.0, 5, 1)]


def test_the_first_value_of_a_step_stands():
    fold = MetricFold([])
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
    again = MetricFold([], json.loads(json.dumps(first.remember())), same_attempt=False)
    assert points(again, by_mlflow(0, 0.05, 9)) == [("loss", 0.05, 9, 0)]
    assert points(again, by_mlflow(1, 7, key="acc"), by_mlflow(2, 8, key="acc"), by_mlflow(2, 9, key="acc")) == [
        ("acc", 8.0, 5, 2), ("acc", 9.0, 5, 2),
    ]  # fmt: skip
    assert (first.repeated, again.repeated) == (0, 1)
    # A relay that goes on in the same attempt knows the same.
    last = MetricFold([], json.loads(json.dumps(again.remember())))
    assert points(last, by_mlflow(1, 7, key="acc"), by_mlflow(2, 5, key="acc")) == [("acc", 5.0, 5, 2)]


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


@pytest.mark.parametrize(
    ("value", "number"),
    [(True, 1.0), ("1e-3", 1e-3), ("inf", 1.797e308), ("-inf", -1.797e308), (math.inf, 1.797e308), (3, 3.0)],
)
def test_numbers(value, number):
    assert numeric(value) == number


def test_nan_is_a_number():
    assert math.isnan(numeric("nan") or 0)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("val_loss", "val_loss"),
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


@given(st.text(max_size=300))
def test_mlflow_takes_every_key(name):
    from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_length_limit, _validate_metric_name

    key = metric_key(name)
    _validate_metric_name(key)
    _validate_length_limit("metric", MAX_ENTITY_KEY_LENGTH, key)


def test_rules():
    rules = [
        MetricRule("lr", r"lr=(\S+)"),
        MetricRule("loss", r"it (?P<it>\d+) loss (?P<value>\S+)", "it"),
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


def test_a_rule_without_a_value_group_takes_the_first_that_isnt_the_step():
    fold = MetricFold([MetricRule("f1", r"step (?P<step>\d+): f1 (\S+)")])
    assert points(fold, line("step 7: f1 0.5")) == [("f1", 0.5, 7, 7)]


def test_keras_lines_of_both_kinds():
    one = "Epoch 1/2\n\r" + BAR.format(done=1, values="loss: 9.0") + "\b" * 20 + "\r"
    one += BAR.format(done=2, values="loss: 0.5 - mae: 1.0000e-04 - val_loss: nan")
    two = "Epoch 2/2\n2/2 - 0s - 81ms/step - loss: 0.25 - val_mae: inf\n"
    fold = MetricFold([])
    assert points(fold, line(one)) == []  # held back until the next epoch
    first = points(fold, line(two))
    assert [point[:1] + point[2:] for point in first] == [("loss", 7, 0), ("mae", 7, 0), ("val_loss", 7, 0)]
    assert first[1][1] == 1e-4
    assert math.isnan(first[2][1])
    # An evaluation after the last epoch has no step of its own.
    assert points(fold, line(BAR.format(done=2, values="loss: 7.0"))) == []
    assert [tuple(point) for point in fold.finish()] == [("loss", 0.25, 7, 1), ("val_mae", 1.797e308, 7, 1)]


def test_keras_lines_of_others_and_without_an_epoch_dont_count():
    text = "2/2 - 0s - loss: 0.5"
    assert all_points(MetricFold([]), line(text)) == []
    assert all_points(MetricFold([]), line(f"Epoch 1/1\n{text}", rank=1)) == []
    assert all_points(MetricFold([]), line(f"Epoch 1/1\n{text}", stream="err")) == []
    assert all_points(MetricFold([]), line("Epoch 1/1\n1/2 - 0s - loss: 0.5")) == []


def test_a_line_that_looks_like_progress_for_ever_costs_nothing():
    begun = time.thread_time()
    assert all_points(MetricFold([]), line("Epoch 1/1\n2/2 " + "- a: 1 " * 9000 + "x")) == []
    assert time.thread_time() - begun < 1


def test_precedence_per_key():
    rules = [MetricRule("loss", r"my loss (\S+)")]
    keras = line("Epoch 1/2\n2/2 - 0s - loss: 0.5 - acc: 0.25 - val: 1.0")
    # Keras prints the epoch's line before the callback reports: the line is held back, and then counts only for other keys.
    fold = MetricFold(rules)
    assert all_points(fold, keras, report(0, acc=0.24), line("my loss 3")) == [
        ("acc", 0.24, 5, 0),
        ("loss", 3.0, 7, 0),
        ("val", 1.0, 7, 0),
    ]
    assert points(MetricFold(rules), line("my loss 3"), report(1, loss=4), line("my loss 5")) == [
        ("loss", 3.0, 7, 0),
        ("loss", 4.0, 5, 1),
    ]
    fold = MetricFold(rules)
    assert points(fold, report(0, loss=1), line("my loss 3"), line("my loss 4")) == [("loss", 1.0, 5, 0)]
    assert fold.repeated == 0


records = st.lists(
    st.one_of(
        st.builds(report, st.integers(0, 30), st.integers(0, 1), loss=st.floats(), acc=st.sampled_from(["nan", "x", 1])),
        st.integers(0, 9).map(lambda n: line(f"my loss {n}\nstep {n * 3}: f1 0.{n}")),
        st.integers(1, 4).map(lambda n: line(f"Epoch {n}/4\n5/5 - 1s - loss: 0.{n} - auc: {n}.0e-2")),
    ),
    max_size=30,
)
RULES = [
    MetricRule("loss", r"my loss (\S+)"),
    MetricRule("f1", r"step (?P<step>\d+): f1 (?P<value>\S+)"),
]


@given(records, st.integers(0, 30))
def test_another_process_goes_on_with_the_same_points(fed, cut):
    whole_fold = MetricFold(RULES)
    expected = repr(all_points(whole_fold, *fed))
    first = MetricFold(RULES)
    before = points(first, *fed[:cut])
    second = MetricFold(RULES, json.loads(json.dumps(first.remember())))
    # A replay of what the first had fed but not remembered gives the same as well: the fold is a function of the records.
    assert repr(before + all_points(second, *fed[cut:])) == expected
    assert second.repeated == whole_fold.repeated
    keys = [(point[0], point[3]) for point in all_points(MetricFold(RULES), *fed)]
    assert len(keys) == len(set(keys))


@given(st.lists(st.integers(-20, 60), max_size=80), st.randoms())
def test_steps_are_remembered_exactly(steps, chance):
    fold = MetricFold([])
    seen: set[int] = set()
    for step in steps:
        assert bool(points(fold, report(step, loss=1))) == (step not in seen)
        seen.add(step)
        if chance.random() < 0.1:
            fold = MetricFold([], json.loads(json.dumps(fold.remember())))


@pytest.mark.parametrize("stride", [1, 100])
def test_a_long_run_costs_little_memory(stride):
    fold = MetricFold([])
    for step in range(0, 20_000 * stride, stride):
        assert fold.feed([report(step, loss=1)])
    assert len(json.dumps(fold.remember())) < 500


def test_whole():
    assert [whole(value) for value in (5, 5.9, "7", -(2**63), 2**63 - 1, True)] == [5, 5, 7, 0, 2**63 - 1, 1]
    assert isinstance(MetricFold([]).feed([report(0, a=1)])[0], Point)
