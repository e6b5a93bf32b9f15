"""Interpreters that have PyTorch for CPUs, and Horovod for it; both are had once, and kept in the user's cache directories."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

# The wheel of PyPI would bring gigabytes of CUDA. PyTorch's own index has this one (PIP_EXTRA_INDEX_URL), or a folder (PIP_FIND_LINKS).
TORCH = "torch==2.13.0+cpu"


def python_with_torch(folder: Path) -> Path:
    """Make a virtual environment with it and all that is installed here, but without our package; skip where it can't be had.

    ``BATCHAI_TEST_TORCH_PYTHON`` may name an interpreter with PyTorch, Horovod for it, and all that is installed here.
    """
    if "BATCHAI_TEST_TORCH_PYTHON" in os.environ:
        return Path(os.environ["BATCHAI_TEST_TORCH_PYTHON"])
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    mlflow = importlib.util.find_spec("mlflow")
    assert mlflow and mlflow.origin
    (_site(folder) / "packages.pth").write_text(f"{_packages()}\n{Path(mlflow.origin).parents[1]}\n", encoding="utf-8")
    return folder / "bin" / "python"


def python_with_horovod(folder: Path) -> Path:
    """Make ``python_with_torch`` with Horovod for its PyTorch, which `batchai horovod build` makes in minutes if its cache has none."""
    python = python_with_torch(folder)
    if folder in python.parents:
        argv = [Path(sys.executable).with_name("batchai"), "horovod", "build", "--framework", "torch", "--python", python]
        # At a low priority: other tests, which run meanwhile, wait for what is to happen in seconds.
        done = subprocess.run(["nice", "-n", "10", *argv], capture_output=True, text=True, check=False)
        if missing := re.search(r"batchai: (Building Horovod needs .*)", done.stderr):
            pytest.skip(missing[1])
        assert done.returncode == 0, done.stderr
        with zipfile.ZipFile(done.stdout.strip()) as wheel:
            wheel.extractall(_site(folder))
    return python


def run_tests(python: Path, folder: Path, *arguments: str | Path) -> None:
    """Run pytest in such an interpreter, for tests of what runs in a process that has imported torch; none may be skipped."""
    argv = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", folder / "pytest", *arguments]
    done = subprocess.run(argv, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr


def _site(folder: Path) -> Path:
    (site,) = folder.glob("lib/python3*/site-packages")
    return site


def _packages() -> Path:
    """The folder with PyTorch and what it needs, made if this machine has none yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlflow-batchai" / "tests"
    cache.mkdir(parents=True, exist_ok=True)
    whole = cache / f"{TORCH}-{sys.implementation.cache_tag}"
    with (cache / "torch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            part = whole.with_name(f"{whole.name}.part")
            options = ["--quiet", "--no-compile", "--only-binary", ":all:", "--upgrade", "--target", str(part)]
            argv = [sys.executable, "-m", "pip", "install", *options, TORCH]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"pip can't have {TORCH}: {done.stderr.strip().splitlines()[-1:]}")
            part.rename(whole)
    return whole
