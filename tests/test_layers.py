"""The rooms keep to their imports: the contracts of ``.importlinter``, and what a bare import costs."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mlflow_batchai"


def test_the_contracts_hold():
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_has_its_layer():
    config = configparser.ConfigParser()
    config.read(ROOT / ".importlinter", encoding="utf-8")
    layers = config["importlinter:contract:layers"]["layers"].replace("|", " ").split()
    travellers = config["importlinter:contract:travellers"]["source_modules"].split()
    named = {name.removeprefix("mlflow_batchai.") for name in layers + travellers}
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()} - {"__init__"}
    # Rooms whose parts stand in different layers: each part has its own.
    divided = {name.partition(".")[0] for name in named if "." in name}
    parts = {f"{room}.{path.stem}" for room in divided for path in (PACKAGE / room).glob("*.py") if path.stem != "__init__"}
    assert named == (rooms - divided) | parts


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
