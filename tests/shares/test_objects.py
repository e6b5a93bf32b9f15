"""Content-addressed files: an unchanged project sends nothing, and nothing lies under a hash that isn't its own."""

from __future__ import annotations

import hashlib

import pytest

from mlflow_batchai.errors import ProjectError
from mlflow_batchai.node.protocol import object_path
from mlflow_batchai.shares import objects
from mlflow_batchai.shares.directory import DirectoryShare
from mlflow_batchai.shares.objects import scan, scan_input, upload


@pytest.fixture
def share(tmp_path):
    return DirectoryShare(tmp_path / "share")


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


def test_a_file_that_changes_meanwhile_is_not_stored(share, project):
    files = scan(project)
    (project / "big").write_bytes(b"y")
    with pytest.raises(ProjectError, match="big changed while it was sent; submit again"):
        upload(share, files)
    sha256 = next(file.sha256 for file in files if file.path == "big")
    assert object_path(sha256).rpartition("/")[2] not in [
        entry.name for entry in share.list(object_path(sha256).rpartition("/")[0])
    ]


def test_a_file_that_goes_meanwhile_is_a_sentence(share, project):
    files = scan(project)
    (project / "a.py").unlink()
    with pytest.raises(ProjectError, match=r"a\.py' can't be read: No such file"):
        upload(share, files)


def test_links_send_nothing(share, project):
    (project / "link").symlink_to("a.py")
    (project / "sub" / "up").symlink_to("../sub")
    files = {file.path: file for file in scan(project)}
    assert files["link"].entry() == {"path": "link", "link": "a.py"}
    assert files["sub/up"].entry() == {"path": "sub/up", "link": "../sub"}
    assert upload(share, [files["link"], files["sub/up"]]) == 0


def test_the_order_and_the_modes_are_the_same_everywhere(project):
    (project / "run").write_bytes(b"")
    (project / "run").chmod(0o500)
    (project / "a.py").chmod(0o466)
    assert [(file.path, oct(file.mode)) for file in scan(project)] == [
        ("a.py", "0o644"),
        ("big", "0o644"),
        ("run", "0o755"),
        ("sub/same.py", "0o644"),
    ]


def test_a_folder_that_cant_be_read_is_not_passed_over(project, monkeypatch):
    real = objects.os.scandir

    def scandir(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(objects.os, "scandir", scandir)
    with pytest.raises(ProjectError, match="sub' can't be read: Permission denied"):
        scan(project)


def test_inputs_follow_links_and_circles_end(project, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_bytes(b"1")
    (tmp_path / "data" / "one").symlink_to(project)
    (tmp_path / "data" / "two").symlink_to(project)
    (project / "sub" / "round").symlink_to(tmp_path / "data")
    (project / "sub" / "dangling").symlink_to("nowhere")
    found = [file.path for file in scan_input(tmp_path / "data")]
    assert found == [
        "data/one/a.py",
        "data/one/big",
        "data/one/sub/same.py",
        "data/two/a.py",
        "data/two/big",
        "data/two/sub/same.py",
        "data/x",
    ]
    assert [file.path for file in scan_input(tmp_path / "data" / "x")] == ["x"]
