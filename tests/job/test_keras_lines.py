"""Metrics from what programs print: real output of Keras 2 and 3, and what else looks like it or lies between it.

``keras_output`` holds what three epochs of a small network printed into a pipe (Keras 3.15, tf_keras 2.21), an evaluation after them;
``ckpt``: with a ModelCheckpoint that tells what it does, ``eval``: with a callback that evaluates after each epoch.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from job_folder import line, report

from mlflow_batchai.agent.plan import MetricRule
from mlflow_batchai.agent.processes.tasks import LONGEST_LINE, LineBuffer, readable
from mlflow_batchai.job.metrics import MetricFold, Pace

OUTPUT = Path(__file__).parent / "keras_output"
HISTORY = json.loads((OUTPUT / "history.json").read_text())
NOISE = ["Epoch 7/9", "3/3 - 0s - 1ms/step - accuracy: 0.1 - loss: 9.0"]


def said(data, size, rank=0):
    """Log records of what a rank wrote, as its pipe brings it."""
    buffer, parts = LineBuffer(), [data[at : at + size] for at in range(0, len(data), size)]
    wholes = [*(buffer.feed(part) for part in parts), buffer.close()]
    return [{"k": "log", "t": 7, "r": rank, "s": "out", "x": readable(lines.decode())} for lines in wholes if lines]


def values(fold, records):
    found = {}
    for point in [*fold.feed(records), *fold.finish()]:
        found.setdefault(point.key, {})[point.step] = point.value
    return found


@pytest.mark.parametrize("name", HISTORY)
@pytest.mark.parametrize("size", [50, 1 << 20])
def test_keras_tells_the_history_of_its_epochs_though_another_process_goes_on_in_the_middle(name, size):
    records = said((OUTPUT / f"{name}.txt").read_bytes(), size)
    # Other ranks write between the pieces, the same and other things.
    records = [each for one in records for each in (line(NOISE[0], rank=1), one, line(NOISE[1], rank=2), {**one, "r": 1})]
    first, half = MetricFold([]), len(records) // 2
    found = {}
    for point in first.feed(records[:half]):
        found.setdefault(point.key, {})[point.step] = point.value
    for key, steps in values(MetricFold([], json.loads(json.dumps(first.remember()))), records[half:]).items():
        assert not found.get(key, {}).keys() & steps.keys()
        found[key] = {**found.get(key, {}), **steps}
    assert {key: [steps[step] for step in range(3)] for key, steps in found.items()} == {
        key: pytest.approx(history, abs=1e-4) for key, history in HISTORY[name].items()
    }


def test_keras_of_2017_gave_no_steps():
    assert values(MetricFold([]), [line("Epoch 1/2\n - 1s - loss: 0.5 - acc: 1.0e-04\nEpoch 2/2\n - 250ms - loss: inf")]) == {
        "loss": {0: 0.5, 1: 1.797e308},
        "acc": {0: 1e-4},
    }


def test_a_bar_of_megabytes_ends_with_its_last_state():
    """Thousands of states on one line, more than is passed on at once: a half of one is never taken for the last."""
    states = "".join(f"\r{step}/9000 - 0s - loss: {step}.1234 - acc: 0.5678" for step in range(1, 9001))
    assert len(states) > 5 * LONGEST_LINE
    records = said(f"Epoch 1/1\n{states}\n".encode(), 4096)
    rules = [MetricRule("seen", r"^(\d+)/9000 .* acc: 0\.5678$")]
    found = values(MetricFold(rules), records)
    assert (found["loss"], found["acc"]) == ({0: 9000.1234}, {0: 0.5678})
    # Every piece that was passed on ends with a whole state.
    pieces = sum(one["x"].count("/9000") for one in records)
    assert len(found["seen"]) == pieces > 5


TQDM = "train:   0%|          | 0/2 [00:00<?, ?it/s]\rtrain:  50%|█████     | 1/2 [00:00<00:00, 9.1it/s, loss=9]"
DONE = "train: 100%|██████████| 2/2 [00:00<00:00, 9.93it/s, loss=0.25]"
COLOURED = DONE.replace("loss=", "loss=\x1b[0m\x1b[31m")


@pytest.mark.parametrize(
    "text",
    [
        f"{TQDM}\r{DONE}",
        f"{TQDM}\r{DONE}\r",
        f"{TQDM}\r\x1b[K\x1b[1;32m{COLOURED}\x1b[0m",
        f"\x1b]0;a title\x07{TQDM}\r{DONE}\x1b[?25h",
        f"\x1b]8;;http://x\x1b\\{DONE}\x1b]8;;\x1b\\",
        f"{TQDM}{'x' * 5000}\r{DONE}",
    ],
)
def test_rules_look_at_the_last_state_without_colours(text):
    rules = [MetricRule("loss", r"^train: .* (?P<step>\d+)/2 .*loss=(?P<value>[\d.]+)\]$")]
    assert values(MetricFold(rules), [line(text, stream="err")]) == {"loss": {2: 0.25}}


@pytest.mark.parametrize(
    "text",
    [
        "Epoch 1/2: done",
        "Epoch 1/2\n1/2 - 0s - loss: 0.5",
        "Epoch 1/2\n2/2 loss: 0.5",
        "Epoch 1/2\n2/2 - 0s - 81ms/step",
        "Epoch 1/2\n2/2 - took: long - at: 12:30",
        "Epoch 99999999999999999999/2\n2/2 - 0s - loss: 0.5",
        "2/2 - 0s - loss: 0.5",
        "Epoch 1/1\nsee 2/2 - 0s - loss: 0.5",
    ],
)
def test_what_only_looks_like_it(text):
    assert values(MetricFold([]), [line(text)]) == {}


def test_what_another_rank_or_stream_says():
    text = "Epoch 1/1\n2/2 - 0s - loss: 0.5"
    assert values(MetricFold([]), [line(text, rank=1), line(text, stream="err")]) == {}


def test_a_line_that_looks_like_progress_for_ever_costs_nothing():
    begun = time.thread_time()
    assert values(MetricFold([]), [line("Epoch 1/1\n2/2 " + "- a: 1 " * 9000 + "x")]) == {}
    assert time.thread_time() - begun < 1


def test_the_pace():
    fold = MetricFold([])
    assert fold.pace is None and fold.last_step is None
    fold.feed([line("Epoch 3/10", t=1000)])
    assert fold.pace == Pace(3, 10, None)
    fold.feed([line("Epoch 4/10", t=2000), line("Epoch 5/10", t=5000)])
    # Two epochs took four seconds; six are left.
    assert MetricFold([], json.loads(json.dumps(fold.remember()))).pace == fold.pace == Pace(5, 10, 17000)
    # Another training.
    fold.feed([line("Epoch 1/10", t=9000)])
    assert fold.pace == Pace(1, 10, None)
    fold.finish()
    assert fold.pace is None
    fold.feed([report(41, loss=1), report(7, acc=1)])
    assert fold.last_step == 41
