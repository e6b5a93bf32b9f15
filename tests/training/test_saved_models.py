"""Node and client choose the same model of those that a job has saved; it is described from its file alone: versions and pins, and no framework is imported."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import h5py
import pytest

from mlflow_batchai.training import saved_models as module
from mlflow_batchai.training.saved_models import DescribeError, choose, describe, found_in


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


NET = {"class_name": "Sequential", "config": {"name": "net", "layers": []}}


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
    record = describe(save_keras(tmp_path / "model.keras", NET, keras))
    assert record["requirements"] == [*requirements, "numpy==2.1.0", "h5py==3.14.0"]
    assert (record["keras"], record["tensorflow"], record["numpy"]) == (keras, tensorflow, "2.1.0")
    assert record["backend"] == ("tensorflow" if tensorflow else "torch")


def test_the_backend_is_the_files_then_the_variables_then_the_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_packages", lambda: {"tensorflow": "2.19.0", "torch": "2.9.0", **PACKAGES})
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    h5 = save_h5(tmp_path / "model.h5", NET, keras_version="3.9.0", backend=b"tensorflow")
    keras = save_keras(tmp_path / "model.keras", NET)
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
    path = save_h5(tmp_path / "model.h5", NET, keras_version="3.15.1")
    code = (
        f"import runpy, sys; sys.argv[1:] = ['try-model', {path!r}]\n"
        f"try: runpy.run_path({str(agent_pyz)!r}, run_name='__main__')\n"
        "finally: print(sorted({'tensorflow', 'keras', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["meta"]["format"] == "h5"
    # What anything else prints is kept apart from the answer.
    assert done.stderr.splitlines()[-1] == "[]"


def paths(folder: Path, *arguments) -> list[str]:
    return [Path(path).relative_to(folder).as_posix() for path in found_in([str(folder)], *arguments)]


def test_what_is_found(tmp_path: Path) -> None:
    for name in (
        *("a.h5", "b.weights.h5", "c.keras", "d.txt", "checkpoints/e.h5", "sub/f.h5", "net.pt"),
        *("exported/saved_model.pb", "exported/assets/x.h5", "whole/MLmodel", "whole/data/model.keras"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert paths(tmp_path, None) == ["a.h5", "c.keras", "net.pt", "exported", "sub/f.h5", "whole"]
    assert paths(tmp_path, "checkpoints/e.h5") == ["checkpoints/e.h5"]
    assert paths(tmp_path, "exported") == ["exported"]
    assert paths(tmp_path, "none.h5") == []


def test_which_is_chosen() -> None:
    def record(path, **more):
        return {"type": "model", "path": path, "meta": {}, **more}

    found = [record("/o/a.h5", found=True), record("/o/exported", found=True), record("/o/z.pt", found=True)]
    assert choose([], None) is None
    assert choose(found, None) == found[1], "what only PyTorch can load comes last"
    assert choose(found[2:], None) == found[2]
    reported = [record("/o/b.h5"), record("/o/c.h5")]
    assert choose(reported + found, None) == reported[1]
    assert choose(reported + found, "a.h5") == found[0]
    assert choose(reported + found, "exported/") == found[1]
    assert choose(reported + found, "d.h5") is None
    said = record("/o/b.h5", chosen=True)
    assert choose([*reported, said, *found], None) == said
