"""The files that describe what ran, in a real store: sent early, and by the next relay if the first one died."""

from __future__ import annotations

import json

import pytest
from relay_world import Crash

from mlflow_batchai.errors import ShareError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease
from mlflow_batchai.tracking import relay as relay_module

CHANGES = {
    "commit": "c" * 40,
    "differs": True,
    "changed": ["train.py", "conf.py"],
    "deleted": [],
    "untracked": ["new.py"],
    "withheld": ["conf.py"],
    "diff": "diff --git a/train.py b/train.py\n+zw\udcf6lf €\n",
    "note": None,
}
CODE = [{"path": "train.py", "sha256": "a" * 64, "mode": 420}, {"path": "new\udcf6.py", "sha256": "b" * 64, "mode": 420}]
PACKAGES = {"k": "environment", "t": 1, "python": "3.11.4", "packages": ["keras==3.15.1", "numpy==2.1.0"]}


@pytest.fixture
def scene(relayed):
    made, client, relay = relayed
    made.plan["code"] = CODE
    made.plan["model"] = None
    made.write(made.paths.plan, made.plan)
    made.write(made.paths.spec, {"nodeCount": 2, "secrets": [{"name": "A", "value": None}]})
    made.write(made.paths.code, CHANGES)
    return made, client, relay


def sent(client, made):
    run_id = made.plan["runId"]
    found = {}
    for file in client.list_artifacts(run_id, "job"):
        with open(client.download_artifacts(run_id, file.path), "rb") as opened:
            found[file.path.removeprefix("job/")] = opened.read()
    return found


def test_what_runs_is_told_while_it_runs(scene, monkeypatch):
    made, client, relay = scene
    monkeypatch.setattr(relay_module, "FILES_SECONDS", 0.0)
    one = relay()
    one.files_when_due()
    found = sent(client, made)
    assert sorted(found) == ["changes.diff", "code.json", "document.json", "plan.json"]
    assert found["changes.diff"] == b"diff --git a/train.py b/train.py\n+zw" + b"\xf6" + "lf €\n".encode()
    code = json.loads(found["code.json"])
    assert code["files"] == 2 and len(code["sha256"]) == 64 and "diff" not in code["git"]
    assert (code["git"]["commit"], code["git"]["untracked"]) == ("c" * 40, ["new.py"])
    assert json.loads(found["document.json"])["nodeCount"] == 2 and json.loads(found["plan.json"])["code"] == CODE
    # The node tells its packages later; nothing is sent again.
    client.calls.clear()
    one.files_when_due()
    assert client.calls == []
    made.segment(0, PACKAGES)
    one.step()
    one.files_when_due()
    assert client.calls == ["log_artifacts"]
    assert sent(client, made)["environment.txt"] == b"# Python 3.11.4\nkeras==3.15.1\nnumpy==2.1.0\n"
    made.verdict()
    one.finish(made.job.state())
    notes = client.get_run(made.plan["runId"]).data.tags["batchai.notes"]
    assert "job/changes.diff lacks conf.py" in notes
    assert Lease(made.job).left_out() == []


@pytest.mark.parametrize("before", ["document", "changes"])
def test_a_share_that_is_not_mounted_for_a_moment_costs_nothing(scene, monkeypatch, before):
    """Its mount point is empty when the files are read, or from the middle on: that says nothing of what lies on the share."""
    made, client, relay = scene
    monkeypatch.setattr(relay_module, "FILES_SECONDS", 0.0)
    one, root, read = relay(), made.share.root, getattr(Job, before)

    def unmounted(job):
        root.rename(root.with_name("away"))
        root.mkdir()
        return read(job)

    with monkeypatch.context() as patch, pytest.raises(ShareError, match="is the share mounted there"):
        patch.setattr(Job, before, unmounted)
        one.files_when_due()
    assert sent(client, made) == {}
    root.rmdir()
    root.with_name("away").rename(root)
    one.files_when_due()
    found = sent(client, made)
    assert json.loads(found["document.json"])["nodeCount"] == 2
    assert json.loads(found["code.json"])["git"]["commit"] == "c" * 40


def test_packages_outlive_the_relay_that_read_of_them(scene):
    made, client, relay = scene
    made.segment(0, PACKAGES)
    first = relay()
    first.step()
    client.before["log_artifacts"] = [Crash()]
    with pytest.raises(Crash):
        first.files_when_due()
    client.dead = False
    made.verdict()
    relay().finish(made.job.state())
    assert sorted(sent(client, made)) == ["changes.diff", "code.json", "document.json", "environment.txt", "plan.json"]


def test_a_store_that_takes_no_artifact_holds_up_no_metric(scene):
    made, client, relay = scene
    one = relay()
    client.before["log_artifacts"] = [OSError("no room")]
    with pytest.raises(OSError, match="no room"):
        one.files_when_due()
    one.files_when_due()  # not due again
    assert sent(client, made) == {}
    made.verdict()
    one.finish(made.job.state())
    assert "plan.json" in sent(client, made)
