"""MLflow in a rank: what its calls become, what it is answered, what it is refused; with the package installed nowhere.

``make contract`` runs it with the oldest and the newest MLflow that are supported (CONTRACT_MLFLOW names folders of them).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from script_rank import ScriptRank

RUN = "0" * 32
VERSIONS = [None, *filter(None, os.environ.get("CONTRACT_MLFLOW", "").split(os.pathsep))]

LOGS = """
import json, os, sys, warnings
import importlib.metadata
import mlflow, mlflow.pyfunc, numpy

found = {"version": mlflow.__version__, "ours": str(importlib.metadata.distribution("mlflow-batchai").locate_file(""))}
mlflow.set_experiment("another")
mlflow.set_experiment(experiment_id="777")
with mlflow.start_run() as run:
    found["run"] = [run.info.run_id, run.info.experiment_id, run.info.run_name, run.data.params]
    mlflow.log_param("epochs", 6)
    mlflow.log_params({"rate": 0.1, "long": "x" * 7000})
    mlflow.log_metric("loss", 0.5, step=1)
    mlflow.log_metrics({"acc": float("nan"), "f1": 2}, step=2)
    mlflow.log_metric("late", 1, synchronous=False)
    mlflow.flush_async_logging()
    mlflow.set_tags({"u": 1, "gone": 1, "batchai.cancel": "true"})
    mlflow.delete_tag("gone")
    mlflow.log_metric("loss", 0.25, step=1)
    mlflow.log_text("hello", "d/hello.txt")
    mlflow.log_text("odd", "d %20/odd.txt")
    mlflow.log_dict({"a": 1}, "d.json")
    os.makedirs("many/below")
    for name in ("many/a", "many/below/b"):
        with open(name, "w") as file:
            file.write(name)
    mlflow.log_artifacts("many", "m")
    mlflow.log_artifact("many/a")
    dataset = mlflow.data.from_numpy(numpy.zeros((2, 2)), name="digits")
    mlflow.log_input(dataset, context="training")
    for bad in (lambda: mlflow.log_metric("loss (train)%", 1), lambda: mlflow.log_text("x", "../out.txt")):
        try:
            bad()
            found["bad"] = "taken"
        except mlflow.exceptions.MlflowException as error:
            found.setdefault("refused", []).append(error.error_code)
    found["history"] = [(m.step, m.value) for m in mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")]
    found["listed"] = [file.path for file in mlflow.artifacts.list_artifacts(run_id=run.info.run_id)]
    with open(mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path="d/hello.txt")) as file:
        found["read"] = [file.read()]
    found["read"].append(mlflow.artifacts.load_text(mlflow.get_artifact_uri("d/hello.txt")))
    found["read"].append(mlflow.artifacts.load_text(mlflow.get_artifact_uri("d %20/odd.txt")))

    class Echo(mlflow.pyfunc.PythonModel):
        def predict(self, context, model_input: list[str]) -> list[str]:
            return model_input

    info = mlflow.pyfunc.log_model(name="net", python_model=Echo(), pip_requirements=[], params={"depth": 3})
    found["model"] = info.model_id
    mlflow.set_logged_model_tags(info.model_id, {"kind": "echo"})
    mlflow.log_metric("score", 3, step=4, model_id=info.model_id)
    found["echo"] = mlflow.pyfunc.load_model(info.model_uri).predict(["a"])
found["ended"] = mlflow.last_active_run().info.status
with mlflow.start_run(run_name="another") as again:
    found["again"] = [again.info.run_id, again.info.run_name]
found["searched"] = [run.info.run_id for run in mlflow.search_runs(output_format="list", filter_string="metrics.f1 = 2")]
found["searched"] += mlflow.search_runs(output_format="list", filter_string="metrics.f1 = 3")
found["experiments"] = [one.name for one in mlflow.search_experiments()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda version: Path(version or "installed").name)
def version(request):
    return None if request.param is None else Path(request.param)


