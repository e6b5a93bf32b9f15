"""A saved Keras file becomes a registered MLflow model that predicts as before, without TensorFlow here."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from mlflow.entities import LoggedModelStatus
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from mlflow_batchai.agent.describe import describe
from mlflow_batchai.errors import ModelError
from mlflow_batchai.tracking.models.directory import HDF5_MAGIC, build_directory
from mlflow_batchai.tracking.models.facts import ModelFacts
from mlflow_batchai.tracking.models.logged import log_model

# MLflow's own use of SQLAlchemy 2.1.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")

RECORD = {
    "keras": "3.15.1",
    "backend": "tensorflow",
    "tensorflow": "2.21.0",
    "python": "3.11.7",
    "numpy": "2.4.6",
    "inputs": [{"name": "image", "shape": [-1, 32, 32, 3], "dtype": "float32"}],
    "outputs": [{"name": "scores", "shape": [-1, 10], "dtype": "float32"}],
    "requirements": ["tensorflow-cpu==2.21.0", "keras==3.15.1", "numpy==2.4.6", "h5py==3.14.0"],
    "format": "h5",
}

TRAIN = """
import keras, numpy
from keras import layers
keras.utils.set_random_seed(1)
model = keras.Sequential([
    layers.Input((32, 32, 3)), layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(4),
    layers.Flatten(), layers.Dense(10, activation="softmax"),
])
model.compile("adam", "categorical_crossentropy")
model.save("net.h5")
model.save("net.keras")
model.export("exported", verbose=False)
images = numpy.random.default_rng(1).random((5, 32, 32, 3), dtype="float32")
numpy.savez("expected.npz", images=images, scores=model.predict(images, verbose=0))
"""

LOAD = """
import sys, numpy, mlflow
from mlflow import pyfunc, tensorflow
tracking, expected, *uris = sys.argv[1:]
mlflow.set_tracking_uri(tracking)
known = numpy.load(expected)
for uri in uris:
    served = pyfunc.load_model(uri)
    assert served.metadata.signature.inputs.inputs[0].shape == (-1, 32, 32, 3), uri
    assert served.metadata.signature.outputs.inputs[0].shape == (-1, 10), uri
    (named,) = served.metadata.get_input_schema().input_names() if uri.endswith("/exported") else [None]
    images = {named: known["images"]} if named else known["images"]
    scores = [served.predict(images)]
    if named:
        scores = [scores[0]["output_0"]]
    example = served.input_example[named] if named else served.input_example
    assert example.shape == (1, 32, 32, 3) and example.dtype == "float32", uri
    if uri.startswith("models:/m-"):
        scores.append(tensorflow.load_model(uri).predict(known["images"], verbose=0))
    for predicted in scores:
        numpy.testing.assert_allclose(predicted, known["scores"], rtol=0, atol=1e-5, err_msg=uri)
print("loaded", len(uris))
"""

LOG = """
import sys
from pathlib import Path
from mlflow.tracking import MlflowClient
from mlflow_batchai.tracking.models.facts import ModelFacts
from mlflow_batchai.tracking.models.logged import log_model
tracking, experiment, run, file, record = sys.argv[1:]
log_model(MlflowClient(tracking), experiment_id=experiment, run_id=run, file=Path(file),
          facts=ModelFacts.from_record(__import__("json").loads(record)), register="clean")
