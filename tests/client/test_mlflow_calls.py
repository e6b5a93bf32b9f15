"""How MLflow calls a backend: what it doesn't tell is found where it stands, with each MLflow of ``make contract``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VERSIONS = [None, *filter(None, os.environ.get("CONTRACT_MLFLOW", "").split(os.pathsep))]
CALLS = """
import shutil, sys
import mlflow.projects
from mlflow.cli import cli
from mlflow_batchai import backend
from mlflow_batchai.errors import UsageError

def tell(*arguments):
    options, name, run_id = backend._caller(print)
    print(options.get("backend"), name, run_id)
    raise UsageError("told")

backend._prepare = tell
try:
    mlflow.projects.run(".", backend="batchai", run_name="mine", run_id="0" * 32)
except mlflow.exceptions.ExecutionException:
    pass
sys.argv = [shutil.which("mlflow"), "run", ".", "--backend", "batchai", "--run-name", "ours"]
try:  # as if mlflow's command had another form
    mlflow.projects.run(".", backend="batchai")
except mlflow.exceptions.ExecutionException:
    pass
cli()
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_what_mlflow_does_not_tell(tmp_path: Path, version: str | None) -> None:
    (tmp_path / "MLproject").write_text("name: toy\nentry_points: {main: {command: 'true'}}\n")
    root = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([*([version] if version else []), root]),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "BATCHAI_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CALLS], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    first, unknown, *more = [line for line in done.stdout.splitlines() if line]
    assert first == f"None mine {'0' * 32}", (done.stdout, done.stderr)
    assert "calls backends in another way than is known here" in unknown
    assert more == ["None None None", "batchai ours None"]
