"""Packages keep to their imports and to the engine seam: ``.importlinter``, what a bare import costs; tests have their places."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest
from slow import SLOW

from mlflow_batchai.documents.cluster import Engine

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


def asks_which_engine(tree: ast.Module) -> list[int]:
    """Lines that compare the name or the kind of an engine, ask its class, or import the names of all."""
    names = {engine.value for engine in Engine}
    classes, found = set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mlflow_batchai."):
            imported = {alias.asname or alias.name for alias in node.names}
            if node.module == "mlflow_batchai.documents.cluster" and "Engine" in {alias.name for alias in node.names}:
                found.append(node.lineno)
            if node.module.startswith("mlflow_batchai.engines.") and node.module != "mlflow_batchai.engines.base":
                classes |= {name for name in imported if not name.endswith("Error")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            constants = {inner.value for side in sides for inner in ast.walk(side) if isinstance(inner, ast.Constant)}
            text = ast.unparse(node)
            if "engine" in text and (constants & names or "engine.kind" in text):
                found.append(node.lineno)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            asked = {inner.id for inner in ast.walk(node.args[1]) if isinstance(inner, ast.Name)}
            found += [node.lineno] if classes & asked else []
    return found


def test_only_engines_know_which_engine_it_is():
    """What another one can do is asked of it: adding it changes ``engines/``, ``documents/``, and nothing else."""
    asking = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0]
        # Engines of containers are other ones.
        if package not in ("engines", "documents", "agent") and (
            lines := asks_which_engine(ast.parse(path.read_text(encoding="utf-8")))
        ):
            asking[str(path.relative_to(PACKAGE))] = lines
    assert asking == {}
    for text in (
        'if cluster.engine.kind == "local": pass',
        'here = cluster.document.engine.value == "local"',
        "from mlflow_batchai.documents.cluster import Engine as EngineName",
        "from mlflow_batchai.engines.hosts import Hosts\nisinstance(engine, Hosts)",
    ):
        assert asks_which_engine(ast.parse(text)), text


@pytest.mark.parametrize("module", ["", ".training.report", ".training.checkpoints", ".agent.__main__"])
def test_an_import_brings_nothing_but_the_standard_library(module):
    module = f"mlflow_batchai{module}"
    code = (
        f"import sys; before = set(sys.modules); import {module}\n"
        "new = {name for name in set(sys.modules) - before if name.split('.')[0] not in sys.stdlib_module_names}\n"
        "print(*sorted(new))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    parts = module.split(".")
    assert out.split() == [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


@pytest.mark.parametrize("place", SLOW)
def test_what_is_slow_is_there(place: str) -> None:
    """`make test` leaves out nothing under a name that it no longer has."""
    path, _, name = place.partition("::")
    found = ROOT / "tests" / path
    assert found.is_dir() or f"def {name or 'test_'}" in found.read_text(encoding="utf-8")
