"""What `report.log` costs a training loop a call, beside the least that could keep the same line: a write and a flush.

    python benchmarks/report.py [--pairs 7] [--calls 20000]

Each round runs bare, ours, bare, on the disk of the temporary folder: the ratio bare/bare says how much of ours/bare is
noise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from mlflow_batchai.training import report


def ours(calls: int) -> float:
    """Microseconds a call, of four metrics as an epoch has them."""
    begun = time.perf_counter()
    for step in range(calls):
        report.log(step=step, loss=0.5, accuracy=0.25, val_loss=0.75, val_accuracy=0.125)
    return 1e6 * (time.perf_counter() - begun) / calls


def bare(path: Path, line: str, calls: int) -> float:
    """Microseconds a line, as a program would write it that wants it seen at once."""
    with path.open("w", encoding="ascii") as file:
        begun = time.perf_counter()
        for _ in range(calls):
            file.write(line)
            file.flush()
        return 1e6 * (time.perf_counter() - begun) / calls


def main() -> None:
    """Run the pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20_000)
    options = parser.parse_args()
    rounds: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory(prefix="report-") as scratch:
        os.environ |= {"BATCHAI_SPOOL": scratch, "BATCHAI_RANK": "0"}
        ours(1)
        (spool,) = Path(scratch).glob("report-*.jsonl")
        line, other = spool.read_text(encoding="ascii").splitlines(keepends=True)[-1], Path(scratch) / "bare"
        for number in range(options.pairs):
            rounds.append((bare(other, line, options.calls), ours(options.calls), bare(other, line, options.calls)))
            os.truncate(spool, 0)
            print(f"round {number + 1} of {options.pairs} done", file=sys.stderr)
    print(
        f"{options.pairs} rounds of bare, ours, bare; {options.calls} lines of {len(line)} bytes, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}; medians (min to max)\n"
    )
    _row("report.log, four metrics (microseconds a call; at most 25)", [own for _, own, _ in rounds])
    _row("write and flush of the same line (microseconds)", [each for one, _, two in rounds for each in (one, two)])
    _row("report.log / write and flush", [2 * own / (one + two) for one, own, two in rounds])
    _row("write and flush twice: the second / the first", [two / one for one, _, two in rounds])


def _row(title: str, values: list[float]) -> None:
    print(f"{title}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
