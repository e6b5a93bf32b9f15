"""``batchai sweep``: what is refused before anything exists, and a grid of real jobs with one that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

MLPROJECT = """
    name: toy
    entry_points:
      main:
        parameters:
          lr: float
          bs: {type: int, default: 8}
          data: {type: path, default: data.csv}
          note: {type: string, default: ""}
        command: python train.py {lr} {bs} "{note}"
"""
TRAIN = """
    import sys
    from mlflow_batchai.training import report
    lr, bs = float(sys.argv[1]), int(sys.argv[2])
    report.log({"val_accuracy": 0.5 + lr * bs}, step=0)
    if (lr, bs) == (0.2, 8):
        sys.exit("boom")
"""


@pytest.fixture
def project(shared_cli: Cli) -> Path:
    (shared_cli.world.cwd / "data.csv").write_text("1")
    return shared_cli.world.project(TRAIN, MLPROJECT)


SECRET = '{"properties": {"secrets": [{"name": "T", "value": "hush-hush"}]}}'
TPE = ["--sampler", "tpe", "--trials", "3"]
REFUSED: list[tuple[list[str], int, str]] = [
    ([], 2, "nothing to sweep"),
    (["-P", "lr"], 2, "-P lr"),
    (["-P", "lr=1,x"], 1, "(combination 2 of 2: lr=x)"),
    (["-P", "lr=0.1..0.2"], 2, "0.1..0.2 has no steps"),
    (["-P", "lr=1", "--trials", "3"], 2, "--trials N goes with --sampler random or tpe"),
    (["-P", "lr=0.1..0.2", "--sampler", "tpe"], 2, "--sampler tpe needs --trials N"),
    ([*TPE, "-P", "lr=0.1..0.2"], 2, "what jobs are compared by: --metric"),
    ([*TPE, "-P", "lr=1", "--metric", "m"], 2, "chooses from lists and ranges of -P"),
    ([*TPE, "-P", "lr=1", "-P", "bs=4.5..8:0.5", "--metric", "m"], 1, "(combination 1 of 2: lr=1, bs=4.5)"),
    (["-P", "lr=1", "--from", "nope.csv"], 1, "nope.csv: can't be read"),
    (["-P", "lr=1", "--cluster", "nope"], 3, "there is no cluster 'nope'"),
    (["-P", "lr=1", "-c", "nope.yaml"], 2, "--backend-config nope.yaml"),
    (["-P", "lr=1", "-c", '{"properties": {"nodeCount": 9}}'], 1, "properties.nodeCount is 9"),
    (["-P", "lr=1", "--run-name", "a\nb"], 2, "the sweep's name 'a\\nb'"),
    (["-P", "lr=1", "-c", SECRET], 2, "--backend-config holds a secret"),
]


@pytest.mark.parametrize(("options", "code", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_leaves_nothing(shared_cli: Cli, project: Path, options: list[str], code: int, words: str) -> None:
    said = shared_cli("sweep", project, *options)
    assert (said.code, said.out) == (code, "")
    assert words in said.err and "hush-hush" not in said.err
    assert shared_cli.world.runs() == []


@pytest.mark.parametrize("address", ["https://ada:s3cret@example.com/x.git", "nope"])
def test_a_project_that_is_refused(shared_cli: Cli, address: str) -> None:
    said = shared_cli("sweep", address, "-P", "lr=1")
    assert said.code in (1, 2) and "s3cret" not in said.err
    assert ("can't hold a password" in said.err) == (address != "nope")


@pytest.mark.parametrize("verb", ["attach", "show", "terminate"])
def test_an_unknown_sweep(shared_cli: Cli, verb: str) -> None:
    said = shared_cli("sweep", verb, "nope")
    assert (said.code, said.out) == (3, "") and "there is no sweep 'nope'; there are none in" in said.err


def test_a_grid_with_one_that_fails(cli: Cli) -> None:
    """The whole of it, on the local cluster."""
    world = cli.world
    project = world.project(TRAIN, MLPROJECT)
    (world.cwd / "data.csv").write_text("1")
    options = ("-P", "lr=0.1,0.2,0.1", "-P", 'note="a,b"', "-P", "bs=4,8", "--run-name", "grid", "-o", "json")
    said = cli("sweep", project, *options, MLFLOW_EXPERIMENT_ID="0", MLFLOW_EXPERIMENT_NAME="other")
    assert said.code == 1, said
    assert "2 combination(s) stand there more than once; each is run once" in said.err
    assert "job grid-4 failed, val_accuracy 2.1 (lr=0.2, bs=8): rank 0 on node-0 exited with code 1: boom" in said.err
    data: dict[str, Any] = json.loads(said.out)
    assert [(row["name"], row["state"]) for row in data["jobs"]] == [
        ("grid-2", "succeeded"),
        ("grid-3", "succeeded"),
        ("grid-1", "succeeded"),
        ("grid-4", "failed"),
    ]
    assert data["best"]["metrics"] == {"val_accuracy": 1.3}
    assert data["runStatus"] == "FAILED"
    runs = {run.info.run_name: run for run in world.runs()}
    assert set(runs) == {"grid", "grid-1", "grid-2", "grid-3", "grid-4"}
    parent = runs.pop("grid")
    assert {run.info.experiment_id for run in (parent, *runs.values())} == {"0"}
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {parent.info.run_id} == {data["runId"]}
    assert runs["grid-1"].data.params["note"] == "a,b"
    assert parent.data.tags["batchai.sweepBestMetric"] == "val_accuracy=1.3"
    assert parent.data.metrics == {"val_accuracy": 1.3}, "those of the best job"
    # One project was sent, once; none of it twice.
    objects = [path.read_text() for path in (world.home / "share" / ".batchai" / "objects").rglob("*") if path.is_file()]
    assert sum("sys.exit" in text for text in objects) == 1

    shown = cli("sweep", "show", "grid")
    assert (shown.code, shown.out.splitlines()[0].split()) == (
        0,
        ["lr", "bs", "State", "val_accuracy", "Duration", "Job"],
    )
    assert [row["name"] for row in cli.json("sweep", "list", "-o", "json")] == ["grid"]
    assert "sweep grid has ended already (FAILED)" in cli("sweep", "terminate", "grid", "-y").err
    assert cli("job", "list", "-o", "tsv").code == 0, "a sweep is no job"
