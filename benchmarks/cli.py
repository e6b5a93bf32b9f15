"""What the command line costs: its start beside Python's own, and a list of jobs beside a bare MLflow client's search.

    python benchmarks/cli.py [--pairs 5] [--runs 10000]

Each round runs bare, ours, bare, each in a process of its own: the ratio bare/bare says how much of ours/bare is noise. The
store is a sqlite database with as many runs of jobs, each with the parameters, tags and metrics that jobs have.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCHAI = str(Path(sys.executable).parent / "batchai")
LISTED = 50
PAGE = 1000
# The same search, as MLflow's documentation writes it.
CLIENT = """
import sys
from mlflow.tracking import MlflowClient
client = MlflowClient()
experiments = [experiment.experiment_id for experiment in client.search_experiments()]
jobs = "tags.`batchai.job` LIKE '%'"
runs = client.search_runs(experiments, jobs, max_results=int(sys.argv[1]), order_by=["attributes.start_time DESC"])
print([(run.data.tags["batchai.job"], run.data.tags["batchai.executionState"]) for run in runs])
"""
TAGS = {
    "batchai.workspace": "default",
    "batchai.cluster": "local",
    "batchai.executionState": "succeeded",
    "mlflow.user": "user",
    "mlflow.source.name": "/home/user/cifar_horovod",
    "mlflow.source.type": "PROJECT",
    "mlflow.project.entryPoint": "main",
    "mlflow.project.backend": "batchai",
}
MAC = (
    '0123456789abcdef:0 {"share": "file:///home/user/.batchai/share", "tool": "horovod", "nodes": "2",'
    ' "folder": "workspaces/default/experiments/Default/jobs/%s"}'
)
PARAMETERS = {"epochs": "10", "batch_size": "32", "data": "cifar10", "augment": "true"}
METRICS = ("loss", "accuracy", "val_loss", "val_accuracy")


def fill(path: Path, count: int) -> None:
    """Write so many runs into a store that MLflow has made."""
    begun = int(time.time() * 1000) - count * 60_000
    names = [(f"{number:032x}", f"cifar-{number:06x}", begun + number * 60_000) for number in range(count)]
    with contextlib.closing(sqlite3.connect(path)) as store, store:
        store.executemany(
            "INSERT INTO runs (run_uuid, name, source_type, source_name, entry_point_name, user_id, status,"
            " start_time, end_time, lifecycle_stage, artifact_uri, experiment_id)"
            " VALUES (?, ?, 'UNKNOWN', '', '', 'user', 'FINISHED', ?, ?, 'active', '/artifacts', 0)",
            [(run, name, start, start + 50_000) for run, name, start in names],
        )
        tags = [(key, name, run) for run, name, _ in names for key in ("batchai.job", "mlflow.runName")]
        tags += [("batchai.mac", MAC % name, run) for run, name, _ in names]
        tags += [(key, value, run) for run, _, _ in names for key, value in TAGS.items()]
        store.executemany("INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)", tags)
        parameters = [(key, value, run) for run, _, _ in names for key, value in PARAMETERS.items()]
        store.executemany("INSERT INTO params (key, value, run_uuid) VALUES (?, ?, ?)", parameters)
        metrics = [(key, start, run) for run, _, start in names for key in METRICS]
        store.executemany(
            "INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) VALUES (?, 0.5, ?, 9, 0, ?)", metrics
        )


def seconds(*command: str) -> float:
    """How long a command takes that succeeds."""
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    taken = time.perf_counter() - begun
    if done.returncode:
        sys.exit(done.stderr)
    return taken


def main() -> None:
    """Run the pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--runs", type=int, default=10_000)
    options = parser.parse_args()
    python, listing = [sys.executable, "-c"], [BATCHAI, "job", "list"]
    starts: list[tuple[float, float, float]] = []
    lists: list[tuple[float, float, float]] = []
    processor: list[float] = []
    pages: list[float] = []
    with tempfile.TemporaryDirectory(prefix="cli-") as scratch:
        store = Path(scratch) / "mlflow.db"
        os.environ |= {"MLFLOW_TRACKING_URI": f"sqlite:///{store}", "BATCHAI_HOME": f"{scratch}/home"}
        os.chdir(scratch)
        seconds(*python, CLIENT, "1")
        fill(store, options.runs)
        # Once, so that all of it has been read from the disk and compiled.
        seconds(*listing)
        for number in range(options.pairs):
            click, bare = (*python, "import click"), (*python, CLIENT, str(LISTED))
            starts.append((seconds(*click), seconds(BATCHAI, "--help"), seconds(*click)))
            first, before = seconds(*bare), os.times()
            own, after = seconds(*listing, "-n", str(LISTED)), os.times()
            lists.append((first, own, seconds(*bare)))
            # Of children that have ended: what other work of the machine changes least.
            processor.append(sum(after[2:4]) - sum(before[2:4]))
            # What its pages add to a process that has started and listed a few.
            pages.append((seconds(*listing, "--all", "-o", "none") - lists[-1][1]) / max(1, options.runs / PAGE))
            print(f"round {number + 1} of {options.pairs} done", file=sys.stderr)
        nothing = [seconds(*python, "pass") for _ in range(options.pairs)]
    rounds = f"{options.pairs} rounds of bare, ours, bare"
    print(f"{rounds}; a store of {options.runs} jobs, {os.cpu_count()} cores; medians (min to max)\n")
    _row("batchai --help (s; at most 0.3)", [own for _, own, _ in starts])
    _row("batchai --help / python -c 'import click'", [2 * own / (one + two) for one, own, two in starts])
    _row("python -c 'import click' twice: the second / the first", [two / one for one, _, two in starts])
    _row("python -c pass (s)", nothing)
    _row("batchai job list / a bare MLflow client's search (at most 0.75)", [2 * own / (one + two) for one, own, two in lists])
    _row("a bare MLflow client's search twice: the second / the first", [two / one for one, _, two in lists])
    _row("batchai job list (s; at most 1.5)", [own for _, own, _ in lists])
    _row("batchai job list (CPU s)", processor)
    _row(f"a page of {PAGE} jobs, without the start of the process (s; at most 2)", pages)


def _row(title: str, values: list[float]) -> None:
    print(f"{title}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
