"""agent.pyz: the same bytes from the same sources, whole, and all that an agent needs."""

from __future__ import annotations

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