@pytest.fixture(scope="module")
def logged(tmp_path_factory, version):
    """(the rank, what its script found, what it said)"""
    rank = ScriptRank(tmp_path_factory.mktemp("rank"), version=version)
    done = rank.run(LOGS)
    assert done.returncode == 0, done.stderr
    return rank, json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_it_takes_the_job_s_run(logged, version):
    """Also from scripts that set an experiment of their own, which MLflow's own backend fails for (mlflow 2735)."""
    rank, found, said = logged
    assert version is None or version.name == f"mlflow-{found['version']}"
    assert found["ours"] == rank.environment["PYTHONPATH"].split(os.pathsep)[0]
    assert found["run"] == [RUN, "7", "seen", {"epochs": "5"}]
    assert (found["again"], found["ended"], found["experiments"]) == ([RUN, "another"], "FINISHED", ["exp"])
    assert found["searched"] == [RUN]
    assert "experiment 'another' is not used: the job's run lies in 'exp'" in said
    assert "experiment '777' is not used" in said
    assert "a job has one run" in said
    assert [record["values"] for record in rank.records("tag")][-1] == {"mlflow.runName": "another"}


def test_metrics_params_and_tags(logged):
    rank, found, said = logged
    values = [(record["step"], record["values"]) for record in rank.records("metric")]
    assert values == [
        (1, {"loss": 0.5}), (2, {"acc": "nan", "f1": 2.0}), (0, {"late": 1.0}), (1, {"loss": 0.25}), (4, {"score": 3.0}),
    ]  # fmt: skip
    assert all(record["every"] for record in rank.records("metric"))
    params = {key: value for record in rank.records("param") for key, value in record["values"].items()}
    assert params == {"epochs": "6", "rate": "0.1", "long": "x" * 6000}
    assert "param 'epochs' is '5' in the run already: '6' is not kept" in said
    tags = {key: value for record in rank.records("tag") for key, value in record["values"].items()}
    assert tags == {"u": "1", "gone": None, "mlflow.runName": "another"}
    assert len(found["refused"]) == 2 and "bad" not in found
    assert found["history"] == [[1, 0.5], [1, 0.25]]


def test_artifacts_lie_on_the_share_before_they_are_told_of(logged):
    rank, found, _ = logged
    told = {record["path"]: record["size"] for record in rank.records("artifact") if record["path"].startswith("run/")}
    expected = {"run/d/hello.txt": 5, "run/d.json": 12, "run/m/a": 6, "run/m/below/b": 12, "run/a": 6, "run/d %20/odd.txt": 3}
    assert told == expected
    assert all((rank.artifacts / path).stat().st_size == size for path, size in told.items())
    assert found["listed"] == ["a", "d", "d %20", "d.json", "m"]
    assert found["read"] == ["hello", "hello", "odd"]


def test_datasets(logged):
    (record,) = logged[0].records("dataset")
    assert (record["name"], record["tags"]) == ("digits", {"mlflow.data.context": "training"})


def test_a_logged_model(logged):
    rank, found, _ = logged
    told = rank.records("logged_model")
    assert {record["id"] for record in told} == {found["model"]}
    assert (told[0]["name"], told[0]["params"]["depth"], told[0]["params"]["rate"]) == ("net", "3", "0.1")
    assert [record["status"] for record in told if "status" in record] == ["READY"]
    assert [record["step"] for record in told if "step" in record] == [0]
    assert {"kind": "echo"} in [record["tags"] for record in told if "tags" in record]
    assert ("score", 4) in [(one["key"], one["step"]) for record in told for one in record.get("metrics", [])]
    assert f"models/{found['model']}/MLmodel" in [record["path"] for record in rank.records("artifact")]
    assert found["echo"] == ["a"]


REFUSED = """
import mlflow
for call in (
    lambda: mlflow.create_experiment("x"),
    lambda: mlflow.delete_run("0" * 32),
    lambda: mlflow.MlflowClient().get_run("1" * 32),
    lambda: mlflow.register_model("models:/m-1", "net"),
    lambda: mlflow.MlflowClient().search_registered_models(),
    lambda: mlflow.set_experiment_tag("a", "b"),
    lambda: mlflow.MlflowClient().rename_experiment("7", "b"),
):
    try:
        call()
        print("done")
    except mlflow.exceptions.MlflowException as error:
        print(error.message)
with mlflow.start_run():
    mlflow.log_param("a", 1)
    with mlflow.start_run(nested=True):
        pass
"""


