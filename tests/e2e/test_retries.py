"""A job that fails starts again by itself: after a rank's failure, a lost node, a dead follower; and what ends that."""

from __future__ import annotations

import json
from typing import Any

# Says which attempt it is, fails in those that FAIL names.
TOY = """
    import os, sys, time
    from mlflow_batchai.training import report
    attempt = os.environ["BATCHAI_ATTEMPT"]
    report.log(step=int(attempt), loss=1.0)
    report.log(step=0, start=float(attempt))
    print("attempt", attempt, "of", os.environ.get("HOROVOD_SIZE", 1), "with", len(os.environ.get("TOKEN", "")), flush=True)
    if attempt in os.environ.get("FAIL", "1").split():
        sys.exit(int(attempt) + 2)
"""


def project(world: Any, name: str = "toy", **document: Any) -> Any:
    return world.project(TOY, batchai=json.dumps(document), name=name)


def points(world: Any, run: Any, key: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in world.client.get_metric_history(run.info.run_id, key)]


def test_a_rank_that_fails_once(world: Any) -> None:
    """The job goes on in its run and folder, with its secret; what was stored stands."""
    secrets = {"secrets": [{"name": "TOKEN", "value": "s3cr3t-canary"}]}
    result = world.run(project(world, retries=1, properties=secrets))
    assert result.returncode == 0, result.stderr
    run = world.last
    assert (run.info.status, run.data.tags["batchai.attempt"]) == ("FINISHED", "2")
    assert points(world, run, "loss") == [(1, 1.0), (2, 1.0)]
    assert points(world, run, "start") == [(0, 1.0)]
    assert "attempt 1 ended: " in run.data.tags["batchai.notes"]
    assert world.log("attempt-2/stdout.txt") == world.artifact("stdouterr/attempt-2/stdout.txt") == "attempt 2 of 1 with 13\n"
    assert world.artifact("stdouterr/stdout.txt") == "attempt 1 of 1 with 13\n"
    for file in world.home.rglob("*"):
        assert not file.is_file() or b"s3cr3t-canary" not in file.read_bytes(), file
    print(result.stderr)
