"""Scripts that use MLflow and know nothing of us, in jobs: the run has what they logged."""

from __future__ import annotations

import json

import mlflow
import pytest

SCRIPT = """
import os, sys
import mlflow

rank = int(os.environ["BATCHAI_RANK"])
with mlflow.start_run() as run:
    mlflow.log_params({"rate": 0.1, "epochs": 7})
    for step in range(3):
        mlflow.log_metric("loss", 1 / (step + 1) + rank, step=step)
    mlflow.set_tag("kind", "toy")
    mlflow.log_text("rank %d" % rank, "notes/hello.txt")

    class Echo(mlflow.pyfunc.PythonModel):
        def predict(self, context, model_input: list[str]) -> list[str]:
            return model_input

    info = mlflow.pyfunc.log_model(name="net", python_model=Echo(), pip_requirements=[])
print(run.info.run_id, mlflow.__version__)
"""

PROJECT = """
name: toy
entry_points:
  main:
    parameters:
      epochs: {type: float, default: 3}
    command: "python train.py"
"""

BATCHAI = """
ranks: all
properties:
  nodeCount: 2
  horovodSettings: {processCount: 2}
"""


def history(client, run_id, key):
    return [(point.step, point.value) for point in client.get_metric_history(run_id, key)]


def test_two_ranks(world):
    done = world.run(world.project(SCRIPT, mlproject=PROJECT, batchai=BATCHAI))
    assert done.returncode == 0, done.stderr
    client, run = world.client, world.last
    run_id = run.info.run_id
    assert world.log().count(run_id) == 2
    assert run.info.status == "FINISHED"
    assert run.data.params == {"epochs": "3", "rate": "0.1", "rank_1/rate": "0.1", "rank_1/epochs": "7"}
    assert (run.data.tags["kind"], run.data.tags["rank_1/kind"]) == ("toy", "toy")
    assert "param 'epochs' is '3': a script's '7' came later, and is not kept" in run.data.tags["batchai.notes"]
    assert history(client, run_id, "loss") == [(0, 1.0), (1, 0.5), (2, 1 / 3)]
    assert history(client, run_id, "rank_1/loss") == [(0, 2.0), (1, 1.5), (2, 1 / 3 + 1)]
    assert world.artifact("notes/hello.txt") == "rank 0"
    assert world.artifact("rank_1/notes/hello.txt") == "rank 1"
    (output,) = run.outputs.model_outputs
    model = client.get_logged_model(output.model_id)
    assert (model.name, str(model.status), model.source_run_id) == ("net", "READY", run_id)
    mlflow.set_tracking_uri(world.uri)
    loaded = mlflow.pyfunc.load_model(f"models:/{output.model_id}")
    assert loaded.predict(["a"]) == ["a"]
    assert (loaded.metadata.run_id, loaded.metadata.model_id) == (run_id, output.model_id)


AUTOLOG = """
import os
os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import mlflow

mlflow.{flavor}.autolog()
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, activation="softmax")])
model.compile(optimizer=keras.optimizers.SGD(0.25), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
x = np.random.default_rng(0).random((32, 4)).astype("float32")
y = (x.sum(axis=1) > 2).astype("int32")
model.fit(x, y, validation_data=(x, y), epochs=2, batch_size=8, verbose=2)
"""


@pytest.mark.parametrize("flavor", ["keras", "tensorflow"])
def test_autolog(world, flavor):
    done = world.run(world.project(AUTOLOG.replace("{flavor}", flavor)))
    assert done.returncode == 0, done.stderr
    client, run = world.client, world.last
    assert (run.data.params["epochs"], run.data.params["batch_size"]) == ("2", "8")
    assert [step for step, _ in history(client, run.info.run_id, "loss")] == [0, 1]
    # What MLflow logs, which has two names for validation itself.
    ours = {name: history(client, run.info.run_id, name) for name in ("val_loss", "validation_loss")}
    assert [len(points) for points in ours.values()] == [2, 2] and len(run.data.metrics) == 6
    assert "though it was ended" not in world.log("stderr.txt")
    (output,) = run.outputs.model_outputs
    model = client.get_logged_model(output.model_id)
    assert str(model.status) == "READY"
    assert {metric.key for metric in model.metrics} >= {"loss", "accuracy"}
    (given,) = run.inputs.dataset_inputs
    assert json.loads(given.dataset.profile)
    assert "batchai.notes" not in run.data.tags, run.data.tags["batchai.notes"]
    mlflow.set_tracking_uri(world.uri)
    assert mlflow.models.get_model_info(f"models:/{output.model_id}").signature.inputs


TORCH = """
import mlflow
import torch

mlflow.pytorch.autolog()
with mlflow.start_run():
    mlflow.log_metric("loss", 0.5, step=0)
    example = torch.ones(2, 4).numpy()
    mlflow.pytorch.log_model(torch.nn.Linear(4, 3), name="net", input_example=example, pip_requirements=["torch"])
"""


def test_pytorch(world, torch_python):
    (world.home / "clusters").mkdir(parents=True)
    (world.home / "clusters" / "local.yaml").write_text(
        json.dumps({"engine": "local", "nodes": 1, "python": str(torch_python)})
    )
    done = world.run(world.project(TORCH))
    assert done.returncode == 0, done.stderr
    (output,) = world.last.outputs.model_outputs
    assert str(world.client.get_logged_model(output.model_id).status) == "READY"
