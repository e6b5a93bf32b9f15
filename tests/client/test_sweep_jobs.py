"""The jobs of a sweep before they exist: all of one code, whatever is edited meanwhile, and read once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sweep_world import plan

from mlflow_batchai import submitting
from mlflow_batchai.errors import ParameterError
from mlflow_batchai.shares import objects
from mlflow_batchai.sweep.jobs import Jobs, JobsOfPlan
from mlflow_batchai.sweep.plan import UnstartableError, code_hash

MLPROJECT = """
name: toy
entry_points:
  main:
    parameters: {lr: float, data: path}
    command: python train.py {lr} {data}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "MLproject").write_text(MLPROJECT)
    (folder / "train.py").write_text("print(1)")
    (tmp_path / "data.csv").write_text("1,2")
    return folder


COMBINATIONS = [{"lr": lr, "data": "data.csv"} for lr in ("0.1", "0.2", "0.3")]


def jobs(project: Path) -> Jobs:
    source = submitting.read(str(project), "main", {}, None, {}, print)
    return Jobs(source, None, project.parent, print)


def test_all_have_the_code_of_the_first(project: Path) -> None:
    made = jobs(project)
    first = made.check(COMBINATIONS)
    (project / "train.py").write_text("print(2)")
    (project / "new.py").write_text("")
    later = made._prepare(COMBINATIONS[1])
    assert later.prepared.plan.code == first.prepared.plan.code
    assert later.prepared.parameters["lr"] == "0.2" and later.prepared.job_id != first.prepared.job_id
    changed = jobs(project).check(COMBINATIONS)
    assert code_hash(changed.prepared.plan.code) != code_hash(first.prepared.plan.code)


def test_which_combination_is_wrong(project: Path) -> None:
    with pytest.raises(ParameterError, match=r"'lr' should be a number, not 'x' \(combination 2 of 2: lr=x, data=data.csv\)"):
        jobs(project).check([COMBINATIONS[0], {"lr": "x", "data": "data.csv"}])


def test_a_project_that_is_not_what_it_was(project: Path) -> None:
    kept = plan(uri=str(project), cwd=str(project.parent), combinations=COMBINATIONS)
    nothing: Any = SimpleNamespace(is_own=True, name="toy")
    with pytest.raises(UnstartableError, match=r"has changed since sweep toy was started"):
        JobsOfPlan(kept, print).submit(nothing, nothing, 1)
    (project / "MLproject").unlink()
    with pytest.raises(
        UnstartableError, match=r"jobs of sweep toy can't be started from here: .*there is no entry point 'main'"
    ):
        JobsOfPlan(kept, print).submit(nothing, nothing, 1)


def test_files_are_read_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the code and of inputs, however many jobs there are; one that has changed is read again, and one that has just been."""
    read: list[str] = []
    real = objects._hash
    monkeypatch.setattr(objects, "_hash", lambda path: read.append(path.name) or real(path))
    monkeypatch.setattr(objects, "JUST_NOW_NS", 0)
    jobs(project).check(COMBINATIONS)
    assert sorted(read) == ["MLproject", "data.csv", "train.py"]
    (project.parent / "data.csv").write_text("1,2,3")
    jobs(project).check(COMBINATIONS)
    assert read[3:] == ["data.csv"]
    monkeypatch.setattr(objects, "JUST_NOW_NS", 3_600_000_000_000)
    jobs(project).check(COMBINATIONS[:1])
    assert len(read) == 7
