"""The benchmarks still run: one short round, every figure printed. CI itself runs `overhead` (`make bench-short`)."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from sshd import missing

ROOT = Path(__file__).parents[1]
# Each script, its quick options, and how many figures it prints.
QUICK = {
    "ssh_connect": ("--pairs 1 --connections 4 --commands 3", 6),
    # Without the wait until a job counts as idle: its figures are for people who wait.
    "share_job": ("--nodes 1 --seconds 2 --settle 0 --idle 1 --round-trip 0", 5),
    "cli": ("--pairs 1 --runs 200", 9),
    "report": ("--pairs 1 --calls 100", 4),
    "opener": ("--pairs 1 --files 20", 6),
    "relay": ("--points 2400 --slices 2 --seconds 2", 5),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", QUICK)
def test_its_figures_stand_in_the_documentation(world: Any, name: str) -> None:
    if name == "ssh_connect" and missing():
        pytest.skip(str(missing()))
    options, count = QUICK[name]
    result = world.call([sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options.split()], timeout=250)
    assert result.returncode == 0, result.stdout + result.stderr
    shown = without_sizes((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"))
    figures = [without_sizes(line.rpartition(": ")[0]) for line in result.stdout.splitlines()[2:]]
    assert len(figures) == count
    assert all(figure in shown for figure in figures), figures


def test_a_table_is_written_into_the_page() -> None:
    module = runpy.run_path(str(ROOT / "benchmarks" / "all.py"))
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for name in module["FULL"]:
        written = module["with_table"](page, name, "today, here", "a: 1\n")
        assert f"<!-- bench {name} -->\ntoday, here\n\n```text\na: 1\n```\n<!-- end -->" in written
        assert module["with_table"](written, name, "today, here", "a: 1\n") == written
        assert page.partition(f"<!-- bench {name}")[0] == written.partition(f"<!-- bench {name}")[0]
    with pytest.raises(ValueError, match="has no line <!-- bench other -->"):
        module["with_table"](page, "other", "", "")


def test_the_short_form_fails_past_twice_a_limit() -> None:
    beyond = runpy.run_path(str(ROOT / "benchmarks" / "all.py"))["beyond"]
    rows = ["x (s; at most 3): 6.00 (0.10 to 9.00)", "x (%; at most 1): 2.01 (1.00 to 3.00)", "x / y (at least 0.90): 0.44"]
    assert beyond("\n".join([*rows, "x: 99.00 (1.00 to 2.00)", "x (at most 2 at p95): -5 and 1.20"])) == rows[1:]


def without_sizes(text: str) -> str:
    """Without how many it was of: what is quick here is small."""
    return re.sub(r" of \d+\b", " of", text)


def test_share_transfer(world: Any) -> None:
    script = str(ROOT / "benchmarks" / "share_transfer.py")
    result = world.call([sys.executable, script, "--pairs", "1", "--files", "10", "--megabytes", "9"], timeout=120)
    assert result.returncode == 0, result.stderr
    rows = result.stdout.splitlines()[2:]
    assert len(rows) == 28
    assert all(re.search(r": -?\d+\.\d\d \(", row) for row in rows), rows
    assert len([row for row in rows if "(requests): 1.00" in row]) == 2, rows
