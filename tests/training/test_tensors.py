"""Torch tensors among ranks, in an interpreter that has torch."""

from pathlib import Path

from torch_python import run_tests


def test_torch_tensors(torch_python, tmp_path):
    run_tests(torch_python, tmp_path, Path(__file__).parent / "jobs" / "tensors.py")
