"""The environment of a job over an interpreter without pip, as uv makes them; with pip a real job shows it (test_preparation)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mlflow_batchai.engines import archive


def test_pip_comes_when_it_is_wanted(tmp_path: Path) -> None:
    base, made = tmp_path / "base", tmp_path / "it's made"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", base], check=True)
    (tmp_path / "agent.pyz").write_bytes(archive.build())
    subprocess.run([base / "bin" / "python", "-I", tmp_path / "agent.pyz", "overlay", made], check=True)
    before = {path.name for path in (base / "bin").iterdir()}
    said = subprocess.run([made / "bin" / "pip", "--version"], check=True, capture_output=True, text=True).stdout
    assert f" from {made}/lib/" in said
    assert {path.name for path in (base / "bin").iterdir()} == before
