"""The benchmarks still run: one short round, every figure printed. Their numbers are for people, never for a test."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from sshd import missing

ROOT = Path(__file__).parents[1]
FIGURES = (
    "whole run: job / bare",
    "whole run: bare / bare",
    "training only: job / bare",
    "training only: bare / bare",
    "from Enter to the first step",
    "from the last rank's exit to mlflow run's exit",
    "CPU seconds of agents and follower over those of the ranks",
    "agent's memory",
    "follower's memory over a bare MLflow client's",
)


# What benchmarks/probe does, without a framework: work for both cores, an epoch every quarter of a second, and its moments.
TOY = """
    import json, os, sys, time
    from mlflow_batchai.training import report
    rank, moments = int(os.environ["HOROVOD_RANK"]), {"first_step": time.time()}
    for epoch in range(int(sys.argv[2])):
        while time.time() < moments["first_step"] + (epoch + 1) / 4:
            sum(range(10_000))
        if rank == 0:
            report.log(step=epoch, loss=1 / (epoch + 1))
    moments["trained"] = time.time()
    with open(f"{sys.argv[1]}.{rank}", "w") as file:
        json.dump(moments, file)
"""


@pytest.mark.training
def test_overhead(world: Any) -> None:
    """With a toy for the training; the real one is the next test's."""
    probe = ROOT / "benchmarks" / "probe"
    project = world.project(
        TOY, (probe / "MLproject").read_text(), (probe / "batchai.yaml").read_text().replace("model: {}", "")
    )
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "overhead.py"),
        "--pairs",
        "1",
        "--epochs",
        "60",
        "--probe",
        str(project),
    ]
    result = world.call(command, timeout=200)
    assert result.returncode == 0, result.stderr
    for figure in FIGURES:
        assert re.search(rf"^{re.escape(figure)}.*: -?\d+\.\d\d \(", result.stdout, re.M), (figure, result.stdout)
    # What docs/benchmarks.md shows are these very rows.
    shown = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for line in result.stdout.splitlines()[2:]:
        assert line.partition(": ")[0].split(" takes ")[0] in shown, line


@pytest.mark.training
def test_the_probe(world: Any) -> None:
    """What the benchmark trains, in one process of its own."""
    marks = world.root / "marks"
    result = world.call([sys.executable, str(ROOT / "benchmarks" / "probe" / "train.py"), str(marks), "1", "1"], timeout=120)
    assert result.returncode == 0, result.stderr
    moments = json.loads(Path(f"{marks}.0").read_text())
    assert moments["born"] < moments["first_step"] < moments["trained"] < moments["end"]
    assert (world.root / "model.h5").stat().st_size > 1_000_000


def test_ssh_connect(world: Any) -> None:
    reason = missing()
    if reason:
        pytest.skip(reason)
    script = str(ROOT / "benchmarks" / "ssh_connect.py")
    result = world.call([sys.executable, script, "--pairs", "1", "--connections", "4", "--commands", "3"], timeout=60)
    assert result.returncode == 0, result.stderr
    shown = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    figures = [line.rpartition(": ")[0] for line in result.stdout.splitlines()[2:]]
    assert len(figures) == 6
    assert all(figure in shown for figure in figures), figures


def test_share_transfer(world: Any) -> None:
    script = str(ROOT / "benchmarks" / "share_transfer.py")
    result = world.call([sys.executable, script, "--pairs", "1", "--files", "10", "--megabytes", "9"], timeout=120)
    assert result.returncode == 0, result.stderr
    rows = result.stdout.splitlines()[2:]
    assert len(rows) == 28
    assert all(re.search(r": -?\d+\.\d\d \(", row) for row in rows), rows
    assert len([row for row in rows if "(requests): 3.00" in row]) == 2, rows


def test_share_job(world: Any) -> None:
    """Without the wait until a job counts as idle: its figures are for people who wait."""
    script = str(ROOT / "benchmarks" / "share_job.py")
    options = ["--nodes", "1", "--seconds", "2", "--settle", "0", "--idle", "1", "--round-trip", "0"]
    result = world.call([sys.executable, script, *options], timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    shown = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    figures = [re.sub(r" of \d+$", "", line.rpartition(": ")[0]) for line in result.stdout.splitlines()[2:]]
    assert len(figures) == 5
    assert all(figure in shown for figure in figures), figures


def test_cli(world: Any) -> None:
    script = str(ROOT / "benchmarks" / "cli.py")
    result = world.call([sys.executable, script, "--pairs", "1", "--runs", "200"], timeout=120)
    assert result.returncode == 0, result.stderr
    shown = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    figures = [line.rpartition(": ")[0] for line in result.stdout.splitlines()[2:]]
    assert len(figures) == 8
    assert all(figure in shown for figure in figures), figures


def test_report(world: Any) -> None:
    result = world.call([sys.executable, str(ROOT / "benchmarks" / "report.py"), "--pairs", "1", "--calls", "100"], timeout=60)
    assert result.returncode == 0, result.stderr
    shown = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    figures = [line.rpartition(": ")[0] for line in result.stdout.splitlines()[2:]]
    assert len(figures) == 4
    assert all(figure in shown for figure in figures), figures


def test_opener(world: Any) -> None:
    result = world.call([sys.executable, str(ROOT / "benchmarks" / "opener.py"), "--pairs", "1", "--files", "20"], timeout=60)
    assert result.returncode == 0, result.stderr
    shown = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    figures = [line.rpartition(": ")[0] for line in result.stdout.splitlines()[2:]]
    assert len(figures) == 6
    assert all(figure in shown for figure in figures), figures


@pytest.mark.timeout(300)
def test_relay(world: Any) -> None:
    script = str(ROOT / "benchmarks" / "relay.py")
    result = world.call([sys.executable, script, "--points", "2400", "--slices", "2", "--seconds", "2"], timeout=250)
    assert result.returncode == 0, result.stdout + result.stderr
    shown = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    figures = [re.sub(r" of \d+ ", " of ", line.rpartition(": ")[0]) for line in result.stdout.splitlines()[2:]]
    assert len(figures) == 5
    assert all(figure in re.sub(r" of \d+ ", " of ", shown) for figure in figures), figures
