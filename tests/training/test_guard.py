"""The guard makes stock Horovod on Keras 3 fail aloud, costs nothing elsewhere, and leaves the user's sitecustomize."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlflow_batchai.training import constants, guard

JOBS, ROOT = Path(__file__).parent / "jobs", Path(__file__).parents[2]


@pytest.fixture
def site(tmp_path):
    """A folder for PYTHONPATH as the launcher makes it, and one with a sitecustomize of the user's."""
    ours, users = tmp_path / "ours", tmp_path / "it's the user's"
    ours.mkdir()
    users.mkdir()
    (ours / "sitecustomize.py").write_text(guard.SITECUSTOMIZE)
    (users / "sitecustomize.py").write_text("print('the user s own', __file__)\n")
    return [ours, users]


def test_stock_horovod_on_keras_3_fails_with_both_checksums(ranks, site):
    ended = ranks(sys.executable, JOBS / "stock.py", path=site)
    for one in ended:
        assert one.code not in (0, None)
        assert "trained to the end" not in one.output
        line = one.output.strip().splitlines()[-1]
        assert re.search(r"RanksDivergedError: The ranks hold different weights after epoch 1: ", line)
        sums = re.search(r"checksums rank 0 ([0-9a-f]{16}), rank 1 ([0-9a-f]{16}); most in \S*first/", line).groups()
        assert sums[0] != sums[1]
        assert "mlflow_batchai.training.horovod" in line
        assert "the user s own" in one.output


def test_stock_callbacks_fail_with_the_scripts_own_line_and_what_to_import(ranks, site):
    script = JOBS / "stock.py"
    for one in ranks(sys.executable, script, "broadcast", path=site):
        *_, said, advice = one.output.strip().splitlines()
        number = 1 + next(n for n, line in enumerate(script.read_text().splitlines()) if line.startswith("model.fit("))
        assert said.startswith(f"RuntimeError: {script}:{number}: model.fit(rng.normal(") and one.code == 1
        assert advice == "Horovod's own Keras callbacks don't support Keras 3: import mlflow_batchai.training.horovod as hvd"


def run(code, site, **env):
    path = ":".join([*map(str, site), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path, **env}, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout


def test_the_hook_imports_no_framework_and_runs_the_users_sitecustomize(site):
    code = "import sys; print({'keras', 'tensorflow', 'numpy', 'mlflow', 'horovod'} & set(sys.modules))"
    out = run(code, site).splitlines()
    assert out[0].startswith("the user s own") and "it's the user's" in out[0]
    assert out[1] == "set()"


FAKE_KERAS = """
__version__ = {version!r}
class Model:
    def fit(self, x, callbacks=None):
        return x, callbacks
class backend:
    backend = staticmethod(lambda: "tensorflow")
"""


@pytest.mark.parametrize(("version", "watched"), [("3.15.1", True), ("2.15.0", False)])
def test_keras_is_watched_when_it_is_imported(site, tmp_path, version, watched):
    (tmp_path / "keras.py").write_text(FAKE_KERAS.format(version=version))
    code = (
        "import sys, keras; print(getattr(keras.Model.fit, 'batchai', False), keras.Model().fit(1, callbacks=[]));"
        "print(type(keras.__loader__).__name__, keras.__spec__.loader is keras.__loader__,"
        "any(getattr(f, 'module', '') == 'keras' for f in sys.meta_path))"
    )
    out = run(code, [*site[:1], tmp_path]).splitlines()
    assert out == [f"{watched} (1, [])", "SourceFileLoader True False"]


def test_a_missing_keras_stays_missing(site, tmp_path):
    code = (
        "import importlib.util, sys\n"
        "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        "print(importlib.util.find_spec('keras'))"
    )
    assert run(code, site[:1]).splitlines() == ["None"]


def test_a_guard_that_cannot_load_breaks_nothing(site):
    done = subprocess.run(
        [sys.executable, "-c", "print('ran')"], env={"PYTHONPATH": str(site[0])}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "ran\n"
    assert "mlflow_batchai" not in done.stderr or "the check of the ranks' weights is off" in done.stderr


@pytest.mark.parametrize(
    ("text", "value"), [("", 1e-5), ("1", 1e-5), ("0", None), ("off", None), ("1e-3", 1e-3), (" 0.5 ", 0.5)]
)
def test_the_switch(monkeypatch, text, value):
    monkeypatch.setenv("BATCHAI_WEIGHT_CHECK", text)
    assert constants.tolerance() == value


def test_a_bad_switch_is_named(monkeypatch):
    monkeypatch.setenv("BATCHAI_WEIGHT_CHECK", "yes please")
    with pytest.raises(ValueError, match="BATCHAI_WEIGHT_CHECK=yes please is neither 0 nor a number"):
        constants.tolerance()
