"""The code that travels to nodes needs only Python 3.9: its grammar, its standard library, no other import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from node_world import python39

import mlflow_batchai
from mlflow_batchai.engines import archive

PACKAGE = Path(mlflow_batchai.__file__).parent
FILES = [PACKAGE / "__init__.py", *sorted(file for part in archive.PACKAGES for file in (PACKAGE / part).rglob("*.py"))]
# Of the standard library and built-ins, newer than 3.9.
TOO_NEW = {
    *("bit_count", "pairwise", "batched", "packages_distributions", "tomllib", "UTC", "StrEnum", "ExceptionGroup"),
    *("file_digest", "stdlib_module_names", "orig_argv", "anext", "aiter"),
}
MODULES = [
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).replace(".__init__", "")
    for file in FILES
    if file.name != "__main__.py"
]
# They import the framework that they wrap, or MLflow, which calls them.
WITH_FRAMEWORK = ("callbacks", "horovod", "_checkpoint", "_hvd", "_optimizer", "_watch")
WITH_MLFLOW = ("artifacts", "models", "job", "store")


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_grammar_and_library_are_those_of_3_9(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 9))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "cache"}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip":
            assert not [keyword for keyword in node.keywords if keyword.arg == "strict"]
    assert names & TOO_NEW == set()


def test_an_old_python_can_say_that_it_is_too_old() -> None:
    text = (PACKAGE / "agent" / "boot.py").read_text(encoding="utf-8")
    assert not [
        node for node in ast.walk(ast.parse(text, feature_version=(3, 6))) if isinstance(node, (ast.JoinedStr, ast.NamedExpr))
    ]
    assert "annotations" not in text


def imported(python: str, archive_file: Path, code: str) -> list[str]:
    program = f"import sys; sys.path.insert(0, {str(archive_file)!r})\n{code}\nprint('\\n'.join(sorted(sys.modules)))"
    done = subprocess.run([python, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


def test_the_agent_imports_the_standard_library_and_its_room(agent_pyz: Path) -> None:
    before = set(imported(sys.executable, agent_pyz, ""))
    found = set(imported(sys.executable, agent_pyz, "import mlflow_batchai.agent.agent")) - before
    foreign = {name for name in found if name.split(".")[0] not in sys.stdlib_module_names}
    assert {name for name in foreign if not name.startswith("mlflow_batchai.agent")} == {"mlflow_batchai"}
    assert not found & {f"mlflow_batchai.agent.{name}" for name in ("mounts.rclone", "containers.container", "share.rest")}
    # Each costs memory on every node for as long as the job runs.
    assert not found & {"asyncio", "http.client", "ssl", "urllib.request", "logging", "multiprocessing", "email", "pathlib"}


def test_all_that_needs_no_framework_imports_under_3_9(agent_pyz: Path) -> None:
    python = python39()
    if python is None:
        pytest.skip("there is no Python 3.9 on this machine")
    barred = {f"mlflow_batchai.training.{name}" for name in WITH_FRAMEWORK}
    barred |= {f"mlflow_batchai.training.tracking.{name}" for name in WITH_MLFLOW}
    modules = [name for name in MODULES if name not in barred]
    found = imported(python, agent_pyz, "import " + ", ".join(modules))
    assert set(modules) <= set(found)


@pytest.mark.parametrize(("argv", "code"), [(["nonsense"], 2), ([], 2), (["sweep", "no-such-job/1"], 0)])
def test_verbs(agent_pyz: Path, argv: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-I", "-S", str(agent_pyz), *argv], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
