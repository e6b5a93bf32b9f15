"""The environment of a job over an interpreter without pip, as uv makes them, or in no environment, as conda's and pyenv's.

With pip, and in an environment, a real job shows it (test_preparation).
"""

from __future__ import annotations

import os
import shutil
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


def test_programs_of_an_interpreter_in_no_environment(tmp_path: Path) -> None:
    base, made = tmp_path / "base", tmp_path / "it's made"
    (base / "bin").mkdir(parents=True)
    python = base / "bin" / os.path.basename(os.path.realpath(sys.executable))
    shutil.copy(sys.executable, python)
    (base / "lib").symlink_to(Path(sys.base_prefix, "lib"))
    for name in ("own", "conda"):
        program = base / "bin" / name
        program.write_text(f"#!{python}\nimport sys; print(sys.prefix)\n")
        program.chmod(0o755)
    assert subprocess.check_output([program], text=True) == f"{base}\n"
    (tmp_path / "agent.pyz").write_bytes(archive.build())
    subprocess.run([python, "-I", tmp_path / "agent.pyz", "overlay", made], check=True)
    assert subprocess.check_output([made / "bin" / "own"], text=True) == f"{made}\n"
    assert not (made / "bin" / "conda").exists()
    assert (made / "bin" / "python").is_symlink()
