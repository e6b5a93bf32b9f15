"""A saved Keras model is described from its file alone, as Keras 2, tf_keras and Keras 3 write it."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import h5py
import pytest

from mlflow_batchai.agent import describe as module
from mlflow_batchai.agent.describe import DescribeError, describe

F32 = {"module": "keras", "class_name": "DTypePolicy", "config": {"name": "float32"}, "registered_name": None}


def layer(kind, built=None, inbound=None, **config):
    made = {"class_name": kind, "config": config}
    if built:
        made["build_config"] = {"input_shape": built}
    if inbound is not None:
        made.update(name=config["name"], inbound_nodes=inbound)
    return made


def sequential(*layers, **config):
    return {"class_name": "Sequential", "config": {"name": "net", "layers": list(layers), **config}}


def functional(layers, inputs, outputs):
    config = {"name": "net", "layers": layers, "input_layers": inputs, "output_layers": outputs}
    return {"class_name": "Functional", "config": config}


def tensor(name, shape):
    config = {"shape": shape, "dtype": "float32", "keras_history": [name, 0, 0]}
    return [{"args": [{"class_name": "__keras_tensor__", "config": config}], "kwargs": {}}]


def save_h5(path: Path, config, **attributes) -> str:
    with h5py.File(path, "w") as file:
        file.attrs["model_config"] = json.dumps(config)
        for key, value in attributes.items():
            file.attrs[key] = value
    return str(path)


def save_keras(path: Path, config, version="3.15.1") -> str:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("metadata.json", json.dumps({"keras_version": version}))
        archive.writestr("model.weights.h5", b"")
    return str(path)


IMAGE = layer("InputLayer", batch_shape=[None, 32, 32, 3], dtype="float32", name="image")
CONV = {"data_format": "channels_last", "filters": 8, "dtype": F32}
A = layer("InputLayer", inbound=[], batch_shape=[None, 4], dtype="float32", name="a")
B = layer("InputLayer", inbound=[], batch_shape=[None, 6], dtype="int32", name="b")
OUT = layer("Dense", inbound=tensor("x", [None, 9]), name="out", units=2, dtype=F32)

MODELS = {
    "a legacy Sequential without build_config": (
        sequential(IMAGE, layer("Conv2D", **CONV), layer("Flatten"), layer("Dense", units=10), layer("Softmax")),
        [(None, [-1, 32, 32, 3], "float32")],
        [(None, [-1, 10], "float32")],
    ),
    "build_input_shape alone": (
        sequential(layer("Dense", units=3, dtype=F32), build_input_shape=[None, 5]),
        [(None, [-1, 5], "float32")],
        [(None, [-1, 3], "float32")],
    ),
    "Keras 2: the first layer has batch_input_shape": (
        sequential(layer("Dense", units=3, batch_input_shape=[None, 5], dtype="float64")),
        [(None, [-1, 5], "float64")],
        [(None, [-1, 3], "float64")],
    ),
    "Keras before 2.2: layers without a name for the model": (
        {"class_name": "Sequential", "config": [layer("Dense", units=3, batch_input_shape=[None, 5])]},
        [(None, [-1, 5], "float32")],
        [(None, [-1, 3], "float32")],
    ),
    "convolutions to the end, global pooling, and a mixed policy": (
        sequential(
            IMAGE,
            layer("Conv2D", **CONV),
            layer("MaxPooling2D", data_format="channels_last"),
            layer("GlobalAveragePooling2D", data_format="channels_last", dtype="mixed_float16"),
        ),
        [(None, [-1, 32, 32, 3], "float32")],
        [(None, [-1, 8], "float16")],
    ),
    "a sequence": (
        sequential(
            layer("InputLayer", batch_shape=[None, 7], dtype="int64"),
            layer("Embedding", output_dim=16),
            layer("LSTM", units=5, return_sequences=True),
            layer("Dense", units=2),
        ),
        [(None, [-1, 7], "int64")],
        [(None, [-1, 7, 2], "float32")],
    ),
    "a Sequential round a Functional": (
        sequential(
            functional([A, layer("Dense", built=[None, 4], inbound=[], name="d", units=6)], ["a", 0, 0], ["d", 0, 0]),
            layer("Dense", units=2),
        ),
        [("a", [-1, 4], "float32")],
        [(None, [-1, 2], "float32")],
    ),
    "one input and output, written without a list": (
        functional([A, OUT], ["a", 0, 0], ["out", 0, 0]),
        [("a", [-1, 4], "float32")],
        [("out", [-1, 2], "float32")],
    ),
    "inputs in the order of the model, not of its layers": (
        functional([B, A, OUT], [["a", 0, 0], ["b", 0, 0]], [["out", 0, 0]]),
        [("a", [-1, 4], "float32"), ("b", [-1, 6], "int32")],
        [("out", [-1, 2], "float32")],
    ),
    "dictionaries of inputs and outputs": (
        functional([A, OUT], {"left": ["a", 0, 0]}, {"y": ["out", 0, 0]}),
        [("left", [-1, 4], "float32")],
        [("y", [-1, 2], "float32")],
    ),
    "Keras 2: nodes name layers": (
        functional(
            [
                layer("InputLayer", inbound=[], batch_input_shape=[None, 4], name="a", dtype="float32"),
                layer("Dense", inbound=[[["a", 0, 0, {}]]], name="h", units=6),
                layer("ReLU", inbound=[[["h", 0, 0, {}]]], name="r"),
            ],
            [["a", 0, 0]],
            [["r", 0, 0]],
        ),
        [("a", [-1, 4], "float32")],
        [("r", [-1, 6], "float32")],
    ),
    "an output whose shape can't be told": (
        functional([A, layer("Own", inbound=tensor("a", [None, 4]), name="o")], ["a", 0, 0], ["o", 0, 0]),
        [("a", [-1, 4], "float32")],
        None,
    ),
    "a class of one's own, built": (
        {"class_name": "Own", "config": {}, "build_config": {"input_shape": [None, 8, 8, 1]}},
        [(None, [-1, 8, 8, 1], "float32")],
        None,
    ),
    "a class of one's own, nothing known": ({"class_name": "Own", "config": {}}, None, None),
}


def named(tensors):
    return tensors and [{"name": name, "shape": shape, "dtype": dtype} for name, shape, dtype in tensors]


@pytest.mark.parametrize("save", [save_h5, save_keras])
@pytest.mark.parametrize(("config", "inputs", "outputs"), MODELS.values(), ids=MODELS.keys())
def test_shapes(config, inputs, outputs, save, tmp_path):
    attributes = {"keras_version": "3.15.1"} if save is save_h5 else {}
    record = describe(save(tmp_path / "model", config, **attributes))
    assert record.get("inputs") == named(inputs)
    assert record.get("outputs") == named(outputs)
    assert record["format"] == ("h5" if save is save_h5 else "keras")


PACKAGES = {"numpy": "2.1.0", "h5py": "3.14.0"}


@pytest.mark.parametrize(
    ("keras", "packages", "requirements", "tensorflow"),
    [
        (
            "3.9.0",
            {"tensorflow-cpu": "2.19.0", "keras": "3.9.0"},
            ["tensorflow-cpu==2.19.0", "keras==3.9.0"],
            "2.19.0",
        ),
        (
            "2.15.0",
            {"tensorflow": "2.15.1", "keras": "2.15.0"},
            ["tensorflow==2.15.1", "keras==2.15.0"],
            "2.15.1",
        ),
        (
            "2.19.0",
            {"tensorflow": "2.19.0", "keras": "3.9.0", "tf_keras": "2.19.0"},
            ["tensorflow==2.19.0", "tf_keras==2.19.0"],
            "2.19.0",
        ),
        ("3.9.0", {"torch": "2.9.0", "keras": "3.9.0"}, ["keras==3.9.0", "torch==2.9.0"], None),
    ],
)
def test_requirements_are_of_this_interpreter(keras, packages, requirements, tensorflow, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_packages", lambda: {**packages, **PACKAGES})
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    record = describe(save_keras(tmp_path / "model.keras", sequential(), keras))
    assert record["requirements"] == [*requirements, "numpy==2.1.0", "h5py==3.14.0"]
    assert (record["keras"], record["tensorflow"], record["numpy"]) == (keras, tensorflow, "2.1.0")
    assert record["backend"] == ("tensorflow" if tensorflow else "torch")


def test_the_backend_is_the_files_then_the_variables_then_the_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_packages", lambda: {"tensorflow": "2.19.0", "torch": "2.9.0", **PACKAGES})
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    h5 = save_h5(tmp_path / "model.h5", sequential(), keras_version="3.9.0", backend=b"tensorflow")
    keras = save_keras(tmp_path / "model.keras", sequential())
    assert [describe(h5)["backend"], describe(keras)["backend"]] == ["tensorflow", "jax"]
    monkeypatch.delenv("KERAS_BACKEND")
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    assert describe(keras)["backend"] == "torch"
    assert "torch==2.9.0" in describe(keras)["requirements"]


def test_what_is_no_model_is_refused_in_a_sentence(tmp_path):
    weights = tmp_path / "weights.h5"
    with h5py.File(weights, "w") as file:
        file.attrs["keras_version"] = "3.9.0"
    with pytest.raises(DescribeError, match="holds weights without a model"):
        describe(str(weights))
    with pytest.raises(DescribeError, match="there is no model file"):
        describe(str(tmp_path / "none.h5"))
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    with pytest.raises(DescribeError, match="is not a whole Keras model"):
        describe(str(tmp_path / "other.zip"))
    (tmp_path / "text").write_text("hello")
    with pytest.raises(DescribeError, match="is not a whole Keras model"):
        describe(str(tmp_path / "text"))


def test_it_imports_no_framework(tmp_path, agent_pyz):
    path = save_h5(tmp_path / "model.h5", sequential(IMAGE), keras_version="3.15.1")
    code = (
        f"import runpy, sys; sys.argv[1:] = ['try-model', {path!r}]\n"
        f"try: runpy.run_path({str(agent_pyz)!r}, run_name='__main__')\n"
        "finally: print(sorted({'tensorflow', 'keras', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["meta"]["inputs"][0]["shape"] == [-1, 32, 32, 3]
    # What anything else prints is kept apart from the answer.
    assert done.stderr.splitlines()[-1] == "[]"
