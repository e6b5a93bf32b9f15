"""What it costs to open files of a job folder without following links, beside a bare `open` of the same files.

    python benchmarks/opener.py [--pairs 9] [--files 200]

The files are small and lie where segments lie: a dozen folders below the share. Each round runs bare, ours, bare: the ratio
bare/bare says how much of ours/bare is noise. Times are those of the processor, the kernel's work included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mlflow_batchai.node import mountfiles, safeopen
from mlflow_batchai.node.protocol import LONGEST_SEGMENT, JobPaths, encode
from mlflow_batchai.shares.directory import DirectoryShare

PASSES = 10


def timed(read: Callable[[str], object], paths: list[str]) -> float:
    """Microseconds of CPU a file."""
    begun = time.thread_time()
    for _ in range(PASSES):
        for path in paths:
            read(path)
    return 1e6 * (time.thread_time() - begun) / len(paths) / PASSES


def main() -> None:
    """Run the pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--files", type=int, default=200)
    options = parser.parse_args()
    rounds: list[tuple[float, float, float]] = []
    reads: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="opener-") as root:
        share, job = DirectoryShare(root), JobPaths("workspaces/default/experiments/Default/jobs/toy/0123456789")
        paths = [job.segment("agent-0", number) for number in range(options.files)]
        for path in paths:
            share.write(path, encode([{"k": "beat", "t": 1}]))

        def bare_open(path: str) -> None:
            Path(root, path).open("rb").close()

        def bare_read(path: str) -> None:
            Path(root, path).read_bytes()

        for number in range(options.pairs):
            first = timed(bare_open, paths)
            ours = timed(lambda path: safeopen.open_file(root, path).close(), paths)
            rounds.append((first, ours, timed(bare_open, paths)))
            whole = timed(lambda path: mountfiles.read_whole(root, path, LONGEST_SEGMENT), paths)
            reads.append((timed(bare_read, paths), whole))
            print(f"round {number + 1} of {options.pairs} done", file=sys.stderr)
    print(
        f"{options.pairs} rounds of bare, ours, bare; {options.files} files {paths[0].count('/')} folders deep,"
        f" {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians (min to max)\n"
    )
    _row("open and close: ours / bare", [2 * own / (one + two) for one, own, two in rounds])
    _row("open and close: bare / bare", [two / one for one, _, two in rounds])
    _row("open and close: ours (microseconds of CPU a file)", [own for _, own, _ in rounds])
    _row("open, read and close: ours / bare", [own / bare for bare, own in reads])


def _row(title: str, values: list[float]) -> None:
    print(f"{title}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
