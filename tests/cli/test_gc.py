"""``batchai gc``: shows what it would free, asks, frees it, and says what it could not."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path

import pytest
from command_line import Cli
from job_folder import FOLDER, JobFolder

from mlflow_batchai.agent.environments import kept
from mlflow_batchai.errors import ShareError
from mlflow_batchai.storage.directory import DirectoryShare

DAY = 86400.0
HASH = "0123456789abcdef"


@pytest.fixture
def environment(cli: Cli, tmp_path: Path) -> Path:
    """A built environment that nobody has used for 31 days."""
    cli.world.environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    marker = cli.world.home / "envs" / HASH / kept.MARKER
    marker.parent.mkdir(parents=True)
    marker.write_bytes(b"x" * 2048)
    os.utime(marker, (time.time() - 31 * DAY,) * 2)
    return marker.parent


def job(cli: Cli, run_id: str, days: float) -> Path:
    """The folder of a job that ended so many days ago."""
    made = JobFolder(cli.world.home / "share", runId=run_id)
    made.verdict(endTime=int((time.time() - days * DAY) * 1000))
    made.write(made.paths.cursor(1), {"finished": True})
    return Path(made.share.root, FOLDER)


def test_a_dry_run_frees_nothing(cli: Cli, environment: Path) -> None:
    said = cli("gc", "--dry-run")
    head, _, line = said.out.splitlines()
    assert head.split() == ["Kind", "What", "Age", "Size", "Why"]
    assert line.split(maxsplit=2)[:2] == ["environment", str(environment)] and "31d  2.0 kB  not used since" in line
    assert (said.code, said.err) == (0, "batchai: 1 thing, 2.0 kB, would be freed\n")
    assert environment.exists()
    (row,) = json.loads(cli("gc", "--dry-run", "-o", "json").out)
    assert json.loads(cli("gc", "--dry-run", BATCHAI_OUTPUT="json").out) == [row]
    assert row == {
        "kind": "environment",
        "path": str(environment),
        "bytes": 2048,
        "modified": row["modified"],
        "reason": "not used since",
    }
    assert row["modified"].endswith("+00:00")


def test_freeing(cli: Cli, environment: Path) -> None:
    said = cli("gc", "-y", "-o", "json")
    assert [row["path"] for row in json.loads(said.out)] == [str(environment)]
    assert (said.code, said.err) == (0, "batchai: freed 2.0 kB\n")
    assert not environment.exists()
    said = cli("gc")
    assert (said.code, said.out, said.err) == (0, "", "batchai: there is nothing to free\n")


def test_it_asks(cli: Cli, environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = cli("gc")
    assert said.code == 2 and "Free 1 thing, 2.0 kB: this needs -y where there is no terminal" in said.err
    assert str(environment) in said.err and environment.exists()
    monkeypatch.setattr("os.isatty", lambda descriptor: True)
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    said = cli("gc")
    assert said.code == 1 and environment.exists()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    said = cli("gc")
    assert (said.code, said.out) == (0, "") and said.err.endswith("batchai: freed 2.0 kB\n")
    assert not environment.exists()


@pytest.mark.parametrize(("text", "days"), [("12h", 0.5), ("30d", 30), ("2w", 14), ("90m", 0.0625)])
def test_how_long_ago(cli: Cli, environment: Path, text: str, days: float) -> None:
    for age, count in ((days + 0.01, 1), (days - 0.01, 0)):
        os.utime(environment / kept.MARKER, (time.time() - age * DAY,) * 2)
        assert len(json.loads(cli("gc", "--dry-run", "-o", "json", "--older-than", text).out)) == count


@pytest.mark.parametrize("text", ["30", "d", "-1d", "1.5d", "1y", "", "P30D"])
def test_no_length_of_time(cli: Cli, environment: Path, text: str) -> None:
    said = cli("gc", "-y", "--older-than", text)
    assert said.code == 2 and "is no length of time; write 12h, 30d or 2w" in said.err
    assert environment.exists()


def test_an_unknown_cluster(cli: Cli) -> None:
    said = cli("gc", "-c", "nosuch")
    assert said.code == 3 and "nosuch" in said.err and "local" in said.err


def test_a_deleted_run(cli: Cli, environment: Path) -> None:
    """Its job's folder goes, however young: `job delete` leaves it to us."""
    run = cli.world.client.create_run("0", tags={"batchai.job": "toy"}, run_name="toy")
    folder = job(cli, run.info.run_id, 0.1)
    assert cli("gc", "-y", "-c", "local", "--older-than", "40d").err == "batchai: there is nothing to free\n"
    cli.world.client.delete_run(run.info.run_id)
    assert "its run was deleted" in cli("gc", "-y", "--older-than", "40d").out
    assert not folder.exists()


def test_no_store_is_made_for_it(cli: Cli, environment: Path, tmp_path: Path) -> None:
    assert cli("gc", "--dry-run", MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/none.db").code == 0
    assert not (tmp_path / "none.db").exists()
    (tmp_path / "odd.db").write_text("no database")
    said = cli("gc", "--dry-run", MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/odd.db")
    assert said.code == 0 and "odd.db can't be asked which runs were deleted" in said.err and str(environment) in said.out


def test_what_could_not_be_freed(cli: Cli, environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, and all else is freed."""
    folder = job(cli, "r", 31)
    real = DirectoryShare.delete

    def delete(self: DirectoryShare, path: str) -> None:
        if path.endswith("plan.json"):
            raise ShareError("'plan.json': Permission denied")
        real(self, path)

    monkeypatch.setattr(DirectoryShare, "delete", delete)
    said = cli("gc", "-y")
    assert said.code == 1 and f"{FOLDER} stays: 'plan.json': Permission denied; freed 2.0 kB" in said.err
    assert folder.exists() and not environment.exists()
