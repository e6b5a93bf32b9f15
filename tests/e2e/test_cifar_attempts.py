"""The CIFAR project over three attempts, with other ranks each: one lost a rank, one was terminated, one comes to its end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Cli
from ssh_world import HereClient

PROJECT = Path(__file__).parents[2] / "projects" / "cifar_horovod"
EPOCHS = 10  # of one worker

pytestmark = pytest.mark.timeout(600)


def images(path: Path) -> Path:
    """A few random images: an epoch takes a second."""
    rng = np.random.default_rng(0)
    arrays = {f"x_{name}": rng.integers(0, 256, (count, 32, 32, 3), np.uint8) for name, count in (("train", 256), ("test", 8))}
    classes = {f"y_{name}": rng.integers(0, 10, (count, 1), np.uint8) for name, count in (("train", 256), ("test", 8))}
    np.savez(path, **arrays, **classes)
    return path


def weights_are_whole(marker: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        weights = marker.with_name(f"{marker.stem}.weights.h5")
        return bool(json.loads(marker.read_text())["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest())
    return False


def test_two_ranks_then_one_then_two(world: Any, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """``retries: 1`` after a kill on the node that is left, from the checkpoint before a damaged one; ``job retry`` after SIGTERM."""
    import mlflow

    HereClient(world, monkeypatch)
    terms = {"retries": 1, "minNodes": 1}
    parameters = {"data": str(images(world.root / "a.npz")), "epochs": EPOCHS, "batch_size": 16, "augment": "false"}
    handle = mlflow.projects.run(
        str(PROJECT), backend="batchai", backend_config=terms, synchronous=False, parameters=parameters
    )
    run = world.client.get_run(handle.run_id)
    name = run.data.tags["batchai.job"]
    checkpoints = world.folder(run) / "outputs" / "models" / "checkpoints"
    weights, marker = checkpoints / "epoch-0002.weights.h5", checkpoints / "epoch-0002.json"
    rank = world.wait(world.rank_1)
    assert cli("cluster", "resize", "-n", "local", "-t", "1", "--node-deallocation-option", "waitforjobcompletion").code == 0
    world.wait(marker.exists, 120)
    rank.send_signal(signal.SIGKILL)
    os.truncate(weights, 1000)

    # Attempt 2 has made it anew, or is further.
    world.wait(lambda: weights_are_whole(marker) or (checkpoints / "epoch-0003.json").exists(), 120)
    assert cli("job", "terminate", name, "-y").code == 0
    run = world.client.get_run(run.info.run_id)
    assert (run.info.status, run.data.tags["batchai.attempt"]) == ("KILLED", "2")
    second = world.log("attempt-2/stdout.txt", run)
    assert "Resuming after epoch 1, trained by 2 ranks, from epoch-0001.weights.h5" in second
    assert f"1 rank trains {EPOCHS - 2} more epochs." in second
    assert "checkpoint epoch-0002 in" in world.log("attempt-2/stderr.txt", run)
    ((done, last),) = re.findall(r"SIGTERM: saved after epoch (\d)(?: and \d+ batches)? as (.*)", second)
    assert (checkpoints / last).exists() and "Traceback" not in world.log("attempt-2/stderr.txt", run)

    assert cli("cluster", "resize", "-n", "local", "-t", "2").code == 0
    assert cli("job", "retry", name).code == 0
    assert cli("job", "wait", name).code == 0
    run = world.client.get_run(run.info.run_id)
    assert (run.info.status, run.data.tags["batchai.attempt"]) == ("FINISHED", "3")
    third = world.log("attempt-3/stdout.txt", run)
    left = math.ceil((EPOCHS - 2 - (int(done) - 1)) / 2)
    assert f"trained by 1 rank, from {last}" in third and f"2 ranks train {left} more epochs each." in third
    assert "metric values came for a step that had one; the first stands" in run.data.tags["batchai.notes"]
    for metric in ("loss", "val_accuracy", "learning_rate"):
        points = world.client.get_metric_history(run.info.run_id, metric)
        assert [point.step for point in points] == list(range(int(done) + left)), metric
    rates = [point.value for point in points]
    expected = [2e-4, 2e-4, *[1e-4] * (int(done) - 2), *[2e-4] * left]  # the second epoch was reported by two ranks first
    assert rates == pytest.approx(expected, rel=1e-3)
