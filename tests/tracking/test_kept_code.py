"""The archive of a job's code: the same bytes for the same code, and nothing but the listed files on its way back."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai.agent.plan import CodeFile
from mlflow_batchai.agent.protocol import object_path
from mlflow_batchai.errors import JobError
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.tracking import kept_code

FILES = {"a/train.py": b"print(1)\n", "na\udcf6me €.sh": b"", "x" * 200 + "/y": b"\0" * 9000}
SIZE = sum(map(len, FILES.values()))


def listed(path: str, content: bytes = b"", mode: int = 0o644) -> CodeFile:
    return CodeFile(path, hashlib.sha256(content).hexdigest(), mode)


CODE = [*(listed(path, content, 0o755) for path, content in FILES.items()), CodeFile("a/link", link="../a/train.py")]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    (tmp_path / "share").mkdir()
    share = DirectoryShare(tmp_path / "share")
    with pytest.raises(JobError, match=r"'a/train.py' is not on the share as it was sent"):
        kept_code.pack(share, CODE, SIZE)
    for content in FILES.values():
        share.write(object_path(hashlib.sha256(content).hexdigest()), content)
    (tmp_path / "code.tar.gz").write_bytes(packed := kept_code.pack(share, CODE, SIZE))
    assert packed == kept_code.pack(share, CODE, SIZE)
    (tmp_path / "project").mkdir()
    return tmp_path / "code.tar.gz"


def test_it_comes_back_as_it_was(archive: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    kept_code.unpack(archive, CODE, SIZE, folder)
    found = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert {str(path.relative_to(folder)): path.read_bytes() for path in found} == FILES
    assert {path.stat().st_mode & 0o777 for path in found} == {0o755}
    assert (folder / "a" / "link").read_bytes() == FILES["a/train.py"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ([listed("a/train.py", b"print(2)\n")], "is not the file that the job ran"),
        ([listed("b.py", b"print(1)\n")], "is not the file that the job ran"),
        ([listed("../a.py")], "leads out of the project"),
        ([listed("/tmp/a.py")], "leads out of the project"),
        ([CodeFile("a", link="/tmp")], "leads out of the project"),
        ([CodeFile("a/b", link="../../x")], "leads out of the project"),
        ([CodeFile("c/d", link=".."), CodeFile("b", link="c/d/.."), CodeFile("b/e/f", link="x")], "twice, or behind a link"),
        ([CodeFile("b", link="a"), CodeFile("b", link="a")], "twice, or behind a link"),
    ],
)
def test_a_list_that_leads_elsewhere(archive: Path, tmp_path: Path, code: list[CodeFile], said: str) -> None:
    with pytest.raises(JobError, match=said):
        kept_code.unpack(archive, code, SIZE, tmp_path / "project")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code.tar.gz", "project", "share"]


@pytest.mark.parametrize("change", [lambda data: b"", lambda data: data[:-30], lambda data: b"no archive"])
def test_a_damaged_archive(archive: Path, tmp_path: Path, change: Any) -> None:
    archive.write_bytes(change(archive.read_bytes()))
    with pytest.raises(JobError, match="no archive"):
        kept_code.unpack(archive, CODE, SIZE, tmp_path / "project")
