"""A saved Keras file becomes a registered MLflow model that predicts as before, without TensorFlow here."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from mlflow.entities import LoggedModelStatus
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from saved_models import RECORD, facts

from mlflow_batchai.errors import ModelError
from mlflow_batchai.tracking.models.directory import build_directory
from mlflow_batchai.tracking.models.facts import ModelFacts
from mlflow_batchai.tracking.models.logged import TAG_JOB, find_logged, publish, register
from mlflow_batchai.training.saved_models import describe

# MLflow's own use of SQLAlchemy 2.1.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


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
from functools import partial
from pathlib import Path
from mlflow.tracking import MlflowClient
from mlflow_batchai.tracking.models.directory import build_directory
from mlflow_batchai.tracking.models.facts import ModelFacts
from mlflow_batchai.tracking.models.logged import publish
tracking, run, file, record = sys.argv[1:]
facts = ModelFacts.from_record(__import__("json").loads(record))
publish(MlflowClient(tracking), partial(build_directory, Path(file), facts, run), what=file, run_id=run, job="j")
print(sorted({"tensorflow", "keras", "h5py", "mlflow.tensorflow", "mlflow.pyfunc"} & set(sys.modules)))
"""


def python(code: str, *arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1] if done.stdout else ""


def log(client, run, file, made=None, name="model", to=None):
    """(the logged model of a file, its version of a registered model)"""
    build = partial(build_directory, file, made or facts(), run.run_id)
    model = publish(client, build, what=str(file), run_id=run.run_id, job=run.run_id, name=name)
    return model, register(client, to, model, run.run_id) if to else None


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


def models_of(client, run):
    found = client.search_logged_models([run.experiment_id])
    return [model for model in found if model.source_run_id == run.run_id]


def test_all_formats_load_from_every_uri_and_predict_the_same(tracking, client, run, tmp_path):
    python(TRAIN, cwd=tmp_path)
    one, version = log(client, run, tmp_path / "net.h5", to="cifär net")
    new = tmp_path / "net.keras"
    ends = {key: RECORD[key] for key in ("inputs", "outputs")}
    two, _ = log(client, run, new, ModelFacts.from_record({**describe(str(new)), **ends}), "native")
    assert version == "1"
    # A SavedModel is served by its signature, which takes its inputs by name.
    inputs = [{"name": "keras_tensor", "shape": [-1, 32, 32, 3], "dtype": "float32"}]
    exported = facts(format="saved_model", inputs=inputs, outputs=[{**RECORD["outputs"][0], "name": "output_0"}])
    log(client, run, tmp_path / "exported", exported, "exported")
    uris = [f"runs:/{run.run_id}/model", f"models:/{one.model_id}", "models:/cifär net/1"]
    uris += [f"runs:/{run.run_id}/native", f"models:/{two.model_id}", f"runs:/{run.run_id}/exported"]
    assert python(LOAD, tracking, str(tmp_path / "expected.npz"), *uris, cwd=tmp_path) == "loaded 6"


def test_it_imports_no_framework(tracking, client, run, h5, tmp_path):
    assert python(LOG, tracking, run.run_id, str(h5), json.dumps(RECORD), cwd=tmp_path) == "[]"
    assert [model.status for model in models_of(client, run)] == [LoggedModelStatus.READY]


def test_the_run_shows_the_model_and_the_model_its_version(tracking, client, run, h5, monkeypatch):
    process_wide = "mlflow.tracking._tracking_service.utils._tracking_uri"
    monkeypatch.setattr(process_wide, "sqlite:///elsewhere.db")
    (first, _), (second, version) = log(client, run, h5, to="net"), log(client, run, h5, to="net")
    outputs = client.get_run(run.run_id).outputs.model_outputs
    assert {output.model_id for output in outputs} == {first.model_id, second.model_id}
    model = client.get_logged_model(second.model_id)
    assert (model.name, model.status, model.params) == ("model", LoggedModelStatus.READY, {"epochs": "3"})
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": "net", "version": 2}]
    made = client.get_model_version("net", version)
    assert (made.run_id, made.source, made.status) == (run.run_id, model.artifact_location, "READY")
    monkeypatch.setattr(process_wide, tracking)
    third, _ = log(client, run, h5, to="net")
    assert client.get_model_version("net", "3").source == f"models:/{third.model_id}"
    assert [entry.path for entry in client.list_logged_model_artifacts(first.model_id)] == [
        *("MLmodel", "conda.yaml", "data", "input_example.json", "python_env.yaml", "requirements.txt"),
        "serving_input_example.json",
    ]


def test_each_is_made_once(client, run, h5):
    model, version = log(client, run, h5, to="once")
    left = client.create_logged_model(run.experiment_id, source_run_id=run.run_id, tags={"batchai.job": run.run_id})
    found = find_logged(client, run.run_id, TAG_JOB, run.run_id)
    assert found.model_id == model.model_id and find_logged(client, run.run_id, TAG_JOB, "another") is None
    assert client.get_logged_model(left.model_id).status == LoggedModelStatus.FAILED
    assert register(client, "once", found, run.run_id) == version


class Broken(MlflowClient):
    """A client one of whose calls fails, as when a server goes away between two."""

    def __init__(self, tracking: str, broken: str) -> None:
        super().__init__(tracking)

        def fail(*_args, **_kwargs):
            raise MlflowException("the server is gone.\nwith a traceback")

        setattr(self, broken, fail)


@pytest.mark.parametrize("broken", ["log_model_artifacts", "log_outputs"])
def test_a_failure_leaves_a_failed_model(broken, tracking, client, run, h5):
    with pytest.raises(ModelError, match=r"could not be made an MLflow model: the server is gone\.$") as caught:
        log(Broken(tracking, broken), run, h5, to=f"net {broken}")
    assert isinstance(caught.value.__cause__, MlflowException)
    assert [model.status for model in models_of(client, run)] == [LoggedModelStatus.FAILED]


@pytest.mark.parametrize("broken", ["create_registered_model", "create_model_version", "set_logged_model_tags"])
def test_a_registry_that_fails_leaves_the_model_to_be_registered(broken, tracking, client, run, h5):
    with pytest.raises(ModelError, match=f"model could not be registered as net {broken}: the server is gone"):
        log(Broken(tracking, broken), run, h5, to=f"net {broken}")
    model = find_logged(client, run.run_id, TAG_JOB, run.run_id)
    assert register(client, f"net {broken}", model, run.run_id) == "1"
    assert [version.version for version in client.search_model_versions(f"name = 'net {broken}'")] == [1]


def test_a_name_that_mlflow_refuses(client, run, h5):
    with pytest.raises(ModelError, match="could not be registered as a/b: Invalid model name"):
        log(client, run, h5, to="a/b")
    assert [model.status for model in models_of(client, run)] == [LoggedModelStatus.READY]
