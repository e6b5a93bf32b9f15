"""Changes of a job's code since its git commit: real repositories, secrets, files that stay here, too much of it."""

from __future__ import annotations

import subprocess

import pytest

from mlflow_batchai.plan import changes
from mlflow_batchai.plan.changes import since_commit
from mlflow_batchai.plan.secrecy import without_secrets
from mlflow_batchai.storage.objects import scan

NOBODY = ("-c", "user.name=n", "-c", "user.email=n@example.com")
SECRET = "hunter2-hunter2"


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
        "conf.py": f"TOKEN = '{SECRET}'\n",
        "job.yaml": "properties:\n  secrets: [{name: A, value: another-secret}]\n  nodeCount: 1\n",
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


def told(folder, secrets=()):
    return since_commit(folder, without_secrets(scan(folder), secrets, ())[0], secrets)


def test_code_as_it_was_committed(project):
    (project / "train.py").write_text("one\ntwo\n")  # as it was, at another time
    found = told(project)
    assert len(found["commit"]) == 40
    assert not found["differs"] and found["diff"] is None
    assert found["changed"] == found["deleted"] == found["untracked"] == found["withheld"] == []


def test_what_has_changed_of_what_is_sent(project):
    (project / "train.py").write_bytes(b"one\nzw\xf6lf \xe2\x82\xac\n")
    (project / "gone.py").unlink()
    (project / "data.csv").write_text("3,4\n")
    (project / "new\nname.py").write_text("new")
    (project.parent / "beside.py").write_text("2\n")
    found = told(project)
    assert found["differs"]
    assert (found["changed"], found["deleted"], found["untracked"]) == (["train.py"], ["gone.py"], ["new\nname.py"])
    diff = found["diff"].encode("utf-8", "surrogateescape")
    assert diff.startswith(b"diff --git a/train.py b/train.py\n") and diff.endswith(b" one\n-two\n+zw\xf6lf \xe2\x82\xac\n")
    assert not any(word in diff for word in (b"gone", b"csv", b"beside", b"new"))


def test_a_change_that_shows_a_secret_is_kept_back(project):
    """One that was committed and is gone by now, too: in the text, and in a document by its place."""
    (project / "conf.py").write_text("import os\n")
    (project / "job.yaml").write_text("properties:\n  nodeCount: 2\n")
    (project / "train.py").write_text("one\nthree\n")
    found = told(project, [SECRET])
    assert found["withheld"] == ["conf.py", "job.yaml"] and found["changed"] == ["conf.py", "job.yaml", "train.py"]
    assert "+three" in found["diff"] and SECRET not in found["diff"] and "another-secret" not in found["diff"]


def test_a_long_change_is_cut_and_says_so(project, monkeypatch):
    monkeypatch.setattr(changes, "MOST_DIFF_BYTES", 500)
    (project / "train.py").write_text("line\n" * 1000)
    lines = told(project)["diff"].splitlines()
    assert lines[-2:] == ["+line", "# cut here: the rest is not kept"] and len(lines) < 101
    monkeypatch.setattr(changes, "MOST_BYTES", 400)
    (project / "data.csv").write_text("3,4\n" * 1000)  # that isn't sent, and comes first
    found = told(project)
    assert found["diff"].endswith("\n# cut here: the rest is not kept\n") and len(found["diff"]) < 500


def test_without_git_there_is_nothing_to_tell(project, tmp_path, monkeypatch):
    (tmp_path / "plain").mkdir()
    assert told(tmp_path / "plain") is None
    git(tmp_path / "plain", "init", "-q")  # and no commit
    assert told(tmp_path / "plain") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert told(project) is None


def test_a_git_that_hangs_holds_up_nothing(project, tmp_path, monkeypatch):
    program = tmp_path / "git"
    program.write_text("#!/bin/sh\ncase $* in *rev-parse*) echo abc;; *) exec sleep 600; esac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(changes, "GIT_SECONDS", 1.4)
    assert told(project) == {"commit": "abc", "note": "git took more than 1 s to say what has changed"}
