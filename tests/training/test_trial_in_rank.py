"""Rank 0 has a copy of itself try the job's model, whatever becomes of that copy. Keras is a toy here; real ones are tried elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai.training.guard import SITECUSTOMIZE
from mlflow_batchai.training.saved_models import stamp

ROOT = Path(__file__).parents[2]
KERAS = """
import contextlib, types
__version__ = "3.1.0"
backend = types.SimpleNamespace(backend=lambda: "tensorflow")
saving = types.SimpleNamespace(get_custom_objects=dict)
device = contextlib.nullcontext
"""
# A model that does what its file's name says.
MODELS = """
import os, signal, sys, time, types
import numpy
def load_model(path, compile):
    name = os.path.basename(path)
    print("noise", file=sys.stderr)
    if name == "crash.keras":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hang.keras":
        time.sleep(60)
    if name == "own.keras":
        import helper
    if name == "namespace.keras":
        import inside.part
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not hasattr(sys.modules["__main__"], "json")
    one = types.SimpleNamespace(name="x", shape=(None, 4), dtype="float32")
    return types.SimpleNamespace(inputs=[one], predict=lambda batch, verbose: numpy.asarray(batch) * 2)
"""
SCRIPT = """
import json, os, signal, sys
import helper, keras
from mlflow_batchai.training import report
{}
"""
REPORTS = "report.model(os.environ['AZ_BATCHAI_OUTPUT_M'] + '/{}.keras', example=[[1, 2, 3, 4]])"


@pytest.fixture
def rank(tmp_path: Path) -> Callable[..., tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]]:
    """Runs a script as rank 0 of a job that asks for a model; how it ended, and what it reported of trials."""
    for name in ("site", "spool", "out", "code/src/inside", "lib/keras"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (tmp_path / "lib" / "keras" / "__init__.py").write_text(KERAS)
    (tmp_path / "lib" / "keras" / "models.py").write_text(MODELS)
    (tmp_path / "code" / "src" / "inside" / "part.py").touch()
    for name in ("good", "own", "namespace", "crash", "hang"):
        with zipfile.ZipFile(tmp_path / f"{name}.keras", "w") as archive:
            archive.writestr("config.json", "{}")
            archive.writestr("metadata.json", '{"keras_version": "3.1.0"}')

    def run(does: str, saved: str = "good", seconds: float | None = 30.0, helper: str = "", **variables: str) -> Any:
        (tmp_path / "code" / "helper.py").write_text(helper)
        (tmp_path / f"{saved}.keras").rename(tmp_path / "out" / f"{saved}.keras")
        (tmp_path / "code" / "train.py").write_text(SCRIPT.format(does))
        model = seconds and {"path": None, "seconds": seconds}
        (tmp_path / "spool" / "run.json").write_text(json.dumps({"model": model}))
        path = os.pathsep.join(map(str, (tmp_path / "site", tmp_path / "lib", ROOT)))
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "BATCHAI_SPOOL": str(tmp_path / "spool"),
            "AZ_BATCHAI_OUTPUT_M": str(tmp_path / "out"),
            "BATCHAI_RANK": "0",
            **variables,
        }
        done = subprocess.run(
            [sys.executable, "train.py"], cwd=tmp_path / "code", env=environment, capture_output=True, text=True, timeout=60
        )
        lines = [json.loads(line) for file in (tmp_path / "spool").glob("report-*") for line in file.read_text().splitlines()]
        return done, [line for line in lines if line["type"] == "trial"]

    return run


@pytest.mark.parametrize("does", ["", REPORTS.format("good")])
def test_a_model_that_passes_is_reported(rank: Any, tmp_path: Path, does: str) -> None:
    """Also one that no call names; and only what the original did is seen of the two."""
    done, (trial,) = rank(does)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    file = tmp_path / "out" / "good.keras"
    assert trial["path"] == str(file) and trial["stamp"] == stamp(str(file))
    assert (trial["check"]["outcome"], trial["check"]["why"]) == ("passed", None)
    assert trial["meta"]["inputs"] == [{"name": "x", "shape": [-1, 4], "dtype": "float32"}]


@pytest.mark.parametrize(
    ("does", "saved", "code"),
    [
        (REPORTS.format("own"), "own", 0),  # the file needs a module of the script
        (REPORTS.format("crash"), "crash", 0),
        (REPORTS.format("hang"), "hang", 0),
        ("raise SystemError", "good", 1),
        ("os._exit(3)", "good", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", "good", -9),
    ],
)
def test_what_does_not_pass_is_not_reported(rank: Any, does: str, saved: str, code: int) -> None:
    """Nor does it change how the script ends, or outlive it."""
    begun = time.monotonic()
    done, trials = rank(does, saved, 2.0 if saved == "hang" else 30.0)
    assert (done.returncode, trials) == (code, [])
    assert time.monotonic() - begun < 30
    assert not done.stderr or "SystemError" in done.stderr


def test_a_project_with_a_src_folder_and_no_init_files_is_forgotten(rank: Any) -> None:
    """The file needs a module of it, and was saved by a script that has it; ``keras`` is imported after that."""
    helper = "import os, sys; sys.path.insert(0, os.path.abspath('src')); import inside.part"
    done, trials = rank(REPORTS.format("namespace"), "namespace", helper=helper)
    assert (done.returncode, done.stderr, trials) == (0, "", [])


# The second script has used a GPU before it imports Keras.
@pytest.mark.parametrize(
    ("seconds", "variables"),
    [
        (None, {}),
        (
            30.0,
            {"helper": "import sys, types; sys.modules['torch.cuda'] = types.SimpleNamespace(is_initialized=lambda: True)"},
        ),
        (30.0, {"BATCHAI_RANK": "1"}),
    ],
)
def test_where_no_copy_is_made(rank: Any, seconds: float | None, variables: dict[str, str]) -> None:
    done, trials = rank("print(os.listdir(os.environ['BATCHAI_SPOOL']))", seconds=seconds, **variables)
    assert (done.returncode, done.stdout, trials) == (0, "['run.json']\n", [])


def test_a_script_that_waits_for_all_its_children_does_not_wait_for_the_copy(rank: Any) -> None:
    does = """
os.fork() or os._exit(0)
os.wait()
try:
    os.wait()
except ChildProcessError:
    print("none")
"""
    done, trials = rank(does)
    assert (done.returncode, done.stdout, len(trials)) == (0, "none\n", 1)


def test_processes_that_rank_0_starts_have_no_copy_beside_its_own(rank: Any) -> None:
    does = "import subprocess; subprocess.run([sys.executable, '-c', 'import keras'], check=True)"
    assert len(rank(does)[1]) == 1
