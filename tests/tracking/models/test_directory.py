"""The MLflow model directory of what a job has saved; one whose paths lead out of it is refused."""

import json
import os
import zipfile

import pytest
import yaml
from saved_models import RECORD, facts

from mlflow_batchai.errors import ModelError
from mlflow_batchai.tracking.models.directory import build_directory, check_file, check_folder, mirror, notes

PAIR = [{"name": "a", "shape": [8, 4], "dtype": "int32"}, {"name": "b", "shape": [-1], "dtype": "string"}]
UNNAMED = [{**PAIR[0], "name": None}, PAIR[1]]
BRAIN = [{"name": "y", "shape": [-1, 4], "dtype": "bfloat16"}]


def test_the_directory_is_what_mlflow_writes_with_the_training_environment(h5, tmp_path):
    target = tmp_path / "model"
    build_directory(h5, facts(python="3.9.18"), "r", target, "m-1")
    written = yaml.safe_load((target / "MLmodel").read_text())
    assert written["flavors"] == {
        "tensorflow": {
            "code": None,
            "data": "data",
            "keras_module": "keras",
            "keras_version": "3.15.1",
            "model_type": "keras",
            "save_format": "h5",
        },
        "python_function": {
            "data": "data",
            "env": {"conda": "conda.yaml", "virtualenv": "python_env.yaml"},
            "loader_module": "mlflow.tensorflow",
            "python_version": "3.9.18",
        },
    }
    assert (written["run_id"], written["model_id"], written["model_uuid"]) == ("r", "m-1", "m-1")
    assert written["model_size_bytes"] == h5.stat().st_size
    assert json.loads(written["signature"]["inputs"]) == [
        {"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, 32, 32, 3]}}
    ]
    assert (target / "data" / "model.h5").read_bytes() == h5.read_bytes()
    assert (target / "data" / "keras_module.txt").read_text() == "keras"
    assert (target / "data" / "save_format.txt").read_text() == "h5"
    requirements = [
        "mlflow",
        *RECORD["requirements"],
    ]  # the first for a Python that our MLflow does not support
    assert (target / "requirements.txt").read_text().splitlines() == requirements
    conda = yaml.safe_load((target / "conda.yaml").read_text())
    assert conda["dependencies"] == ["python=3.9.18", "pip", {"pip": requirements}]
    assert yaml.safe_load((target / "python_env.yaml").read_text())["python"] == "3.9.18"


def test_a_file_on_another_file_system_is_copied(h5, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    target = tmp_path / "model"
    build_directory(h5, facts(), None, target)
    assert (target / "data" / "model.h5").read_bytes() == h5.read_bytes()


@pytest.mark.parametrize(
    ("changes", "requirements"),
    [
        (
            {"requirements": ["tensorflow==2.15.0+nv23.11", "keras==3.0.5"]},
            ["tensorflow==2.15.0", "keras==3.0.5"],
        ),
        (
            {"backend": "torch", "tensorflow": None, "requirements": ["keras==3.15.1", "torch==2.9.0+cu128"]},
            ["keras==3.15.1", "torch==2.9.0", "tensorflow-cpu>=2.16.1"],
        ),
        ({"requirements": []}, ["tensorflow==2.21.0", "keras==3.15.1"]),
        ({"requirements": ["mlflow==3.1.0", "tensorflow==2.21.0", "keras"]}, None),
    ],
)
def test_requirements(changes, requirements, h5, tmp_path):
    target = tmp_path / "model"
    build_directory(h5, facts(**changes), None, target)
    lines = (target / "requirements.txt").read_text().splitlines()
    if requirements is None:  # a training environment that has MLflow keeps its own
        assert lines == changes["requirements"]
    else:
        assert lines[0].startswith("mlflow==3.")
        assert lines[1:] == requirements


@pytest.mark.parametrize(
    ("inputs", "outputs", "names", "note"),
    [
        (PAIR, PAIR, ["a", "b"], None),
        (PAIR, None, ["a", "b"], "no outputs"),
        (PAIR, BRAIN, ["a", "b"], "no outputs"),
        (None, PAIR, None, "no signature"),
        (UNNAMED, PAIR, None, "no signature"),
        ([PAIR[0], PAIR[0]], PAIR, None, "no signature"),
    ],
)
def test_signature(inputs, outputs, names, note, h5, tmp_path):
    made = facts(inputs=inputs, outputs=outputs)
    build_directory(h5, made, None, tmp_path / "model")
    signature = yaml.safe_load((tmp_path / "model" / "MLmodel").read_text()).get("signature")
    if names is None:
        assert signature is None
    else:
        specs = json.loads(signature["inputs"])
        assert [spec["name"] for spec in specs] == names
        assert [spec["tensor-spec"]["shape"] for spec in specs] == [[-1, 4], [-1]]
        assert (signature["outputs"] is None) == (note is not None)
    assert len(notes(made)) == (note is not None) and (note is None or note in notes(made)[0])


@pytest.mark.parametrize(
    ("shape", "example", "written"),
    [
        ([-1, 2], None, [[0.0, 0.0]]),
        ([-1, 2], [[1, 2]], [[1.0, 2.0]]),
        ([-1, 2], {"x": [[1, 2]]}, [[1.0, 2.0]]),
        ([-1, 2], {"y": [[1, 2]]}, [[0.0, 0.0]]),
        ([-1, 2], "text", [[0.0, 0.0]]),
        ([-1, -1], None, None),
        ([-1, -1], [[1, 2, 3]], [[1.0, 2.0, 3.0]]),
        ([-1, 1000, 1000], None, None),
    ],
)
def test_the_example_is_the_scripts_else_zeros(shape, example, written, h5, tmp_path):
    made = facts(inputs=[{"name": "x", "shape": shape, "dtype": "float32"}], example=example)
    build_directory(h5, made, None, tmp_path / "model")
    file = tmp_path / "model" / "input_example.json"
    assert (json.loads(file.read_text()) if file.exists() else None) == written


def test_another_backend_is_noted():
    made = facts(backend="torch", requirements=["torch==2.9.0", "keras==3.15.1"])
    assert notes(made) == ["It was trained on Keras' torch backend, and loads on TensorFlow."]


def test_a_bad_file_is_refused(tmp_path):
    whole = tmp_path / "net.keras"
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("config.json", "{}" * 100)
    cut = tmp_path / "cut.keras"
    cut.write_bytes(whole.read_bytes()[:-10])
    cases = {
        tmp_path / "none.h5": "can't be read: No such file",
        tmp_path: "can't be read: Is a directory",
        cut: "is not a saved Keras model, or only part of one",
        whole: "is a .keras file, but its description is of a .h5 file",
    }
    for file, message in cases.items():
        with pytest.raises(ModelError, match=message):
            check_file(file, facts())
    with pytest.raises(ModelError, match="is no SavedModel"):
        check_file(tmp_path, facts(format="saved_model"))
    (tmp_path / "saved_model.pb").symlink_to(whole)
    with pytest.raises(ModelError, match="is a link"):
        check_file(tmp_path, facts(format="saved_model"))


SIGNATURE = {"inputs": json.dumps([{"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, 4]}}])}
MLMODEL = {
    "flavors": {"python_function": {"loader_module": "own", "data": "data", "env": {"virtualenv": "python_env.yaml"}}},
    "run_id": None,
    "model_id": "m-of-a-node",
    "signature": SIGNATURE,
    "utc_time_created": "2026-01-01 00:00:00.000000",
}


def write(folder, **changes):
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "weights").write_bytes(b"weights")
    (folder / "MLmodel").write_text(yaml.safe_dump({**MLMODEL, **changes}))
    return folder


def test_an_mlflow_model_stays_as_it_is_but_for_its_ids(tmp_path):
    folder = write(tmp_path / "model")
    before = (folder / "MLmodel").read_bytes()
    mirror(folder, check_folder(folder), "r", tmp_path / "again", "m-1")
    assert (folder / "MLmodel").read_bytes() == before
    assert yaml.safe_load((tmp_path / "again" / "MLmodel").read_text()) == {**MLMODEL, "run_id": "r", "model_id": "m-1"}
    assert (tmp_path / "again" / "data" / "weights").read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flavors": {"python_function": {"data": "/etc"}}}, "data in its MLmodel is '/etc', which leads out of the folder"),
        ({"flavors": {"python_function": {"env": {"conda": "a/../../b"}}}}, "conda in its MLmodel"),
        ({"flavors": {"python_function": {"artifacts": {"a": {"path": "..\\\\x"}}}}}, "path in its MLmodel"),
        ({"saved_input_example_info": {"artifact_path": "/x"}}, "artifact_path in its MLmodel"),
        ({"flavors": {}}, "names no flavors"),
    ],
)
def test_paths_that_lead_out_are_refused(changes, message, tmp_path):
    with pytest.raises(ModelError, match=message.replace("\\", "\\\\")):
        check_folder(write(tmp_path / "model", **changes))


def test_links_and_what_is_no_model(tmp_path):
    folder = write(tmp_path / "model")
    (folder / "data" / "inside").symlink_to(folder / "data" / "weights")
    assert check_folder(folder)["model_id"] == "m-of-a-node"
    (folder / "data" / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("private")
    with pytest.raises(ModelError, match="data/out in it is a link out of it"):
        check_folder(folder)
    (tmp_path / "none").mkdir()
    with pytest.raises(ModelError, match="MLmodel in it can't be read"):
        check_folder(tmp_path / "none")
    (tmp_path / "none" / "MLmodel").write_text("{")
    with pytest.raises(ModelError, match="is no YAML"):
        check_folder(tmp_path / "none")
