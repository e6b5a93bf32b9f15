"""A node's answers to the doctor on writing to the share."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai.agent.api import examine
from mlflow_batchai.storage.base import identify
from mlflow_batchai.storage.directory import DirectoryShare


@pytest.fixture
def share(tmp_path: Path) -> Path:
    folder = tmp_path / "share"
    folder.mkdir()
    return folder


def offer(share: Path) -> dict[str, Any]:
    return examine.offer(str(share), identify(DirectoryShare(share)), "made/file")


@pytest.mark.parametrize(("mode", "file", "folder"), [(0o2777, 0o666, 0o777), (0o770, 0o660, 0o770), (0o700, 0o600, 0o700)])
def test_a_file_is_as_open_as_the_share_s_root(share: Path, mode: int, file: int, folder: int) -> None:
    """As an agent's, whatever the login's umask is."""
    share.chmod(mode)
    before = os.umask(0o077)
    try:
        said = offer(share)
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    assert (said["trouble"], said["why"]) == (None, "")
    assert stat.S_IMODE((share / "made" / "file").stat().st_mode) == file
    assert stat.S_IMODE((share / "made").stat().st_mode) & 0o777 == folder
