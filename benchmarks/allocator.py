"""What a rank on CPUs has of glibc's settings (`agent/environment.py`): the CIFAR project's second epoch with and without them.

    python benchmarks/allocator.py [--pairs 3] [--ranks 2]

Each round runs without, with, without, as bare processes: one, or as many as a job has ranks, each with its part of the cores.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from mlflow_batchai.agent.environment import ALLOCATOR, thread_variables

PROJECT = Path(__file__).parents[1] / "projects" / "cifar_horovod"


class Run(NamedTuple):
    """Images a second of all ranks in the last epoch; of each rank on the average CPU seconds, page faults, peak bytes."""

    speed: float
    cpu: float
    faults: float
    peak: float


def train(ranks: int, epochs: int, settings: dict[str, str]) -> Run:
    """Train in so many processes at a time, each by itself."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **thread_variables((os.cpu_count() or 1) // ranks), **settings}
    command = [sys.executable, "train.py", "--data", "digits", "--augment", "false", "--epochs", str(epochs), "--output"]
    with tempfile.TemporaryDirectory(prefix="allocator-") as scratch:
        folders = [Path(scratch, str(rank)) for rank in range(ranks)]
        processes = []
        for folder in folders:
            folder.mkdir()
            with (folder / "said").open("wb") as said:
                processes.append(
                    subprocess.Popen([*command, str(folder)], cwd=PROJECT, env=environment, stdout=said, stderr=said)
                )
        usages = []
        for process in processes:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            usages.append(usage)
        texts = [(folder / "said").read_text(encoding="utf-8") for folder in folders]
    if any(process.returncode for process in processes):
        sys.exit(texts[0])
    return Run(
        sum(float(re.findall(r"images_per_second: ([\d.]+)", text)[-1]) for text in texts),
        statistics.mean(usage.ru_utime + usage.ru_stime for usage in usages),
        statistics.mean(usage.ru_minflt for usage in usages),
        statistics.mean(usage.ru_maxrss * 1024 for usage in usages),
    )


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    rounds = []
    for number in range(options.pairs):
        trained = [train(options.ranks, options.epochs, dict(one)) for one in ({}, {"GLIBC_TUNABLES": ALLOCATOR}, {})]
        rounds.append(trained)
        print(f"round {number + 1} of {options.pairs} done", file=sys.stderr)
    print(
        f"{options.pairs} rounds of without, with, without; {options.ranks} processes at a time, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}; medians (min to max)\n"
    )
    _row("images a second: with / without", [2 * own.speed / (one.speed + two.speed) for one, own, two in rounds])
    _row("images a second, without twice: the second / the first", [two.speed / one.speed for one, _, two in rounds])
    _row("images a second, with", [own.speed for _, own, _ in rounds])
    _row("CPU seconds of a whole process: with / without", [2 * own.cpu / (one.cpu + two.cpu) for one, own, two in rounds])
    _row("page faults (thousands), without", [each.faults / 1e3 for one, _, two in rounds for each in (one, two)])
    _row("page faults (thousands), with", [own.faults / 1e3 for _, own, _ in rounds])
    _row("peak memory (MB): with - without", [(own.peak - (one.peak + two.peak) / 2) / 1e6 for one, own, two in rounds])


def _row(title: str, values: list[float]) -> None:
    print(f"{title}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
