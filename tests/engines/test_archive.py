"""agent.pyz: the same bytes from the same sources, whole, and all that an agent needs."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import zipfile
from importlib.util import MAGIC_NUMBER

from mlflow_batchai.engines import archive


def names(data):
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return file.namelist()


def test_the_bytes_are_a_function_of_the_sources(tmp_path):
    data = archive.build()
    assert archive.build.__wrapped__() == data  # made anew, not remembered
    code = "import sys; from mlflow_batchai.engines import archive; sys.stdout.buffer.write(archive.build())"
    environment = {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout == data
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert file.testzip() is None
        for info in file.infolist():
            # Compressed bytes differ between versions of zlib, times and systems between machines.
            assert (info.compress_type, info.date_time, info.create_system) == (zipfile.ZIP_STORED, (1980, 1, 1, 0, 0, 0), 3)
    assert names(data) == sorted(names(data))


def test_what_travels_is_python_3_8_and_needs_nothing_of_the_client():
    with zipfile.ZipFile(io.BytesIO(archive.build())) as file:
        for name in file.namelist():
            tree = ast.parse(file.read(name), name, feature_version=(3, 9))
            for node in ast.walk(tree):
                found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for module in found:
                    packages = ("mlflow_batchai.agent", "mlflow_batchai.training", "mlflow_batchai.horovod_wheel")
                    if name == "mlflow_batchai/__init__.py" or name.startswith("mlflow_batchai/training/tracking/"):
                        continue  # the lazy front door to the backend; what MLflow itself calls in a rank
                    fine = module == "mlflow_batchai" or module.startswith(packages)
                    assert not module.startswith("mlflow") or fine, (name, module)


def test_it_runs_without_site_packages(tmp_path):
    path = archive.stored(tmp_path / "agents")
    done = subprocess.run([sys.executable, "-I", "-S", str(path), "sweep", "no/such-mark"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


def test_it_is_stored_once_under_its_hash(tmp_path):
    first = archive.stored(tmp_path / "new" / "agents")
    before = first.stat().st_mtime_ns
    assert archive.stored(tmp_path / "new" / "agents") == first
    assert first.stat().st_mtime_ns == before
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    with zipfile.ZipFile(first) as found, zipfile.ZipFile(io.BytesIO(archive.build())) as built:
        assert {name: found.read(name) for name in built.namelist()} == {name: built.read(name) for name in built.namelist()}


def test_it_is_compiled_for_this_python_and_runs_on_others(tmp_path):
    path = archive.stored(tmp_path / "agents")
    asked = "import sys; sys.path.insert(0, sys.argv[1]); from mlflow_batchai.agent import protocol; print(protocol.__file__)"

    def imported() -> str:
        return subprocess.run([sys.executable, "-I", "-S", "-c", asked, path], capture_output=True, text=True).stdout.strip()

    module = f"{path}/mlflow_batchai/agent/protocol.py"
    assert imported() == f"{module}c"
    path.write_bytes(path.read_bytes().replace(MAGIC_NUMBER, b"odd!"))
    assert imported() == module
