"""What ranks say they have written comes to MLflow, or the run says to the number what is missing: files that are removed in the
midst of a job, a node's disk that is full, event files that are gone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from loop_disk import fill, loop_disk

from mlflow_batchai.tracking import runs

# Each rank counts what it has handed in on a disk that nothing touches, until it is told to end. Rank 1's processes are many.
TRAIN = """
    import os, pathlib, subprocess, sys, time
    from mlflow_batchai.training import report
    rank, counts = int(os.environ["BATCHAI_RANK"]), pathlib.Path(os.environ["COUNTS"])
    step = 0
    while not (counts / "go").exists():
        report.log(step=step, all_ranks=True, loss=1.0 / (step + 1), accuracy=0.5)
        print("step", step, flush=True)
        step += 1
        (counts / f"{rank}.new").write_text(str(step))
        os.replace(counts / f"{rank}.new", counts / str(rank))
        time.sleep(0.05)
    report.log(step=step, all_ranks=True, last=1.0)
    print("done", flush=True)
"""
BATCHAI = """
    properties:
      nodeCount: 2
      horovodSettings: {{}}
      environmentVariables: [{{name: COUNTS, value: {counts}}}]
"""


class Job:
    """A job of two ranks that train until they are told to end."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.counts = world.root / "counts"
        self.counts.mkdir()
        project = world.project(TRAIN, batchai=BATCHAI.format(counts=self.counts))
        self.process = world.start(world.command(project))
        self.trains(10, 90)

    def steps(self, rank: int) -> int:
        """How many steps a rank has trained, by its own word."""
        return int((self.counts / str(rank)).read_text())

    def trains(self, more: int = 20, seconds: float = 60) -> None:
        """Wait until each rank has trained some steps more."""
        files = [self.counts / "0", self.counts / "1"]
        self.world.wait(lambda: all(file.exists() for file in files), seconds)
        goal = [self.steps(rank) + more for rank in (0, 1)]
        self.world.wait(lambda: all(self.steps(rank) >= goal[rank] for rank in (0, 1)), seconds)

    @property
    def folder(self) -> Path:
        """Its folder on the share."""
        return self.world.home / "share" / runs.tags_of(self.world.last)["batchai.folder"]

    @property
    def events(self) -> Path:
        """The folder of its first event files."""
        return self.folder / "batchai" / "attempts" / "1" / "events" / "0000"

    def end(self) -> str:
        """Have it end; what ``mlflow run`` has said."""
        (self.counts / "go").touch()
        out, err = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, (out, err)
        return str(err)

    def points(self, key: str) -> list[int]:
        """The steps of a metric that the run has."""
        return sorted(point.step for point in self.world.client.get_metric_history(self.world.last.info.run_id, key))

    def assert_whole(self) -> None:
        """All that the ranks have counted is in the run, which says so and nothing else."""
        tags = self.world.last.data.tags
        assert (self.world.last.info.status, "batchai.complete" in tags) == ("FINISHED", False), tags.get("batchai.notes")
        assert "batchai.notes" not in tags
        joined = self.world.artifact("logs/stdout.txt").splitlines()
        for rank in (0, 1):
            for key in ("loss", "accuracy"):
                assert self.points(f"rank_{rank}/{key}") == list(range(self.steps(rank)))
            assert self.points(f"rank_{rank}/last") == [self.steps(rank)]
            said = [*(f"step {step}" for step in range(self.steps(rank))), "done"]
            assert self.world.artifact(f"logs/stdout-{rank}.txt").splitlines() == said
            assert [line for line in joined if line.startswith(f"[{rank}] ")] == [f"[{rank}] {line}" for line in said]
        assert not [line for line in joined if line[:4] not in ("[0] ", "[1] ")]


@pytest.fixture
def nodes_disk(world: Any) -> Iterator[Path]:
    """The disk of the nodes, which can be filled."""
    world.home.mkdir(exist_ok=True)
    with loop_disk(world.home, 48, "nodes") as place:
        yield place
        world.close()


def test_nodes_whose_disk_is_full_at_the_end(world: Any, nodes_disk: Path, cli: Cli) -> None:
    """What never left its rank is counted in a place that a full disk can't take."""
    job = Job(world)
    before = [job.steps(rank) for rank in (0, 1)]
    filler = fill(nodes_disk)
    job.trains(30)
    said = job.end()
    filler.unlink()
    tags = world.last.data.tags
    assert (world.last.info.status, tags["batchai.complete"]) == ("FINISHED", "false")
    notes = tags["batchai.notes"].splitlines()
    found = 0
    for rank in (0, 1):
        keys = (f"rank_{rank}/{key}" for key in ("loss", "accuracy", "last"))
        total, have = 2 * job.steps(rank) + 1, sum(len(job.points(key)) for key in keys)
        assert have >= 2 * before[rank]
        sentence = f"missing: {total - have} of {total} points that rank {rank} reported"
        # Both nodes are on this disk: one may use the last of its room.
        assert (sentence in notes) == (f"batchai: {sentence}\n" in said) == (have < total), notes
        found += have < total
    assert found == len(notes) > 0
    shown = cli.json("job", "show", tags["batchai.job"])
    assert (shown["complete"], shown["notes"]) == (False, notes)


def test_event_files_that_are_removed(world: Any) -> None:
    """Their agents see it, and send them again before their readers give them up."""
    job = Job(world)
    for _ in range(2):
        for path in sorted(job.events.glob("agent-*.jsonl"))[-12:]:
            path.unlink()
        job.trains(120)
    job.end()
    job.assert_whole()


def test_event_files_that_are_spoiled(world: Any) -> None:
    """They are as long as they were, which their agent takes for what it wrote: what nobody can send again is counted."""
    job = Job(world)
    follower = world.followers()[0]
    follower.suspend()
    first = max(int(path.stem[-8:]) for path in job.events.glob("agent-1-*.jsonl")) + 1
    names = [f"agent-1-{number:08}.jsonl" for number in range(first, first + 2)]
    world.wait(lambda: (job.events / f"agent-1-{first + 2:08}.jsonl").exists())
    lost = [record for name in names for record in _records(job.events / name)]
    for name in names:
        path = job.events / name
        path.write_bytes(b"x" * path.stat().st_size)
    shutil.rmtree(job.folder / "stdouterr")
    follower.resume()
    job.trains()
    said = job.end()
    points = sum(len(record["body"]["values"]) for record in lost if record["k"] == "report")
    lines = sum(record["x"].count("\n") for record in lost if record["k"] == "log")
    assert points and lines
    total, have = 2 * job.steps(1) + 1, sum(len(job.points(f"rank_1/{key}")) for key in ("loss", "accuracy", "last"))
    assert have == total - points
    tags = world.last.data.tags
    assert (world.last.info.status, tags["batchai.complete"]) == ("FINISHED", "false")
    notes = tags["batchai.notes"].splitlines()
    assert f"missing: {points} of {total} points that rank 1 reported" in notes
    assert f"batchai: missing: {points} of {total} points that rank 1 reported\n" in said
    assert f"missing: {lines} of {job.steps(1) + 1} lines of logs/stdout-1.txt" in notes, notes
    assert len(world.artifact("logs/stdout-1.txt").splitlines()) == job.steps(1) + 1 - lines
    assert job.points("rank_0/loss") == list(range(job.steps(0)))
    assert len(world.artifact("logs/stdout-0.txt").splitlines()) == job.steps(0) + 1


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:-1]]
