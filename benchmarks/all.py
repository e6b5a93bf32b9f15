"""Run the benchmarks and write their tables into docs/benchmarks.md, each with its date and machine.

    python benchmarks/all.py [--short] [NAME ...]

A table stands between ``<!-- bench NAME -->`` and ``<!-- end -->``. With ``--short`` nothing is written: each runs for some
seconds, and it fails if a figure passes twice its limit ("at most 3") or is less than half of it ("at least 0.9"), in a
second run too.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
FULL = {
    "overhead": "--pairs 3 --epochs 10",
    "allocator": "",
    "ssh_connect": "--pairs 3",
    "share_job": "",
    "share_transfer": "--megabytes 300 --pairs 3",
    "cli": "",
    "relay": "--seconds 30",
    "crowd": "",
    "report": "",
    "opener": "--pairs 5",
    "slurm": "--pairs 10",
}
SHORT = {"overhead": "--pairs 1 --epochs 8", "report": "--pairs 1 --calls 2000"}
LIMIT = re.compile(r".*\bat (?P<which>most|least) (?P<limit>[\d.]+).*?\): (?P<median>-?[\d.]+)")


def beyond(table: str) -> list[str]:
    """The rows of a table whose figure passes twice its limit."""
    found = []
    for row in table.splitlines():
        if match := LIMIT.match(row):
            limit, median = float(match["limit"]), float(match["median"])
            if median > 2 * limit if match["which"] == "most" else median < limit / 2:
                found.append(row)
    return found


def with_table(page: str, name: str, told: str, table: str) -> str:
    """The page with another table.

    Raises:
        ValueError: it has no place for one of that name.
    """
    begin, end = f"<!-- bench {name} -->\n", "<!-- end -->"
    before, found, rest = page.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"{PAGE.name} has no line {begin.strip()}")
    return f"{before}{begin}{told}\n\n```text\n{table.strip()}\n```\n{end}{rest.partition(end)[2]}"


def machine() -> str:
    """This machine and the date, in a line."""
    cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("tensorflow-cpu", "mlflow"))
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores ({cpu[1] if cpu else platform.machine()}), {memory:.0f} GiB,"
        f" {system}, Python {platform.python_version()}, {packages}, load before it {os.getloadavg()[0]:.1f}"
    )


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a benchmark and show its table."""
    done = subprocess.run([sys.executable, *arguments], cwd=HERE.parent, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    return done


def main() -> int:
    """Run what was asked for; 1 if one failed, or if a figure is beyond bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true")
    parser.add_argument("names", nargs="*", choices=[*FULL, []], metavar="NAME")
    options = parser.parse_args()
    chosen = SHORT if options.short else FULL
    failed = False
    for name in options.names or chosen:
        arguments = [f"benchmarks/{name}.py", *chosen.get(name, FULL[name]).split()]
        told = machine()
        done = run(arguments)
        if options.short and beyond(done.stdout):
            done = run(arguments)  # a machine that was busy for a moment isn't in both
        failed |= done.returncode != 0
        if options.short:
            for row in beyond(done.stdout):
                failed = True
                print(f"more than twice its limit, twice: {row}", file=sys.stderr)
        elif done.returncode == 0:
            table = f"$ python {' '.join(arguments)}\n{done.stdout}"
            PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), name, told, table), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
