"""A part of the randomized run (``make faults SEEDS=1-50`` is all of it): one seed of each kind, and that its checks can fail."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from seed_cases import KINDS, case_of
from seed_checks import wrong
from seed_world import SeedWorld
from seeds import play, run_seeds, told

SEEDS = (16, 33, 34, 35, 36, 53, 54, 39, 40, 57, 42, 43, 44, 61, 46, 47)


@pytest.mark.timeout(600)
def test_one_seed_of_each_kind(tmp_path: Path, store_template: Path) -> None:
    assert {case_of(seed).kind for seed in SEEDS} == set(KINDS)
    results = list(run_seeds(SEEDS, tmp_path, store_template, 3))
    assert not [told(result) for result in results if result.troubles]
    # A step that a slow machine did not come to is no fault, many of them are.
    assert sum("never came to" in told(result) for result in results) <= len(SEEDS) // 2


@pytest.mark.timeout(600)
def test_a_follower_that_is_killed_has_five_jobs(tmp_path: Path, store_template: Path) -> None:
    assert not [told(result) for result in run_seeds((1, 2, 3), tmp_path, store_template, 2, together=5) if result.troubles]


@contextlib.contextmanager
def sql(world: SeedWorld, *statements: str) -> Iterator[None]:
    """Change the store for the time of the block."""
    with (
        contextlib.closing(sqlite3.connect(world.root / "mlflow.db")) as store,
        contextlib.closing(sqlite3.connect(":memory:")) as before,
    ):
        store.backup(before)
        with store:
            for statement in statements:
                store.execute(statement)
        yield
        before.backup(store)


def test_what_is_wrong_is_seen(tmp_path: Path, store_template: Path) -> None:
    """After a run that nothing happened to: each thing that the checks promise is spoiled in turn."""
    case = dataclasses.replace(case_of(7), faults=(), timed=None, nodes=2, steps=10, all_ranks=True, again=True, attaches=1)
    world = SeedWorld(tmp_path / "world", store_template)

    def sentences() -> str:
        return "\n".join(wrong(world, case, codes))

    try:
        codes, _ = play(world, case)
        assert codes == {"run": 0, "attach-0": 0} and sentences() == ""
        step = "key = 'loss' AND step = 3"
        with sql(world, f"DELETE FROM metrics WHERE {step}"):
            assert "1 points of the share are not in MLflow: [('loss', 3)]" in sentences()
        copy = "SELECT key, value, timestamp + 1, run_uuid, step, is_nan FROM metrics"
        with sql(world, f"INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan) {copy} WHERE {step}"):
            assert "loss has two points of step 3" in sentences()
        with sql(world, f"UPDATE metrics SET value = -1 WHERE {step}"):
            assert "1 points are not the first ones: [('loss', 3)]" in sentences()
        with sql(world, "UPDATE metrics SET step = 77 WHERE key = 'rank_1/speed' AND step = 3"):
            assert "1 points in MLflow are not on the share: [('rank_1/speed', 77)]" in sentences()
        with sql(world, "UPDATE runs SET status = 'RUNNING', end_time = end_time + 1"):
            assert "is RUNNING" in sentences() and "end time is" in sentences()
        with sql(world, "DELETE FROM tags WHERE key = 'batchai.executionState'"):
            assert "batchai.executionState is None, and 'succeeded' on the share" in sentences()
        with sql(world, "UPDATE tags SET value = '1 metric values came for a step that had one' WHERE key = 'batchai.notes'"):
            assert "2 values came for a step that had one, and the run says 1" in sentences()
        log = next(world.root.glob("mlruns/**/logs/stdout.txt"))
        text = log.read_bytes()
        log.write_bytes(text[:-1])
        assert "the artifact stdouterr/stdout.txt is not what lies on the share" in sentences()
        log.write_bytes(text)
        with subprocess.Popen(["sleep", "60"], env={"BATCHAI_JOB": str(world.root)}) as process:
            assert f"pid {process.pid} is left: sleep 60" in sentences()
            process.kill()
        with (world.home / "nodes/local/0/lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert "somebody holds the lock nodes/local/0/lock" in sentences()
        cursor = max(world.share.rglob("cursor.json"))
        whole = cursor.read_bytes()
        cursor.write_bytes(whole[:-1])
        assert "the last lease has not finished" in sentences()
        cursor.write_bytes(whole)
        codes["attach-0"] = 1
        assert "attach-0 has exit code 1 for a job that has succeeded" in sentences()
        codes["attach-0"] = 0
        next(world.share.rglob("verdict.json")).write_bytes(b"{")
        assert "the verdict is not whole" in sentences()
    finally:
        world.close()
