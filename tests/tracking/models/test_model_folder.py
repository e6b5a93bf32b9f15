"""A finished MLflow model folder becomes a logged model as it is, once; one whose paths lead out of it is refused."""

import json
import shutil

import pytest
import yaml
from mlflow.tracking import MlflowClient

from mlflow_batchai.errors import ModelError
from mlflow_batchai.tracking.models.folder import check_folder, log_folder

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


@pytest.fixture
def ids(store_template, tmp_path):
    shutil.copy(store_template, tmp_path / "m.db")
    client = MlflowClient(f"sqlite:///{tmp_path}/m.db")
    experiment = client.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    run = client.create_run(experiment).info.run_id
    return {"client": client, "experiment_id": experiment, "run_id": run, "job": "j"}


def test_it_is_used_as_it_is_and_once(ids, tmp_path):
    client = ids["client"]
    folder = write(tmp_path / "model")
    before = (folder / "MLmodel").read_bytes()
    first = log_folder(**ids, folder=folder, register="net", check="tried")
    assert (folder / "MLmodel").read_bytes() == before
    logged = client.get_logged_model(first.model_id)
    place = client.list_logged_model_artifacts(first.model_id)
    assert [entry.path for entry in place] == ["MLmodel", "data"]
    location = logged.artifact_location.removeprefix("file://")
    with open(f"{location}/MLmodel") as file:
        assert yaml.safe_load(file) == {**MLMODEL, "run_id": ids["run_id"], "model_id": first.model_id}
    assert (logged.tags["batchai.modelCheck"], first.version) == ("tried", "1")
    again = log_folder(**ids, folder=folder, register="net")
    assert (again.model_id, again.version) == (first.model_id, "1")
    other = log_folder(**ids, folder=folder, key="another")
    assert other.model_id != first.model_id


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
def test_paths_that_lead_out_are_refused(changes, message, ids, tmp_path):
    with pytest.raises(ModelError, match=message.replace("\\", "\\\\")):
        log_folder(**ids, folder=write(tmp_path / "model", **changes))
    assert ids["client"].search_logged_models([ids["experiment_id"]]) == []


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