print(sorted({"tensorflow", "keras", "h5py", "mlflow.tensorflow", "mlflow.pyfunc"} & set(sys.modules)))
"""


def python(code: str, *arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1] if done.stdout else ""


def facts(**changes) -> ModelFacts:
    return ModelFacts.from_record({**RECORD, **changes})


@pytest.fixture(scope="module")
def tracking(tmp_path_factory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(scope="module")
def client(tracking) -> MlflowClient:
    return MlflowClient(tracking)


@pytest.fixture(scope="module")
def experiment(client, tmp_path_factory) -> str:
    return client.create_experiment("models", artifact_location=str(tmp_path_factory.mktemp("arti facts")))


@pytest.fixture
def run(client, experiment):
    run = client.create_run(experiment)
    client.log_param(run.info.run_id, "epochs", 3)
    return run.info


@pytest.fixture
def h5(tmp_path) -> Path:
    """What looks like a model to one that does not open it."""
    path = tmp_path / "tiny net.h5"
    path.write_bytes(HDF5_MAGIC + bytes(100))
    return path


def models_of(client, run):
    found = client.search_logged_models([run.experiment_id])
    return [model for model in found if model.source_run_id == run.run_id]


def test_all_formats_load_from_every_uri_and_predict_the_same(tracking, client, run, tmp_path):
    python(TRAIN, cwd=tmp_path)
    ids = {"experiment_id": run.experiment_id, "run_id": run.run_id}
    old, new = tmp_path / "net.h5", tmp_path / "net.keras"
    one = log_model(client, **ids, file=old, facts=facts(), register="cifär net")
    described = ModelFacts.from_record(describe(str(new)))
    two = log_model(client, **ids, file=new, facts=described, name="native")
    assert (one.version, two.version, one.notes, two.notes) == ("1", None, (), ())
    uris = [f"runs:/{run.run_id}/model", one.model_uri, "models:/cifär net/1"]
    uris += [f"runs:/{run.run_id}/native", two.model_uri]
    # A SavedModel is served by its signature, which takes its inputs by name.
    inputs = [{"name": "keras_tensor", "shape": [-1, 32, 32, 3], "dtype": "float32"}]
    exported = facts(format="saved_model", inputs=inputs, outputs=[{**RECORD["outputs"][0], "name": "output_0"}])
    log_model(client, **ids, file=tmp_path / "exported", facts=exported, name="exported")
    uris.append(f"runs:/{run.run_id}/exported")
    assert python(LOAD, tracking, str(tmp_path / "expected.npz"), *uris, cwd=tmp_path) == "loaded 6"


def test_it_imports_no_framework(tracking, client, run, h5, tmp_path):
    arguments = (tracking, run.experiment_id, run.run_id, str(h5), json.dumps(RECORD))
    assert python(LOG, *arguments, cwd=tmp_path) == "[]"
    assert [model.status for model in models_of(client, run)] == [LoggedModelStatus.READY]


def test_the_run_shows_the_model_and_the_model_its_version(tracking, client, run, h5, monkeypatch):
    def log():
        return log_model(client, experiment_id=run.experiment_id, run_id=run.run_id, file=h5, facts=facts(), register="net")

    process_wide = "mlflow.tracking._tracking_service.utils._tracking_uri"
    monkeypatch.setattr(process_wide, "sqlite:///elsewhere.db")
    first, second = log(), log()
    outputs = client.get_run(run.run_id).outputs.model_outputs
    assert {output.model_id for output in outputs} == {first.model_id, second.model_id}
    model = client.get_logged_model(second.model_id)
    assert (model.name, model.status, model.params) == ("model", LoggedModelStatus.READY, {"epochs": "3"})
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": "net", "version": 2}]
    version = client.get_model_version("net", second.version)
    assert (version.run_id, version.source, version.status) == (run.run_id, model.artifact_location, "READY")
    monkeypatch.setattr(process_wide, tracking)
    third = log()
    assert client.get_model_version("net", "3").source == third.model_uri
    assert [entry.path for entry in client.list_logged_model_artifacts(first.model_id)] == [
        *("MLmodel", "conda.yaml", "data", "input_example.json", "python_env.yaml", "requirements.txt"),
        "serving_input_example.json",
    ]


def test_the_directory_is_what_mlflow_writes_with_the_training_environment(h5, tmp_path):
    target = build_directory(h5, facts(python="3.9.18"), tmp_path / "model", run_id="r", model_id="m-1")
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
    target = build_directory(h5, facts(), tmp_path / "model", run_id=None)
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
    target = build_directory(h5, facts(**changes), tmp_path / "model", run_id=None)
    lines = (target / "requirements.txt").read_text().splitlines()
    if requirements is None:  # a training environment that has MLflow keeps its own
        assert lines == changes["requirements"]
    else:
        assert lines[0].startswith("mlflow==3.")
        assert lines[1:] == requirements


@pytest.mark.parametrize(
    ("keras", "requirements", "expected"),
    [
        ("3.15.1", ["keras==3.15.1"], "keras"),
        ("2.15.0", ["tensorflow==2.15.1", "keras==2.15.0"], "tensorflow.keras"),
        ("2.19.0", ["tensorflow==2.19.0", "tf_keras==2.19.0"], "tf_keras"),
        ("2.19.0", ["tensorflow==2.19.0", "tf-keras==2.19.0"], "tf_keras"),
        ("2.4.0-tf", ["keras==3.15.1"], "keras"),  # an old file, loaded and trained on by a newer Keras
        ("2.4.0-tf", [], "tensorflow.keras"),
    ],
)
def test_keras_module(keras, requirements, expected):
    assert facts(keras=keras, requirements=requirements).keras_module == expected


PAIR = [{"name": "a", "shape": [8, 4], "dtype": "int32"}, {"name": "b", "shape": [-1], "dtype": "string"}]
UNNAMED = [{**PAIR[0], "name": None}, PAIR[1]]
BRAIN = [{"name": "y", "shape": [-1, 4], "dtype": "bfloat16"}]


@pytest.mark.parametrize(
    ("inputs", "outputs", "names", "note"),
    [
        (PAIR, PAIR, ["a", "b"], None),
        (PAIR, None, ["a", "b"], "no outputs"),
        (PAIR, BRAIN, ["a", "b"], "no outputs"),
        (None, PAIR, None, "no signature"),
        (UNNAMED, PAIR, None, "no signature"),
    ],
)
def test_signature(inputs, outputs, names, note, client, run, h5):
    logged = log_model(
        client,
        experiment_id=run.experiment_id,
        run_id=run.run_id,
        file=h5,
        facts=facts(inputs=inputs, outputs=outputs),
    )
    place = Path(client.get_logged_model(logged.model_id).artifact_location.removeprefix("file://"))
    signature = yaml.safe_load((place / "MLmodel").read_text()).get("signature")
    if names is None:
        assert signature is None
    else:
        specs = json.loads(signature["inputs"])
        assert [spec["name"] for spec in specs] == names
        assert [spec["tensor-spec"]["shape"] for spec in specs] == [[-1, 4], [-1]]
        assert (signature["outputs"] is None) == (note is not None)
    assert len(logged.notes) == (note is not None)
    assert note is None or note in logged.notes[0]


def test_another_backend_is_noted(client, run, h5):
    made = facts(backend="torch", requirements=["torch==2.9.0", "keras==3.15.1"])
    logged = log_model(client, experiment_id=run.experiment_id, run_id=run.run_id, file=h5, facts=made)
    assert logged.notes == ("It was trained on Keras' torch backend, and loads on TensorFlow.",)


@pytest.mark.parametrize(
    "change",
    [
        {"keras": None},
        {"keras": "3.15.1\n--index-url=http://evil"},
        {"python": "3"},
        {"format": "onnx"},
        {"requirements": ["keras==3\n-r /etc/passwd"]},
        {"requirements": ["--index-url=http://evil"]},
        {"requirements": ["keras @ http://evil"]},
        {"requirements": "keras"},
        {"inputs": [{"name": "a", "shape": [None, 3], "dtype": "float32"}]},
        {"inputs": [{"shape": [3]}]},
        {"inputs": 3},
        {"outputs": [{"name": 3, "shape": [3], "dtype": "float32"}]},
    ],
    ids=str,
)
def test_a_bad_record_is_refused_by_its_key(change):
    (key,) = change
    with pytest.raises(ModelError, match=f"has no usable '{key}'"):
        facts(**change)


def test_a_record_of_an_error_is_that_error():
    with pytest.raises(ModelError, match="holds weights without a model"):
        ModelFacts.from_record({"file": "a.h5", "error": "a.h5 holds weights without a model"})


def test_a_bad_file_is_refused_before_anything_is_created(client, run, tmp_path, h5):
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
            log_model(client, experiment_id=run.experiment_id, run_id=run.run_id, file=file, facts=facts())
    assert models_of(client, run) == []
    assert client.get_run(run.run_id).outputs.model_outputs == []


class Broken(MlflowClient):
    """A client one of whose calls fails, as when a server goes away between two."""

    def __init__(self, tracking: str, broken: str) -> None:
        super().__init__(tracking)

        def fail(*_args, **_kwargs):
            raise MlflowException("the server is gone.\nwith a traceback")

        setattr(self, broken, fail)


@pytest.mark.parametrize("broken", ["log_model_artifacts", "log_outputs", "create_model_version", "set_logged_model_tags"])
def test_a_failure_leaves_a_failed_model_and_no_empty_registered_one(broken, tracking, client, run, h5):
    name = f"net {broken}"
    with pytest.raises(ModelError, match=r"could not be made an MLflow model: the server is gone\.$") as caught:
        log_model(
            Broken(tracking, broken),
            experiment_id=run.experiment_id,
            run_id=run.run_id,
            file=h5,
            facts=facts(),
            register=name,
        )
    assert isinstance(caught.value.__cause__, MlflowException)
    assert [model.status for model in models_of(client, run)] == [LoggedModelStatus.FAILED]
    with pytest.raises(MlflowException, match="not found"):
        client.get_registered_model(name)


def test_a_failure_leaves_a_registered_model_that_was_there(tracking, client, run, h5):
    client.create_registered_model("waiting for its first")
    with pytest.raises(ModelError):
        log_model(
            Broken(tracking, "create_model_version"),
            experiment_id=run.experiment_id,
            run_id=run.run_id,
            file=h5,
            facts=facts(),
            register="waiting for its first",
        )
    assert client.get_registered_model("waiting for its first").latest_versions == []


def test_a_name_that_mlflow_refuses(client, run, h5):
    with pytest.raises(ModelError, match="could not be made an MLflow model: Invalid model name"):
        log_model(
            client,
            experiment_id=run.experiment_id,
            run_id=run.run_id,
            file=h5,
            facts=facts(),
            register="a/b",
        )
    assert [model.status for model in models_of(client, run)] == [LoggedModelStatus.FAILED]
