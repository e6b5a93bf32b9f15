"""Real saved models, loaded and tried as a node does it; TensorFlow is imported by one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRY = """
import json, sys
import keras, numpy as np, tensorflow as tf
from keras import layers
from mlflow_batchai.training import model_trial as trial
keras.utils.set_random_seed(1)

class Scale(layers.Layer):
    def call(self, x):
        return x * 2

def triple(x):
    return x * 3

def own_loss(y, p):
    return keras.ops.mean(y - p)

class Bare(tf.Module):
    pass

def net(*more, shape=(4,)):
    return keras.Sequential([layers.Input(shape), *more])

plain = net(layers.Dense(3, activation="softmax"))
plain.compile("adam", own_loss)
plain.save("plain.h5")
plain.save("plain.keras")
plain.export("exported", verbose=False)
tf.saved_model.save(Bare(), "bare")
net(Scale(name="s")).save("custom.keras")
net(Scale(name="s")).save("custom.h5")
net(layers.Dense(2, activation=triple)).save("function.keras")
net(layers.Lambda(lambda x: x * 2, name="twice")).save("lambda.keras")
net(layers.Conv2D(2, 3), layers.GlobalAveragePooling2D(), shape=(None, None, 3)).save("open.keras")
a, b = layers.Input((4,), name="a"), layers.Input((6,), dtype="int32", name="b")
keras.Model([a, b], layers.Concatenate()([a, layers.Flatten()(layers.Embedding(5, 2)(b))])).save("two.keras")
wrong = net(layers.Dense(2))
wrong.set_weights([np.full((4, 2), np.nan), np.zeros(2)])
wrong.save("nan.keras")
open("half.keras", "wb").write(open("plain.keras", "rb").read()[:2000])
# Else Keras knows them in this process; a check has one of its own.
keras.saving.get_custom_objects().clear()
found = {}
for path in sys.argv[1:]:
    found[path] = trial.examine(path, True)
found["example"] = trial.examine("plain.keras", True, [[1.0, 2.0, 3.0, 4.0]])
found["bad example"] = trial.examine("plain.keras", True, [[1.0, 2.0]])
found["open example"] = trial.examine("open.keras", True, np.zeros((1, 5, 5, 3)).tolist())
open("found.json", "w").write(json.dumps(found))
"""
FILES = (
    *("plain.h5", "plain.keras", "exported", "bare", "custom.keras", "custom.h5", "function.keras", "lambda.keras"),
    *("open.keras", "two.keras", "nan.keras", "half.keras"),
)


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was found of each file."""
    folder = tmp_path_factory.mktemp("models")
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    argv = [sys.executable, "-W", "ignore", "-c", TRY, *FILES]
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_good_models_pass(tried: dict[str, Any]) -> None:
    for path in ("plain.h5", "plain.keras", "exported", "two.keras", "example", "open example"):
        check = tried[path]["check"]
        assert (check["outcome"], check["why"]) == ("passed", None), (path, check)
    for path in ("plain.h5", "plain.keras"):
        meta = tried[path]["meta"]
        assert [(one["shape"], one["dtype"]) for one in meta["inputs"] + meta["outputs"]] == [
            ([-1, 4], "float32"),
            ([-1, 3], "float32"),
        ]
        assert any(line.startswith("keras==") for line in meta["requirements"])
    assert [one["name"] for one in tried["two.keras"]["meta"]["inputs"]] == ["a", "b"]
    assert [one["shape"] for one in tried["two.keras"]["meta"]["outputs"]] == [[-1, 16]]
    exported = tried["exported"]["meta"]
    assert (exported["format"], exported["signature"], "keras" in exported) == ("saved_model", "serving_default", False)
    assert [one["shape"] for one in exported["inputs"] + exported["outputs"]] == [[-1, 4], [-1, 3]]


def test_an_example_that_does_not_fit_fails(tried: dict[str, Any]) -> None:
    bad = tried["bad example"]["check"]
    assert bad["outcome"] == "failed" and bad["why"].startswith("it was loaded, and can't predict: ")


def test_no_size_is_guessed(tried: dict[str, Any]) -> None:
    check = tried["open.keras"]["check"]
    assert check["outcome"] == "passed" and check["why"].startswith(
        "it was loaded, and not tried: its inputs have no fixed size"
    )
    assert tried["open.keras"]["meta"]["inputs"][0]["shape"] == [-1, -1, -1, 3]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("custom.keras", "its file needs 'Scale', which is the script's own code"),
        ("custom.h5", "its file needs 'Scale', which is the script's own code"),
        ("function.keras", "its file needs 'triple', which is the script's own code"),
        ("lambda.keras", "it has a Lambda layer"),
        ("bare", "it has no signature that could be served"),
        ("half.keras", "half.keras is not a whole Keras model"),
    ],
)
def test_what_fails_says_why(tried: dict[str, Any], path: str, why: str) -> None:
    check = tried[path]["check"]
    assert check["outcome"] == "failed" and check["why"].startswith(why), check


def test_a_model_that_diverged_is_told_of(tried: dict[str, Any]) -> None:
    check = tried["nan.keras"]["check"]
    assert check["outcome"] == "passed" and check["why"] == "it predicts NaN: its training may have diverged"


def test_a_python_without_the_framework_cant_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow_batchai.training import model_trial as trial

    (tmp_path / "saved_model.pb").touch()
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    check = trial.examine(str(tmp_path), True)["check"]
    assert check["outcome"] == "unchecked" and f"{sys.executable} has no tensorflow" in check["why"]
