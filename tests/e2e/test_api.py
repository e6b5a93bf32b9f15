"""MLflow's Python API: ``mlflow.projects.run`` waits, fails and cancels as for any backend."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import mlflow
import pytest


@pytest.fixture(autouse=True)
def _here(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the user's."""
    monkeypatch.chdir(world.cwd)
    for name in ("BATCHAI_HOME", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, world.environment[name])


def run(project: Any, **options: Any) -> Any:
    return mlflow.projects.run(str(project), backend="batchai", **options)


def test_synchronous(world: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """In a run that is active the job's is its child, and has its name from the start."""
    with mlflow.start_run() as parent:
        found = run(world.project("print('hello')"), run_name="mine")
    assert capfd.readouterr().out == "hello\n"
    assert (found.get_status(), world.client.get_run(found.run_id).info.status) == ("FINISHED", "FINISHED")
    made = world.client.get_run(found.run_id)
    assert (made.info.run_name, made.data.tags["mlflow.parentRunId"]) == ("mine", parent.info.run_id)
    assert world.client.get_run(parent.info.run_id).data.tags.get("batchai.job") is None


def test_asynchronous(world: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Looked at by another thread than the one that waits; the run is never ahead of what it says, nor behind.

    Without parameters, where MLflow's own backend fails (mlflow 10287).
    """
    project = world.project("import time; time.sleep(1); print('hello'); raise SystemExit(3)")
    given = world.client.create_run("0").info.run_id
    found = run(project, synchronous=False, run_id=given)
    assert found.run_id == world.last.info.run_id == given, "MLflow has not told us the run, and we have found it"
    seen: list[tuple[str, str]] = []

    def look() -> None:
        while not seen or seen[-1][0] in ("SCHEDULED", "RUNNING"):
            seen.append((found.get_status(), world.client.get_run(found.run_id).info.status))

    watcher = threading.Thread(target=look)
    watcher.start()
    assert found.wait() is False, "MLflow's own word for a job that has failed"
    watcher.join(60)
    assert {status for status, _ in seen} <= {"SCHEDULED", "RUNNING", "FAILED"} and seen[-1] == ("FAILED", "FAILED")
    said = capfd.readouterr()
    assert said.out == "hello\n" and "batchai: job toy-" in said.err and "exited with code 3" in said.err


def test_interrupted(world: Any) -> None:
    """What Ctrl-C, or a notebook's stop button, does: Python's own exception, and the job has ended."""

    def interrupt() -> None:
        world.wait(lambda: world.runs() and world.last.info.status == "RUNNING" and world.job_processes())
        os.kill(os.getpid(), signal.SIGINT)

    # A shell's background processes begin with it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            run(world.project("import time; print('up', flush=True); time.sleep(600)"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert world.last.info.status == "KILLED"
    world.wait_gone()