def test_the_rest_is_refused_in_a_sentence(tmp_path, version):
    done = ScriptRank(tmp_path, version=version).run(REFUSED)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert [line.split(" ")[0] for line in lines] == [
        "create_experiment", "delete_run", "run", "the", "the", "set_experiment_tag", "rename_experiment",
    ]  # fmt: skip
    assert lines[3] == lines[4] and "model: {register: NAME}" in lines[3]
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{tmp_path}/train.py:19: mlflow: a nested run can't be made on a node"), done.stderr
    assert "Traceback" not in done.stderr


OTHERS = """
import sys
import mlflow
mlflow.log_params({"a": 1, "b": 2})
mlflow.log_metric("loss", 1, step=3)
mlflow.set_tags({"mine": "yes", "mlflow.note.content": "no"})
mlflow.log_text("x", "d/x.txt")
with mlflow.start_run(run_name="renamed") if not mlflow.active_run() else mlflow.active_run():
    class Echo(mlflow.pyfunc.PythonModel):
        def predict(self, context, model_input: list[str]) -> list[str]:
            return model_input
    mlflow.pyfunc.log_model(name="net", python_model=Echo(), pip_requirements=[])
    info = mlflow.last_logged_model()
print([file.path for file in mlflow.artifacts.list_artifacts(run_id="0" * 32)])
sys.stdout.flush()
mlflow.pyfunc.load_model(info.model_uri)
"""


@pytest.mark.parametrize("everybody", [False, True])
def test_other_ranks(tmp_path, version, everybody):
    rank = ScriptRank(tmp_path, rank=1, version=version, allRanks=everybody)
    done = rank.run(OTHERS)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "what rank 1 logs by MLflow is not kept, so it can't be read" in done.stderr.splitlines()[-1]
    said = [rank.records(kind) for kind in ("param", "metric", "tag", "artifact", "logged_model")]
    if not everybody:
        assert said == [[]] * 5 and not rank.artifacts.exists()
        return
    assert [record["values"] for record in said[0]] == [{"rank_1/a": "1", "rank_1/b": "2"}]
    assert [(record["rank"], record["values"]) for record in said[1]] == [(1, {"rank_1/loss": 1.0})]
    assert [record["values"] for record in said[2]] == [{"rank_1/mine": "yes"}]
    assert [record["path"] for record in said[3]] == ["run/rank_1/d/x.txt"]
    assert said[4] == []
    assert done.stdout.splitlines()[-1] == "['d']"


FORKS = """
import multiprocessing, threading
import mlflow
from mlflow_batchai.training import report

store = mlflow.MlflowClient()._tracking_client.store
def held():
    with report._Process.lock, report._Process.spool.lock, store._lock:
        taken.set()
        done.wait()
taken, done = threading.Event(), threading.Event()
mlflow.log_metric("loss", 1, step=1)
threading.Thread(target=held).start()
taken.wait()
child = multiprocessing.get_context("fork").Process(target=lambda: mlflow.log_metric("loss", 2, step=2))
child.start()
child.join(20)
print(child.exitcode)
child.kill()
done.set()
"""


def test_a_child_process_that_was_made_while_another_thread_logged(tmp_path):
    rank = ScriptRank(tmp_path / "a%20b")  # what MLflow would take for a space
    done = rank.run(FORKS + "mlflow.log_text('x', 'x.txt')")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "0"), done.stderr
    assert [record["step"] for record in rank.records("metric")] == [1, 2]
    assert (rank.artifacts / "run" / "x.txt").read_text() == "x"


UNMOUNTED = """
import os, threading, mlflow
share, aside = "share", "elsewhere"
os.rename(share, aside)
os.mkdir(share)
def mount():
    os.rmdir(share)  # which is possible for an empty folder only
    os.rename(aside, share)
threading.Timer(1.0, mount).start()
mlflow.log_text("x", "d/x.txt")
"""


def test_a_share_that_is_not_mounted_just_now(tmp_path):
    rank = ScriptRank(tmp_path)
    done = rank.run(UNMOUNTED)
    assert done.returncode == 0, done.stderr
    assert (rank.artifacts / "run" / "d" / "x.txt").read_text() == "x"


def test_outside_of_a_job(tmp_path):
    rank = ScriptRank(tmp_path)
    del rank.environment["BATCHAI_SPOOL"]
    done = rank.run("import mlflow; mlflow.log_param('a', 1)")
    assert done.returncode == 1
    assert "batchai://job is there for the ranks of a job only" in done.stderr and "Traceback" not in done.stderr
