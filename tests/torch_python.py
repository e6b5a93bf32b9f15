"""An interpreter that has PyTorch for CPUs. Its wheel is installed once, in the user's cache directory."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

# The wheel of PyPI would bring gigabytes of CUDA. PyTorch's own index has this one (PIP_EXTRA_INDEX_URL), or a folder (PIP_FIND_LINKS).
TORCH = "torch==2.13.0+cpu"


def torch_python(folder: Path) -> Path:
    """Make a virtual environment with it and all that is installed here, but without our package; skip where it can't be had.

    ``BATCHAI_TEST_TORCH_PYTHON`` may name an interpreter with PyTorch and MLflow to use in its place.
    """
    if "BATCHAI_TEST_TORCH_PYTHON" in os.environ:
        return Path(os.environ["BATCHAI_TEST_TORCH_PYTHON"])
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "packages.pth").write_text(f"{_packages()}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return folder / "bin" / "python"


def _packages() -> Path:
    """The folder with PyTorch and what it needs, made if this machine has none yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlflow-batchai" / "tests"
    cache.mkdir(parents=True, exist_ok=True)
    whole = cache / f"{TORCH}-{sys.implementation.cache_tag}"
    with (cache / "torch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            part = whole.with_suffix(".part")
            options = ["--quiet", "--no-compile", "--only-binary", ":all:", "--upgrade", "--target", str(part)]
            argv = [sys.executable, "-m", "pip", "install", *options, TORCH]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"pip can't have {TORCH}: {done.stderr.strip().splitlines()[-1:]}")
            part.rename(whole)
    return whole
