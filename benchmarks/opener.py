"""What it costs to open files of a job folder without following links, beside a bare `open` of the same files; and to load a
plan whose signature is checked, beside one that is only read.

    python benchmarks/opener.py [--pairs 9] [--files 200]

The files are small and lie where segments lie: a dozen folders below the share. The plan is that of a project of 50 files. Each
round runs bare, ours, bare: the ratio bare/bare says how much of ours/bare is noise. Times are those of the processor, the
kernel's work included.
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

from mlflow_batchai.agent import protocol, safeopen
from mlflow_batchai.agent.protocol import LONGEST_SEGMENT, JobPaths, encode
from mlflow_batchai.agent.share import mountfiles
from mlflow_batchai.job import signing
from mlflow_batchai.storage.directory import DirectoryShare

PASSES = 10
PLAN_FILES = 50


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
    plans: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="opener-") as root:
        share, job = DirectoryShare(root), JobPaths("workspaces/default/experiments/Default/jobs/toy/0123456789")
        paths = [job.segment("agent-0", number) for number in range(options.files)]
        for path in paths:
            share.write(path, encode([{"k": "beat", "t": 1}]))
        os.environ["BATCHAI_HOME"] = f"{root}/home"
        code = [{"path": f"src/module_{number}.py", "sha256": f"{number:064x}", "mode": 420} for number in range(PLAN_FILES)]
        share.write(job.plan, encode([signing.sign(job.plan, {"code": code, "command": "python train.py", "nodeCount": 2})]))

        def load(path: str) -> protocol.Record:
            return protocol.decode_one(share.read(path))

        def load_verified(path: str) -> None:
            assert signing.examine(path, load(path))[1] is signing.Signature.OWN

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
            plans.append((timed(load, [job.plan] * 20), timed(load_verified, [job.plan] * 20)))
            print(f"round {number + 1} of {options.pairs} done", file=sys.stderr)
    print(
        f"{options.pairs} rounds of bare, ours, bare; {options.files} files {paths[0].count('/')} folders deep,"
        f" {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians (min to max)\n"
    )
    _row("open and close: ours / bare", [2 * own / (one + two) for one, own, two in rounds])
    _row("open and close: bare / bare", [two / one for one, _, two in rounds])
    _row("open and close: ours (microseconds of CPU a file)", [own for _, own, _ in rounds])
    _row("open, read and close: ours / bare", [own / bare for bare, own in reads])
    _row("load a plan: signature checked / only read", [own / bare for bare, own in plans])
    _row("load a plan: what the check costs (microseconds of CPU)", [own - bare for bare, own in plans])


def _row(title: str, values: list[float]) -> None:
    print(f"{title}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
