"""Changes of a job's code since its git commit: real repositories, files that stay here."""

from __future__ import annotations

import subprocess

import pytest

from mlflow_batchai.plan import changes
from mlflow_batchai.plan.changes import since_commit
from mlflow_batchai.storage.objects import scan

NOBODY = ("-c", "user.name=n", "-c", "user.email=n@example.com")


@pytest.fixture
def project(tmp_path):
    """A project in a folder of a repository, committed."""
    folder = tmp_path / "repository" / "our project"
    folder.mkdir(parents=True)
    files = {
        "train.py": "one\ntwo\n",
        "gone.py": "gone\n",
        "data.csv": "1,2\n",
        ".batchaiignore": "*.csv\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder.parent / "beside.py").write_text("1\n")
    git(folder.parent, "init", "-q")
    git(folder.parent, "add", ".")
    git(folder.parent, "commit", "-q", "-m", "first")
    return folder


def git(folder, *words):
    subprocess.run(["git", "-C", str(folder), *NOBODY, *words], check=True)


def told(folder):
    return since_commit(folder, scan(folder))


def test_code_as_it_was_committed(project):
    (project / "train.py").write_text("one\ntwo\n")  # as it was, at another time
    found = told(project)
    assert len(found["commit"]) == 40
    assert not found["differs"]
    assert found["changed"] == found["deleted"] == found["untracked"] == []


def test_what_has_changed_of_what_is_sent(project):
    (project / "train.py").write_bytes(b"one\nzw\xf6lf \xe2\x82\xac\n")
    (project / "gone.py").unlink()
    (project / "data.csv").write_text("3,4\n")
    (project / "new\nname.py").write_text("new")
    (project.parent / "beside.py").write_text("2\n")
    found = told(project)
    assert found["differs"]
    assert (found["changed"], found["deleted"], found["untracked"]) == (["train.py"], ["gone.py"], ["new\nname.py"])


def test_without_git_there_is_nothing_to_tell(project, tmp_path, monkeypatch):
    (tmp_path / "plain").mkdir()
    assert told(tmp_path / "plain") is None
    git(tmp_path / "plain", "init", "-q")  # and no commit
    assert told(tmp_path / "plain") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert told(project) is None


def test_a_git_that_hangs_holds_up_nothing(project, tmp_path, monkeypatch):
    program = tmp_path / "git"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(changes, "GIT_SECONDS", 0.2)
    assert told(project)["note"] == "git took more than 0 s to say what has changed"
