"""``report`` writes one JSON line a record into the node's spool, and never gets in the way of training."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlflow_batchai.training import report

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def spool(tmp_path, monkeypatch):
    """A spool folder as the agent makes it, with nothing of another test left open."""
    for name in report._RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BATCHAI_SPOOL", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget():
    """Be as a process that has reported nothing yet."""
    process = report._Process
    if process.spool is not None:
        process.spool.forget()
    process.spool, process.folder, process.has_logged, process.warned = None, "", False, False


def records(folder):
    """All records, each file's numbered from 1, and without the head that counts them."""
    found = []
    for file in sorted(folder.glob("*.jsonl")):
        head, *lines = map(json.loads, file.read_text().splitlines())
        assert (head["type"], head["records"]) == ("count", len(lines))
        assert head["points"] == sum(len(line["values"]) for line in lines if line["type"] == "metric")
        assert [line.pop("n") for line in lines] == list(range(1, len(lines) + 1))
        found += lines
    return found


def test_a_metric_record(spool):
    report.log(step=3, loss=0.25, val_loss=np.float32(0.5))
    (record,) = records(spool)
    assert record.pop("ts") > 1_600_000_000_000
    assert record == {"type": "metric", "rank": 0, "step": 3, "values": {"loss": 0.25, "val_loss": 0.5}}
    (file,) = spool.iterdir()
    assert file.name.startswith(f"report-0-{os.getpid()}-")


def test_ranks_other_than_0_are_silent_unless_asked(spool, monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "3")
    report.log(loss=1.0)
    assert records(spool) == []
    report.log(loss=1.0, all_ranks=True)
    (record,) = records(spool)
    assert (record["rank"], record["values"]) == (3, {"rank_3/loss": 1.0})


@pytest.mark.parametrize(
    ("given", "keywords", "values"),
    [
        *(({name: 1}, {}, {name: 1.0}) for name in ("a b", "x?y", "ä/ö", "../up", "", "new\nline", "a" * 300)),
        ({"step": 1, "metrics": 2, "a/b c": 3}, {"loss": 4}, {"step": 1.0, "metrics": 2.0, "a/b c": 3.0, "loss": 4.0}),
        # Numbers that JSON lacks.
        ({"a": math.nan, "b": math.inf, "c": -math.inf}, {}, {"a": "nan", "b": "inf", "c": "-inf"}),
        ({"d": np.int64(7), "e": True}, {}, {"d": 7.0, "e": 1.0}),
    ],
)
def test_what_is_logged(spool, given, keywords, values):
    """What MLflow would refuse of a name is changed in one place, which tells of it."""
    report.log(given, all_ranks=False, **keywords)
    (record,) = records(spool)
    assert (record["step"], record["values"]) == (0, values)


@pytest.mark.parametrize("value", ["0.5", b"1", None, [1, 2], np.ones(2), {}, object(), 10**400])
def test_a_value_that_is_no_number_is_refused_by_the_first_call_on_every_rank_and_outside_a_job(value, monkeypatch):
    monkeypatch.delenv("BATCHAI_SPOOL")
    monkeypatch.setenv("HOROVOD_RANK", "1")
    for _ in range(2):
        with pytest.raises(TypeError, match=r"^report.log: the value of 'loss' must be one number \(.*\), not "):
            report.log(loss=value)


@pytest.mark.parametrize("step", ["1", 1.5, None, True, pytest.param(10**5000, id="long"), np.array(1.5), np.array([1, 2])])
def test_a_step_is_a_whole_number(step):
    with pytest.raises(TypeError, match=r"^report.log: step must be a whole number of 64 bits, not "):
        report.log(step=step, loss=1.0)


def test_metrics_are_a_mapping():
    with pytest.raises(TypeError, match=r"^report.log: metrics must be a mapping of names to numbers, not \[1, 2\]"):
        report.log([1, 2])


def test_no_later_call_raises(spool, caplog):
    """Hours of training are not lost to a value: it is left out, and counted by who reads that."""
    report.log(step=0, loss=1.0)
    report.log(step=1, loss=None, accuracy=0.5)
    report.log(step=1.7, loss=0.5)
    report.log(step=2, loss=10**400)
    report.log("loss", step=3)
    report.log(step=np.array(4.5), loss=1.0)
    report.log(step=10**5000, loss=1.0)
    values = [(record["step"], record["values"]) for record in records(spool)]
    assert values[1:3] == [(1, {"loss": None, "accuracy": 0.5}), (0, {"loss": None})]
    assert values[3:5] == [(2, {"loss": None}), (3, {"metrics": None})]
    assert values[5:] == [(0, {"loss": None})] * 2
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith("report.log: the value of 'loss' must be one number")


def test_outside_a_job_nothing_is_written(spool, monkeypatch):
    monkeypatch.delenv("BATCHAI_SPOOL")
    report.log(loss=1.0)
    report.model("m.h5")
    assert list(spool.iterdir()) == []


def test_a_child_process_has_a_file_of_its_own(spool):
    report.log(loss=1.0)
    code = "from mlflow_batchai.training import report; report.log(loss=2.0)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert len(list(spool.iterdir())) == 2


def test_a_model_without_facts_about_its_inputs(spool, monkeypatch):
    monkeypatch.chdir(spool)
    report.model(Path("out") / "m.h5")
    (record,) = records(spool)
    assert record["path"] == str(spool / "out" / "m.h5")
    assert record["meta"]["format"] == "h5"
    assert record["meta"]["python"].count(".") == 2
    with pytest.raises(TypeError, match=r"^report.model: path must be a path, not 3"):
        report.model(3)


def test_the_keras_callback(spool):
    code = """
import keras, numpy
from mlflow_batchai.training import report
model = keras.Sequential([keras.Input((3,), name="row"), keras.layers.Dense(2)])
model.compile(keras.optimizers.SGD(0.25), loss="mse", metrics=["mae"])
data = numpy.ones((8, 3)), numpy.ones((8, 2))
model.fit(*data, validation_data=data, epochs=2, verbose=0, callbacks=[report.keras_callback(images_per_epoch=8)])
report.model("m.keras", model)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, cwd=spool)
    first, second, model = records(spool)
    assert (first["step"], second["step"]) == (0, 1)
    assert set(first["values"]) == {"loss", "mae", "val_loss", "val_mae", "learning_rate", "images_per_second"}
    assert first["values"]["learning_rate"] == 0.25
    assert model["meta"]["backend"] == "tensorflow"
    assert model["meta"]["inputs"] == [{"name": "row", "shape": [-1, 3], "dtype": "float32"}]
    assert model["meta"]["requirements"][0].startswith("tensorflow")
