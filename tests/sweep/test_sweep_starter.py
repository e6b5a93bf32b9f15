"""The jobs of a sweep before they exist: all of one code, whatever is edited meanwhile, and read once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from notify_channel import Channel
from sweep_world import plan

from mlflow_batchai.agent.plan import Notify
from mlflow_batchai.client import submitting
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.engines.base import CheckResult
from mlflow_batchai.engines.local_hosts import LocalHosts
from mlflow_batchai.errors import BatchAIError
from mlflow_batchai.storage import objects
from mlflow_batchai.sweep import starter
from mlflow_batchai.sweep.starter import JobStarter, code_hash
from mlflow_batchai.sweep.sweeps import Sweep
from mlflow_batchai.tracking import runs

MLPROJECT = """
name: toy
entry_points:
  main:
    parameters: {lr: float, data: path}
    command: python train.py {lr} {data}
"""
COMBINATIONS = [{"lr": lr, "data": "data.csv"} for lr in ("0.1", "0.2", "0.3")]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "MLproject").write_text(MLPROJECT)
    (folder / "train.py").write_text("print(1)")
    (tmp_path / "data.csv").write_text("1,2")
    return folder


def check(project: Path, combinations: Any = COMBINATIONS) -> Any:
    return starter.check(plan(uri=str(project), cwd=str(project.parent)), combinations, print)


def test_as_many_jobs_at_once_as_have_nodes_that_can_be_used(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as many as a cluster without a limit of its own would take: Slurm's is the number of nodes that anybody has."""
    monkeypatch.setattr(Cluster, "open_nodes", 10000)
    monkeypatch.setattr(LocalHosts, "check", lambda *_: CheckResult(4))
    monkeypatch.chdir(project)
    fields = dict.fromkeys(("version", "env_manager", "parallel", "metric", "mode"))
    given = {"name": "toy", "entry_point": "main", **fields}
    settings = '{"properties": {"nodeCount": 2, "customToolkitSettings": {}}}'
    made, _ = starter.plan_sweep(str(project), [{"lr": "1", "data": "../data.csv"}], print, settings, None, **given)
    assert made.parallel == 3


@pytest.mark.parametrize(
    ("is_own", "file", "text", "words"),
    [
        (False, "train.py", "print(1)", "is not signed with this user's key"),
        (True, "train.py", "print(2)", "has changed since sweep toy was started"),
        (True, "new.py", "", "has changed since sweep toy was started"),
        (True, "MLproject", "name: toy", "there is no entry point 'main'"),
    ],
)
def test_a_sweep_whose_jobs_can_not_be_started_from_here(project: Path, is_own: bool, file: str, text: str, words: str) -> None:
    code = code_hash(check(project))
    (project / file).write_text(text)
    kept = plan(uri=str(project), cwd=str(project.parent), combinations=COMBINATIONS, code=code)
    with pytest.raises(BatchAIError, match=words):
        JobStarter(Sweep(kept, "id", "0", runs.absolute("sqlite:///m.db", project.parent), is_own), print)


def test_files_are_read_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the code and of inputs, however many jobs there are; one that has changed is read again, and one that has just been."""
    read: list[str] = []
    real = objects._hash
    monkeypatch.setattr(objects, "_hash", lambda path: read.append(path.name) or real(path))
    monkeypatch.setattr(objects, "JUST_NOW_NS", 0)
    check(project)
    assert sorted(read) == ["MLproject", "data.csv", "train.py"]
    (project.parent / "data.csv").write_text("1,2,3")
    check(project)
    assert read[3:] == ["data.csv"]


def test_people_are_told_of_the_sweep_and_not_of_each_job(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    channel, submitted, said = Channel(), [], []
    (project / "batchai.yaml").write_text(f"notify: {{url: '{channel.url}/s3cret', on: [failed]}}")
    kept = plan(uri=str(project), cwd=str(project.parent), combinations=COMBINATIONS, code=code_hash(check(project)))
    store = runs.absolute("http://127.0.0.1:1", project.parent)
    monkeypatch.setattr(submitting, "submit", lambda ready, *_, **__: submitted.append(ready.prepared.plan.notify))
    monkeypatch.setattr(runs, "client", lambda tracking: SimpleNamespace(get_experiment=str))
    made = JobStarter(Sweep(kept, "id", "0", store), said.append)
    made.submit(1)
    assert submitted == [Notify()]
    for state in ("succeeded", "failed"):
        made.tell(state, "2 succeeded, 1 failed")
    channel.close()
    ((path, _, body),) = channel.posts
    assert path == "/s3cret" and said == [] and body["text"].startswith("sweep toy failed http://127.0.0.1:1/#/experiments/0/")
    assert body["text"].endswith("\n```\n2 succeeded, 1 failed\n```")
