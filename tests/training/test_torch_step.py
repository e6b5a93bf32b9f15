"""Which train steps are recorded as CUDA graphs, and when. No GPU is needed: recordings are stand-ins here."""

from __future__ import annotations

import types
from typing import Any

import keras
import pytest

from mlflow_batchai.training import _torch_step

L = keras.layers


class OwnLayer(L.Layer):
    def call(self, x: Any) -> Any:
        return x


class OwnSchedule(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> Any:
        return 0.1


class OwnStep(keras.Sequential):
    def train_step(self, *data: Any) -> Any:
        return super().train_step(*data)


def own(*values: Any) -> Any:
    return values[0] * 1.0


def model(*layers: Any, kind: type = keras.Sequential, rate: Any = 0.1, **options: Any) -> Any:
    made = kind([keras.Input((4,)), *layers, L.Dropout(0.5), L.Dense(2)])
    options = {"loss": "mse", "metrics": ["mae", keras.metrics.MeanSquaredError()], **options}
    made.compile(keras.optimizers.SGD(rate), **options)
    return made


@pytest.mark.parametrize(
    "made, recorded",
    [
        (lambda: model(), True),
        (lambda: model(L.Dense(3, "relu"), L.BatchNormalization(), loss=keras.losses.Huber()), True),
        (lambda: model(rate=keras.optimizers.schedules.CosineDecay(0.1, 9)), True),
        (lambda: model(OwnLayer()), False),
        (lambda: model(L.Lambda(own)), False),
        (lambda: model(L.Dense(3, own)), False),
        (lambda: model(L.Dense(3, kernel_regularizer=own)), False),
        (lambda: model(loss=own), False),
        (lambda: model(metrics=[keras.metrics.MeanMetricWrapper(own)]), False),
        (lambda: model(metrics=[own]), False),
        (lambda: model(rate=OwnSchedule()), False),
        (lambda: model(kind=OwnStep), False),
    ],
)
def test_steps_with_code_of_the_users_own_are_not_recorded_by_themselves(made: Any, recorded: bool) -> None:
    assert _torch_step.is_keras_own(made()) is recorded


class Batch(types.SimpleNamespace):
    """A tensor, as far as a train step looks at it."""

    def __init__(self, rows: int) -> None:
        super().__init__(shape=(rows, 4), dtype="float32", data_ptr=None)


def trained(
    monkeypatch: pytest.MonkeyPatch, batches: list[Any], possible: bool = True, room: bool = True
) -> tuple[list[str], int]:
    """What was done with each batch, and how often a recording was tried."""
    done: list[str] = []
    tried: list[Any] = []

    class Stand:
        def __init__(self, step: Any, data: Any) -> None:
            tried.append(data)
            if not possible:
                raise RuntimeError("operation not permitted when stream is capturing")

        def replay(self, leaves: list[Any]) -> None:
            done.append("replayed")

    monkeypatch.setattr(_torch_step, "Recording", Stand)
    monkeypatch.setattr(_torch_step, "has_room", lambda: room)
    step = _torch_step.TrainStep(lambda data: done.append("run"))
    for data in batches:
        step([(data, Batch(1), None)])
    return done, len(tried)


def test_the_fourth_batch_of_one_form_is_recorded_and_others_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [8, 5, 8, 8, 8, 8, 8, 5, 8]
    expected = ["run"] * 5 + ["replayed"] * 2 + ["run", "replayed"]
    assert trained(monkeypatch, [Batch(count) for count in rows]) == (expected, 1)
    ran = ["run"] * 7
    assert trained(monkeypatch, [Batch(8)] * 7, possible=False) == (ran, 1), "it can't be recorded"
    assert trained(monkeypatch, [Batch(8)] * 7, room=False) == (ran, 0), "it takes half of the memory"
    assert trained(monkeypatch, [[1.0, 2.0]] * 7) == (ran, 0), "a batch that is no tensor"
