"""Content-addressed files: an unchanged project sends nothing, and nothing lies under a hash that isn't its own."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from mlflow_batchai.agent.protocol import OBJECTS, object_path
from mlflow_batchai.errors import ProjectError
from mlflow_batchai.storage import objects
from mlflow_batchai.storage.objects import StagedFile, scan, scan_input, upload


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "pro ject"
    (root / "sub").mkdir(parents=True)
    (root / "a.py").write_bytes(b"one")
    (root / "sub" / "same.py").write_bytes(b"one")
    (root / "big").write_bytes(b"x" * 3_000_000)
    return root


def test_an_unchanged_project_sends_nothing(share, project):
    files = scan(project)
    assert upload(share, files) == 3 + 3_000_000
    assert upload(share, scan(project)) == 0
    for file in files:
        assert hashlib.sha256(share.read(object_path(file.sha256))).hexdigest() == file.sha256
    (project / "a.py").write_bytes(b"four")
    assert upload(share, scan(project)) == 4


def test_what_was_sent_long_ago_gets_a_new_time(share, project, monkeypatch):
    """So its age tells `batchai gc` that nobody uses it. Its content is not sent again: ranks may have it open."""

    def found():
        folders = [object_path(file.sha256).rpartition("/")[0] for file in files]
        return [(entry.name, entry.modified) for folder in folders for entry in share.list(folder)]

    files = scan(project)
    upload(share, files)
    before = found()
    assert upload(share, files) == 0 and found() == before
    monkeypatch.setattr(objects, "FRESH_SECONDS", 0.0)
    assert upload(share, files) == 0
    assert all(now > then for (_, now), (_, then) in zip(found(), before, strict=True))


def test_what_lies_there_half_or_cant_be_touched_is_sent(share, project, monkeypatch):
    files = scan(project)
    upload(share, files)
    share.write(object_path(files[0].sha256), b"o")
    share.delete(f"{OBJECTS}/trees")
    assert upload(share, files) == files[0].size
    monkeypatch.setattr(objects, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(share, "touch", lambda path: False)
    assert upload(share, files) == 3 + 3_000_000


def test_a_file_that_changes_meanwhile_is_not_stored(share, project):
    files = scan(project)
    (project / "big").write_bytes(b"y")
    with pytest.raises(ProjectError, match="big changed"):
        upload(share, files)
    sha256 = next(file.sha256 for file in files if file.path == "big")
    assert object_path(sha256).rpartition("/")[2] not in [
        entry.name for entry in share.list(object_path(sha256).rpartition("/")[0])
    ]


def test_a_file_that_goes_meanwhile_or_cant_be_read_is_a_sentence(share, project):
    files = scan(project)
    (project / "a.py").unlink()
    memory = StagedFile("mem", Path("/proc/self/mem"), "ab" * 32, 0o644, size=5)
    for some, name in ((files, r"a\.py"), ([memory], "/proc/self/mem")):
        with pytest.raises(ProjectError, match=f"{name}' can't be read"):
            upload(share, some)


def test_inputs_follow_links_and_circles_end(project, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_bytes(b"1")
    (tmp_path / "data" / "one").symlink_to(project)
    (tmp_path / "data" / "two").symlink_to(project)
    (project / "sub" / "round").symlink_to(tmp_path / "data")
    (project / "sub" / "dangling").symlink_to("nowhere")
    (project / "sub" / "itself").symlink_to("itself")
    found = [file.path for file in scan_input(tmp_path / "data")]
    assert found == [*(f"data/{way}/{name}" for way in ("one", "two") for name in ("a.py", "big", "sub/same.py")), "data/x"]
    assert [file.path for file in scan_input(tmp_path / "data" / "x")] == ["x"]


def many(root, count):
    for number in range(count):
        path = root / f"{number % 7}" / f"{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number)
    return root


def test_hundreds_of_files_are_one_request_when_they_lie_there(azure, azure_share, tmp_path):
    files = scan(many(tmp_path / "many", 400))
    azure.reset()
    sent = upload(azure_share, files)
    assert sent == sum(file.size for file in files)
    found = azure.requests()
    assert sum(one.received for one in found if "/objects/trees/" not in one.path) == sent
    # The tree, the listing, the folders, and each file once.
    assert len(found) <= 400 + 256 + 10
    azure.reset()
    assert upload(azure_share, scan(tmp_path / "many")) == 0
    assert [(one.method, one.received) for one in azure.requests()] == [("GET", 0)]
    (tmp_path / "many" / "3" / "3.py").write_bytes(b"changed")
    azure.reset()
    assert upload(azure_share, scan(tmp_path / "many")) == 7
    assert len([one for one in azure.requests() if one.method == "PUT"]) <= 4


def test_a_set_of_files_counts_only_when_all_of_it_was_sent(azure, azure_share, tmp_path):
    files = scan(many(tmp_path / "many", 30))
    files[11].source.unlink()
    with pytest.raises(ProjectError, match="can't be read"):
        upload(azure_share, files)
    assert azure_share.list(f"{OBJECTS}/trees") == []
    files[11].source.write_bytes(files[11].path.split("/")[1][:-3].encode())
    upload(azure_share, files)
    assert all(azure_share.read(object_path(file.sha256)) == file.source.read_bytes() for file in files)
    assert len(azure_share.list(f"{OBJECTS}/trees")) == 1


def test_a_tenth_of_the_requests_fails(azure, azure_share, tmp_path):
    files = scan(many(tmp_path / "many", 100))
    (tmp_path / "large").write_bytes(os.urandom(9 << 20))
    files += scan_input(tmp_path / "large")
    azure.fail(0.1, seed=5, retry_after=0.1)
    try:
        told = []
        assert upload(azure_share, files, lambda sent, total: told.append((sent, total))) == sum(file.size for file in files)
    finally:
        azure.fail(0)
    total = sum(file.size for file in files)
    assert told[-1] == (total, total)
    assert [sent for sent, _ in told] == sorted(sent for sent, _ in told)
    for file in files:
        assert azure_share.read(object_path(file.sha256)) == file.source.read_bytes()
