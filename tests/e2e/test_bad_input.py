"""Bad input gets one sentence, exit code 1, no run and nothing left running."""

from __future__ import annotations

import time
from typing import Any

import pytest


# What each part of the product refuses has its table beside that part's tests; here one of them on its way to the user's terminal.
@pytest.mark.parametrize(
    ("batchai", "arguments", "sentence"),
    [
        ("properties: {nodeCont: 2}", [], "properties.nodeCont is not a known key; did you mean nodeCount?"),
        (None, ["-A", "gpus=all"], "--docker-args"),
    ],
)
def test_refused_by_the_real_command(world: Any, batchai: str | None, arguments: list[str], sentence: str) -> None:
    err = world.refused(world.project(batchai=batchai), *arguments)
    assert sentence in err
    assert len([line for line in err.splitlines() if "ERROR" in line]) == 1
    assert world.runs() == [] and not (world.home / "nodes").exists()


def test_a_tracking_server_that_is_down(world: Any) -> None:
    """Said within seconds: MLflow's own patience is minutes, without a word."""
    world.environment["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9"
    began = time.monotonic()
    assert "=== the tracking server http://127.0.0.1:9 can't be reached (Connection refused); " in world.refused(
        world.project()
    )
    assert time.monotonic() - began < 60
    assert not (world.home / "nodes").exists()


def test_no_place_for_a_store(world: Any) -> None:
    """A folder where MLflow's default store can't be made: one sentence, at once, and no half a minute of retries."""
    uri = "sqlite:////proc/mlflow.db"
    for argv in (world.command(world.project()), [world.command("x")[0].replace("/mlflow", "/batchai"), "job", "list"]):
        result = world.call(argv, timeout=120, MLFLOW_TRACKING_URI=uri)
        assert result.returncode in (1, 2) and "can't be made or written" in result.stderr, result.stderr
        assert "Traceback" not in result.stderr and "will be retried" not in result.stderr
