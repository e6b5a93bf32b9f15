"""Packages keep to their imports: the contracts of ``.importlinter``, and what a bare import costs; tests have their places."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest
from slow import SLOW

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mlflow_batchai"


def test_the_contracts_hold():
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_top_level_is_the_architecture():
    """Each package and module at the top has its layer, or travels to nodes; and each has its row in the documentation."""
    config = configparser.ConfigParser()
    config.read(ROOT / ".importlinter", encoding="utf-8")
    layers = config["importlinter:contract:layers"]["layers"].replace("|", " ").split()
    travellers = config["importlinter:contract:travellers"]["source_modules"].split()
    named = {name.removeprefix("mlflow_batchai.") for name in layers + travellers}
    found = {path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert {path.stem for path in found} - {"__init__"} == named
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [path.name for path in found if f"`{path.name}{'' if path.suffix else '/'}`" not in table] == ["__init__.py"]


@pytest.mark.parametrize(
    ("module", "fine"),
    [
        ("mlflow_batchai", {"mlflow_batchai"}),
        (
            "mlflow_batchai.training.report",
            {"mlflow_batchai", *(f"mlflow_batchai.training{name}" for name in ("", ".report", ".spool"))},
        ),
        ("mlflow_batchai.agent.__main__", {"mlflow_batchai", "mlflow_batchai.agent", "mlflow_batchai.agent.__main__"}),
    ],
)
def test_an_import_brings_nothing_but_the_standard_library(module, fine):
    code = (
        f"import sys; before = set(sys.modules); import {module}\n"
        "new = {name for name in set(sys.modules) - before if name.split('.')[0] not in sys.stdlib_module_names}\n"
        "print(*sorted(new))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(out.split()) == fine


@pytest.mark.parametrize("place", SLOW)
def test_what_is_slow_is_there(place: str) -> None:
    """`make test` leaves out nothing under a name that it no longer has."""
    path, _, name = place.partition("::")
    found = ROOT / "tests" / path
    assert found.is_dir() or f"def {name or 'test_'}" in found.read_text(encoding="utf-8")
