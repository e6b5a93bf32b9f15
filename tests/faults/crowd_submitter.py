"""Submits jobs one after the other from one process, as ``batchai job create`` does, and says when: MLflow is imported once.

    crowd_submitter.py REPORT START NAME=FILE...

Waits for the file START; each line of REPORT is the time before a submit, the time after it, its exit code and its name.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from pathlib import Path

import mlflow.tracking  # noqa: F401 (before the start: all submit at once then)

from mlflow_batchai.cli import main


def submit(name: str, document: str) -> tuple[int, str]:
    """The exit code, and what was said on standard error."""
    sys.argv = ["batchai", "job", "create", "-n", name, "-c", "local", "-f", document]
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0), err.getvalue()
    return 0, err.getvalue()


def run(report: Path, start: Path, jobs: list[str]) -> None:
    """All jobs, in their order."""
    report.touch()
    while not start.exists():
        time.sleep(0.01)
    for job in jobs:
        name, _, document = job.partition("=")
        before = time.monotonic()
        code, err = submit(name, document)
        with report.open("a", encoding="utf-8") as file:
            file.write(f"{before} {time.monotonic()} {code} {name}\n")
        sys.stderr.write(err)


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
