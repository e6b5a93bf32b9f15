"""Who says what a client runs, and where it sends something, when a job has ended."""

from __future__ import annotations

import shutil

import pytest
from job_folder import JobFolder
from notify_channel import Channel

from mlflow_batchai.client import submitting
from mlflow_batchai.errors import DocumentError
from mlflow_batchai.follower import notify
from mlflow_batchai.job.signing import Signature
from mlflow_batchai.job.states import JobState


def test_another_users_plan_tells_nobody(tmp_path, monkeypatch) -> None:
    """One that this user trusts to be relayed: it does not say what this machine runs, or sends where."""
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))
    channel, mark = Channel(), tmp_path / "ran"
    plan = {"url": channel.url, "on": ["failed"], "command": ["touch", str(mark)]}
    for signature in (Signature.OTHER, Signature.OWN):
        job = JobFolder(tmp_path / signature.value, notify=plan).job
        job.signature = signature
        notify.tell(job, 1, JobState("failed"), "", {}, print)
        assert mark.exists() == bool(channel.posts) == (signature is Signature.OWN)
    channel.close()


@pytest.mark.parametrize("suffix", [".zip", ""])
def test_a_project_from_elsewhere_runs_no_command_here(tmp_path, monkeypatch, suffix: str) -> None:
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))
    project = tmp_path / "project"
    project.mkdir()
    (project / "MLproject").write_text("name: p\nentry_points: {main: {command: 'true'}}\n")
    (project / "batchai.yaml").write_text("notify: {command: [touch, x]}\n")
    shutil.make_archive(str(project), "zip", project)
    read = lambda settings: submitting.read(f"{project}{suffix}", "main", None, settings, print)  # noqa: E731
    if suffix:
        with pytest.raises(DocumentError, match=r"notify\.command would run on this machine"):
            read({})
        (project / "batchai.yaml").unlink()
        shutil.make_archive(str(project), "zip", project)
    own = read({"notify": {"command": ["touch", "x"]}}).config.notify
    assert own is not None and own.command == ("touch", "x")
