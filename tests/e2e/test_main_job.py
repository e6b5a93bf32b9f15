"""The product's reason to exist: the CIFAR project, trained with real Horovod, its model loaded again from MLflow."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "projects" / "cifar_horovod"
METRICS = {"loss", "accuracy", "val_loss", "val_accuracy", "learning_rate", "images_per_second"}

pytestmark = pytest.mark.timeout(600)

# Loads the registered model, the logged model and the raw artifact in one process, and predicts on the job's own test images.
LOAD = """
import json, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import warnings; warnings.simplefilter("ignore")
import keras, mlflow, numpy as np
sys.path.insert(0, sys.argv[1])
import images
run, h5, name = sys.argv[2:5]
data = images.load("digits", None)
x = np.asarray(data.x_test[:50], "float32") / 255
raw = keras.models.load_model(h5).predict(x, verbose=0)
found = {}
for uri in (f"models:/{name}/1", f"runs:/{run}/model"):
    model = mlflow.pyfunc.load_model(uri)
    found[uri] = float(np.abs(np.asarray(model.predict(x)) - raw).max())
y = np.asarray(data.y_test[:50]).ravel()
signature = model.metadata.signature.to_dict()
print(json.dumps({"difference": found, "accuracy": float((raw.argmax(1) == y).mean()), "signature": signature}))
"""


def test_two_ranks(world: Any) -> None:
    """``mlflow run projects/cifar_horovod --backend batchai``: metrics per epoch, logs, the .h5, a model that loads and is registered."""
    result = world.run(
        PROJECT,
        *("-P", "data=digits", "-P", "epochs=8", "-P", "augment=false", "-P", "learning_rate=0.0004"),
        *("--backend-config", '{"model": {"register": "digits", "alias": "champion", "promoteIf": "test_accuracy"}}'),
        timeout=400,
    )
    assert result.returncode == 0, result.stderr
    run = world.last
    assert run.info.status == "FINISHED" and "batchai.notes" not in run.data.tags
    assert METRICS | {"test_loss", "test_accuracy"} <= set(run.data.metrics)
    for name in METRICS:
        assert [point.step for point in world.client.get_metric_history(run.info.run_id, name)] == [0, 1, 2, 3], name
    assert run.data.metrics["test_accuracy"] > 0.9
    assert run.data.params["epochs"] == "8" and run.data.params["data"] == "digits"

    assert world.client.get_model_version_by_alias("digits", "champion").run_id == run.info.run_id
    assert run.data.tags["batchai.promotion"].startswith("first version (test_accuracy 0.9")
    logged = world.client.get_logged_model(run.data.tags["batchai.model"].removeprefix("models:/"))
    checked = logged.tags["batchai.modelCheck"]
    assert checked.startswith("loaded and tried in ") and "keras 3" in checked
    assert "passed: loaded and tried" in world.log("model-check.txt")
    said = "".join(file.read_text() for file in world.root.rglob("events/*/*.jsonl"))
    assert '"type":"trial"' in said and "checking the model" not in said, "rank 0 tries it before it ends"

    text = Path(logged.artifact_location.removeprefix("file://"), "requirements.txt").read_text()
    assert "tensorflow" in text and "keras==3" in text
    h5 = world.client.download_artifacts(run.info.run_id, "outputs/MODEL/saved_models/keras_cifar10_trained_model.h5")
    loaded = world.call([sys.executable, "-c", LOAD, str(PROJECT), run.info.run_id, h5, "digits"], timeout=200)
    assert loaded.returncode == 0, loaded.stderr
    predicted = json.loads(loaded.stdout.splitlines()[-1])
    assert max(predicted["difference"].values()) <= 1e-5
    assert predicted["accuracy"] > 0.85
    assert "[-1, 32, 32, 3]" in predicted["signature"]["inputs"] and "[-1, 10]" in predicted["signature"]["outputs"]


def test_stock_horovod_on_keras_3_fails(world: Any) -> None:
    """Stock ``hvd.DistributedOptimizer`` on Keras 3 trains each rank on its own; the job fails with both ranks' checksums."""
    project = world.project(
        """
        import os
        import keras, numpy as np
        import horovod.tensorflow.keras as hvd
        hvd.init()
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
        data = np.random.default_rng(hvd.rank()).random((64, 4))
        model.fit(data, data[:, :2], epochs=3, verbose=0)
        """,
        batchai="properties: {nodeCount: 2, horovodSettings: {}}",
    )
    result = world.run(project, timeout=200)
    assert result.returncode == 1
    reason = world.last.data.tags["batchai.reason"]
    assert world.last.info.status == "FAILED"
    assert "rank 0" in reason and "rank 1" in reason and "RanksDivergedError" in reason, reason


def test_hand_started_script_needs_no_job(world: Any) -> None:
    """The same script by hand, one process, no job: it trains and says where the model is."""
    words = f"{PROJECT}/train.py --data digits --epochs 1 --augment false --output {world.root}/out".split()
    done = world.call([sys.executable, *words], timeout=200)
    assert done.returncode == 0, done.stderr
    assert (world.root / "out" / "saved_models" / "keras_cifar10_trained_model.h5").is_file()


def test_four_ranks_with_our_wheel(world: Any) -> None:
    """``--env-manager virtualenv`` builds python_env.yaml, which names horovod, with our wheel, once for both nodes; two ranks each."""
    parameters = ("-P", "data=digits", "-P", "epochs=4", "-P", "augment=false")
    four = '{"properties": {"horovodSettings": {"processCount": 4}}}'
    result = world.run(PROJECT, "--env-manager", "virtualenv", *parameters, "--backend-config", four, timeout=590)
    assert result.returncode == 0, result.stderr
    assert len(list((world.home / "envs").glob("*/.complete"))) == 1
    assert "horovod-0.28.1" in "".join(
        path.read_text() for path in (world.folder() / "stdouterr").glob("stdout-job_prep-node-*.txt")
    )
    python = next((world.home / "envs").glob("*/bin/python"))
    assert f"training interpreter: {python}" in world.log("execution-node-0.log")
    assert "--epochs 4 is what one worker would train: 4 ranks train 1 epoch" in world.log() and [
        step for step, _ in world.points()
    ] == [0]
    exits = [
        json.loads((world.folder() / f"batchai/attempts/1/nodes/{node}/exit.json").read_text().splitlines()[0])
        for node in (0, 1)
    ]
    assert [[rank["rank"] for rank in record["ranks"]] for record in exits] == [[0, 1], [2, 3]]
