"""MLflow's Python API: ``mlflow.projects.run`` waits, fails and cancels as for any backend."""

from __future__ import annotations

import sys
from typing import Any

CODE = """
import mlflow, sys
from mlflow.exceptions import ExecutionException
project, action = sys.argv[1:3]
run = mlflow.projects.run(project, backend="batchai", synchronous=action == "wait")
if action == "cancel":
    import time
    while run.get_status() != "RUNNING":
        time.sleep(0.1)
    run.cancel()
if action == "later":
    print("succeeded:", run.wait())
print("status:", run.get_status(), mlflow.get_run(run.run_id).info.status)
"""


def call(world: Any, project: Any, action: str) -> Any:
    return world.call([sys.executable, "-W", "ignore", "-c", CODE, str(project), action], timeout=90)


def test_synchronous(world: Any) -> None:
    result = call(world, world.project("print('hello')"), "wait")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["hello", "status: FINISHED FINISHED"]


def test_synchronous_failure(world: Any) -> None:
    """A job that fails raises MLflow's ExecutionException, and its run is FAILED."""
    result = call(world, world.project("raise SystemExit('no luck')"), "wait")
    assert result.returncode == 1 and "ExecutionException" in result.stderr
    assert world.last.info.status == "FAILED" and "no luck" in world.last.data.tags["batchai.reason"]


def test_asynchronous_and_wait(world: Any) -> None:
    result = call(world, world.project("print('hello')"), "later")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["hello", "succeeded: True", "status: FINISHED FINISHED"]


def test_cancel(world: Any) -> None:
    result = call(world, world.project("import time; time.sleep(300)"), "cancel")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "status: KILLED KILLED"
    world.wait_gone(10)
