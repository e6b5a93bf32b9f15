"""Leftovers of old jobs on a node are removed by age; what runs or may be used again stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlflow_batchai.agent.leftovers import tidy

NOW = 1_700_000_000.0
DAY = 86400.0


def put(path: Path, days: float, read: float | None = None) -> Path:
    """A file that was written so many days ago, and last read then or ``read`` days ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    os.utime(path, (NOW - (days if read is None else read) * DAY, NOW - days * DAY))
    return path


@pytest.mark.parametrize(
    ("name", "days", "stays"),
    [
        ("logs/abc-1.log", 31, False),
        ("logs/abc-2.log", 29, True),
        ("logs/notes.txt", 400, True),
        ("envs/abc/.complete", 400, True),
        ("prepared/abc/.complete", 400, True),
        ("agents/agent-0123456789abcdef.pyz", 91, False),
        ("agents/agent-0123456789abcdef.1f2e.new", 91, False),
        ("agents/agent-0123456789abcdef.pyz", 89, True),
        ("agents/agent-aaaaaaaaaaaaaaaa.pyz", 400, True),
        ("agents/mine.txt", 400, True),
        ("tools/rclone-0123456789abcdef", 91, False),
        ("tools/rclone-0123456789abcdef", 89, True),
        ("tools/mine", 400, True),
    ],
)
def test_by_age(tmp_path: Path, name: str, days: float, stays: bool) -> None:
    own = put(tmp_path / "agents" / "agent-aaaaaaaaaaaaaaaa.pyz", 400)
    file = put(tmp_path / name, days)
    tidy(str(tmp_path), NOW, str(own))
    assert file.exists() is stays


def test_an_archive_that_is_used_is_not_old(tmp_path: Path) -> None:
    own = put(tmp_path / "agents" / "agent-aaaaaaaaaaaaaaaa.pyz", 400)
    read = put(tmp_path / "agents" / "agent-bbbbbbbbbbbbbbbb.pyz", 400, read=3)
    tidy(str(tmp_path / "node"), NOW, str(own))
    assert read.exists()
    # By now another version's agent runs, and finds that ours was in use.
    tidy(str(tmp_path / "node"), NOW + 89 * DAY, str(read))
    assert own.exists()
    tidy(str(tmp_path / "node"), NOW + 91 * DAY, str(read))
    assert not own.exists()


def test_links_and_missing_folders_are_nothing_to_it(tmp_path: Path) -> None:
    kept = put(tmp_path / "elsewhere" / "kept.log", 400)
    root = tmp_path / "node"
    tidy(str(root), NOW, str(tmp_path / "source"))
    (root / "logs").mkdir(parents=True)
    (root / "logs" / "link.log").symlink_to(kept)
    tidy(str(root), NOW, str(tmp_path / "source"))
    assert kept.exists() and (root / "logs" / "link.log").is_symlink()
