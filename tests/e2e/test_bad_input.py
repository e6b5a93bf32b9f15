"""Bad input gets one sentence, exit code 1, no run and nothing left running."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

TYPED = """
    name: toy
    entry_points:
      main:
        parameters:
          epochs: {type: int, default: 2}
          rate: {type: float, default: 0.1}
          augment: {type: bool, default: true}
          needed: string
        command: python train.py {epochs}
"""
# name: (MLproject or None, batchai.yaml or None, arguments, what the sentence says); one for each part that reads what was typed.
CASES: dict[str, tuple[str | None, str | None, list[str], str]] = {
    "parameters": (TYPED, None, ["-P", "needed=1", "-P", "epochs=many"], r"whole number"),
    "MLproject": ("entry_points: [", None, [], r"MLproject.*line"),
    "document": (None, "properties: {nodeCont: 2}", [], r"properties\.nodeCont is not a known key; did you mean nodeCount\?"),
    "backend config": (None, None, ["--backend-config", '{"propertys": {}}'], r"propertys is not a known key"),
    "cluster": (None, "cluster: nc6", [], r"no cluster 'nc6'.*clusters are: local"),
    "plan": (None, "properties: {nodeCount: 5}", [], r"nodeCount is 5.*cluster 'local' has 2"),
    "docker args": (None, None, ["-A", "gpus=all"], r"--docker-args"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(world: Any, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """MLflow's own command in this process: a process of its own for each would cost 5 s, and one test below makes sure of it."""
    mlproject, batchai, arguments, sentence = CASES[name]
    project = world.project(mlproject=mlproject, batchai=batchai)
    code, err = in_process(world, monkeypatch, capsys, [str(project), *arguments])
    assert code == 1, err
    assert "Traceback" not in err
    shown = re.search(r"=== (?P<text>.*?) ===\s*$", err, re.S)
    assert shown, err
    assert re.search(sentence, shown.group("text"), re.S), err
    assert world.runs() == []
    assert not (world.home / "nodes").exists()


def in_process(
    world: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> tuple[Any, str]:
    """(exit code, standard error) of ``mlflow run``."""
    import logging

    import mlflow
    from mlflow.cli import run

    monkeypatch.setenv("BATCHAI_HOME", str(world.home))
    monkeypatch.setenv("MLFLOW_DISABLE_ENV_MANAGER_CONDA_WARNING", "TRUE")
    monkeypatch.chdir(world.cwd)
    mlflow.set_tracking_uri(world.uri)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mlflow.cli")
    logger.addHandler(handler)
    try:
        run.main([*arguments, "--backend", "batchai"], prog_name="mlflow run", standalone_mode=False)
        code: Any = 0
    except SystemExit as error:
        code = error.code
    finally:
        logger.removeHandler(handler)
    return code, capsys.readouterr().err + "\n".join(lines)


def test_a_tracking_server_that_is_down(
    world: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said within seconds: MLflow's own patience is minutes, without a word."""
    monkeypatch.setattr(world, "uri", "http://127.0.0.1:9")
    began = time.monotonic()
    code, err = in_process(world, monkeypatch, capsys, [str(world.project())])
    assert code == 1
    said = "the tracking server http://127.0.0.1:9 can't be reached (Connection refused); MLFLOW_TRACKING_URI says which one is asked"
    assert f"=== {said} ===" in err
    assert time.monotonic() - began < 60
    assert not (world.home / "nodes").exists()


def test_refused_by_the_real_command(world: Any) -> None:
    """One of them as its user meets it: a process, its exit code, its output."""
    project = world.project(mlproject=TYPED)
    err = world.refused(project, "-P", "needed=1", "-P", "epochs=abc")
    assert "parameter 'epochs' should be a whole number, not 'abc'" in err
    assert len([line for line in err.splitlines() if "ERROR" in line]) == 1
    assert world.runs() == []


def test_no_place_for_a_store(world: Any) -> None:
    """A folder where MLflow's default store can't be made: one sentence, at once, and no half a minute of retries."""
    uri = "sqlite:////proc/mlflow.db"
    for argv in (world.command(world.project()), [world.command("x")[0].replace("/mlflow", "/batchai"), "job", "list"]):
        result = world.call(argv, timeout=120, MLFLOW_TRACKING_URI=uri)
        assert result.returncode in (1, 2) and "can't be made or written" in result.stderr, result.stderr
        assert "Traceback" not in result.stderr and "will be retried" not in result.stderr
