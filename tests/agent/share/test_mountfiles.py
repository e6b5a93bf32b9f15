"""A file on a mounted share appears whole under its final name, and is seen though its name was missing a moment ago."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from closed_file import read_closed

from mlflow_batchai.agent.share import mountfiles


def test_a_closed_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    assert read_closed(str(path)) is None
    mountfiles.write_closed(str(tmp_path), "a/b.json", [{"a": "\udc80"}])
    assert read_closed(str(path)) == {"a": "\udc80"}
    path.write_bytes(path.read_bytes()[:-1])
    assert read_closed(str(path)) is None


def test_a_name_that_was_missing_is_looked_for_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a mount may remember that a name was missing, the nearest folder that exists is opened before it is asked again."""
    listed = []
    real = os.open

    def spy(path: str, flags: int, *arguments: int, dir_fd: int | None = None) -> int:
        descriptor = real(path, flags, *arguments, dir_fd=dir_fd)
        if not flags & os.O_PATH:
            listed.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
            if listed[-1] == str(tmp_path):
                (tmp_path / "a" / "b").mkdir(parents=True)
                (tmp_path / "a" / "b" / "file").write_bytes(b"there")
        return descriptor

    monkeypatch.setattr(os, "open", spy)
    assert mountfiles.read_fresh(str(tmp_path), "a/b/file", 1, 3) == b"her"
    assert listed == [str(tmp_path), str(tmp_path / "a" / "b"), str(tmp_path / "a" / "b" / "file")]
    with pytest.raises(FileNotFoundError):
        mountfiles.read_fresh(str(tmp_path), "none")
    assert read_closed(str(tmp_path / "none" / "of" / "it.json")) is None
