"""Submitting: what exists afterwards, and what a submit that fails half-way leaves behind."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from types import SimpleNamespace

import pytest
from idle_engine import Engine
from mlflow.exceptions import MlflowException
from plans import bare_plan

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.plan import Volume
from mlflow_batchai.client import lookup, runner, submitting
from mlflow_batchai.client.lookup import NoFolderError
from mlflow_batchai.client.signals import Signals
from mlflow_batchai.documents.cluster import ClusterDocument
from mlflow_batchai.errors import (
    ClusterError,
    JobDetachedError,
    JobError,
    JobUnreadableError,
    ProjectError,
    ShareError,
    UsageError,
)
from mlflow_batchai.follower import detached, service_client
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.follower.service_client import Told
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease
from mlflow_batchai.plan.prepared import Prepared
from mlflow_batchai.storage import credentials
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.storage.objects import scan, upload
from mlflow_batchai.tracking import runs


@pytest.fixture
def scene(store_template, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))
    shutil.copy(store_template, tmp_path / "m.db")
    tracking = runs.absolute("sqlite:///m.db", tmp_path)
    mlflow = runs.client(tracking)
    experiment = mlflow.create_experiment("My exp/1", artifact_location=(tmp_path / "artifacts").as_uri())
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("1", encoding="utf-8")
    volumes = (Volume("cluster", "share", "link"),)
    plan = bare_plan(folder_prefix="logs", volumes=volumes, name="toy-012345", job="0123456789")
    code = scan(tmp_path / "project")
    prepared = Prepared(plan, {"TOKEN": "hush-hush"}, {}, 60.0, [], parameters={"lr": "0.1"}, code=code)
    cluster = SimpleNamespace(
        name="local",
        document=ClusterDocument(),
        engine=Engine(),
        share=DirectoryShare(tmp_path / "share"),
        location=None,
        record=None,
    )
    request = {"workspace": "default", "tags": {"mlflow.user": "me"}, "experiment": mlflow.get_experiment(experiment)}
    spawned = []
    monkeypatch.setattr(
        service_client, "follow", lambda order, environment: spawned.append((order, environment)) or Told(4711, True)
    )
    scene = SimpleNamespace(mlflow=mlflow, experiment=experiment, cluster=cluster, spawned=spawned, root=tmp_path)
    scene.submit = lambda **more: submitting.create(prepared, cluster, tracking, **{**request, **more})
    scene.code = code
    scene.run = lambda: mlflow.search_runs([experiment])[0]
    return scene


def test_of_two_jobs_of_one_name_at_once_the_first_goes_on(scene):
    """Neither has seen the other's run before it made its own."""
    scene.submit(unique=True)
    first = scene.run().info.run_id
    with pytest.raises(UsageError, match="somebody else has just started a job 'toy-012345' in 'My exp/1'"):
        scene.submit(unique=True)
    assert [run.info.run_id for run in scene.mlflow.search_runs([scene.experiment])] == [first]
    assert len(scene.cluster.engine.started) == len(scene.spawned) == 1


def written(root):
    return b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())


def test_submitted(scene):
    submitted = scene.submit()
    run = scene.run()
    folder = "logs/workspaces/default/experiments/My-exp-1/jobs/toy-012345/0123456789"
    assert (run.info.status, run.data.params, runs.tags_of(run)["batchai.folder"]) == ("SCHEDULED", {"lr": "0.1"}, folder)
    assert submitted.job.plan.run_id == submitted.run_id == run.info.run_id
    assert submitted.job.handle() == {"engine": "fake", "nodes": [0]}
    (request,) = scene.cluster.engine.started
    assert (request.mark, request.folder) == ("0123456789/1", folder)
    assert request.secrets == {
        "variables": {"TOKEN": "hush-hush"},
        "share": None,
        "plan": submitted.job.plan_digest,
        "attempt": None,
    }
    ((order, environment),) = scene.spawned
    job = submitted.job.plan.job
    assert order == {"share": scene.cluster.share.url, "folder": folder, "run": run.info.run_id, "job": job, "told": {}}
    assert environment["MLFLOW_TRACKING_URI"] == f"sqlite:///{scene.root}/m.db"
    assert b"hush-hush" not in written(scene.root)
    assert "hush-hush" not in json.dumps([environment, run.data.tags])


def test_tags_that_a_person_searches_by(scene):
    """Defaults of resource group, cluster and attempt go without saying: MLflow's page of a run shows every tag."""
    scene.submit()
    ours = {key.removeprefix("batchai."): value for key, value in scene.run().data.tags.items() if key.startswith("batchai.")}
    assert runs.is_signed(scene.run()) and ours.pop("mac")
    assert ours == {"job": "toy-012345", "cluster": "local", "workspace": "default", "executionState": "queued"}
    for_clients = runs.tags_of(scene.run()).items() - scene.run().data.tags.items()
    inner = {key.removeprefix("batchai."): value for key, value in for_clients}
    assert inner.pop("share") == scene.cluster.share.url and inner.pop("folder").startswith("logs/workspaces/default/")
    assert inner == {"engine": "local", "tool": "custom", "nodes": "1", "ranks": "1"}
    scene.submit(workspace="vision", resource_group="rg.one")
    tags = runs.tags_of(scene.run())
    cluster = "/subscriptions/local/resourceGroups/batchai/providers/Microsoft.BatchAI/workspaces/default/clusters/local"
    assert (tags["batchai.resourceGroup"], tags["batchai.clusterId"]) == ("rg.one", cluster)


@pytest.mark.parametrize("text", ["[]", "{", '{"folder": 1}', "[" * 100_000, ""])
def test_what_somebody_has_written_for_clients(scene, text):
    scene.submit()
    scene.mlflow.set_tag(
        scene.run().info.run_id, runs.TAG_MAC, f"{scene.run().data.tags[runs.TAG_MAC].split()[0]} {text}"[:5000]
    )
    assert runs.TAG_FOLDER not in runs.tags_of(scene.run()) and not runs.is_signed(scene.run())


def check_undone(scene, reason, status="FAILED"):
    run = scene.run()
    assert (run.info.status, run.data.tags["batchai.executionState"]) == (status, "failed")
    assert run.data.tags["batchai.reason"] == reason
    (plan,) = (scene.root / "share").rglob("plan.json")
    job = Job(scene.cluster.share, str(plan.parent.parent.relative_to(scene.root / "share")))
    assert job.state().reason == reason
    assert job.state().run_status == status
    assert not job.claim_verdict({})


def test_an_engine_that_fails_leaves_a_failed_run_and_a_verdict(scene):
    scene.cluster.engine.error = ClusterError("no nodes today")
    with pytest.raises(ClusterError, match="no nodes today"):
        scene.submit()
    check_undone(scene, "no nodes today")
    assert scene.spawned == []


def test_a_follower_that_cant_start_ends_the_agents(scene, monkeypatch):
    def spawn(*arguments):
        raise ClusterError("python can't be started")

    monkeypatch.setattr(service_client, "follow", spawn)
    with pytest.raises(ClusterError):
        scene.submit()
    check_undone(scene, "python can't be started")
    assert scene.cluster.engine.cancelled == [{"engine": "fake", "nodes": [0]}]


def test_ctrl_c_while_submitting(scene):
    scene.cluster.engine.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        scene.submit()
    check_undone(scene, "interrupted while it was being submitted", "KILLED")


@pytest.mark.parametrize("call", ["set_tag", "update_run"])
@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (MlflowException("it hung up"), "FAILED", "MLflow: it hung up"),
        (KeyboardInterrupt(), "KILLED", "interrupted while it was being submitted"),
    ],
)
def test_a_store_that_fails_when_the_run_was_only_just_made(scene, fails_once, call, error, status, reason):
    """At its signature, or when it is to be SCHEDULED: no run is left that waits for nothing."""
    fails_once(call, error)
    with pytest.raises(type(error)):
        scene.submit()
    run = scene.run()
    assert (run.info.status, run.data.tags["batchai.reason"]) == (status, reason)


def test_code_that_changes_meanwhile_leaves_no_run(scene):
    (scene.root / "project" / "train.py").write_text("2", encoding="utf-8")
    with pytest.raises(ProjectError, match="changed while it was sent; submit again"):
        scene.submit()
    assert scene.mlflow.search_runs([scene.experiment]) == []


def test_a_job_of_another_version_is_told_so(scene):
    """It may have agents: nobody takes it for a job that never began."""
    submitted = scene.submit()
    path = submitted.job.paths.plan
    scene.cluster.share.write(path, protocol.encode([{"protocol": 99, "job": "0123456789"}]))
    with pytest.raises(JobUnreadableError, match="can't be read: it is of protocol 99, and this version reads"):
        lookup.find("toy-012345", submitted.tracking)


def lost(scene):
    """What finding a job says whose submitter died before it had written the plan."""
    submitted = scene.submit()
    shutil.rmtree(scene.root / "share" / submitted.job.folder)
    with pytest.raises(NoFolderError) as error:
        lookup.find("toy-012345", submitted.tracking)
    return error.value, submitted.tracking


def test_the_run_of_a_job_that_never_began_can_be_ended(scene):
    error, tracking = lost(scene)
    assert str(error).endswith("; `batchai job terminate toy-012345` ends its run")
    assert (error.name, error.run_id, error.unstarted, error.run_ended) == ("toy-012345", scene.run().info.run_id, True, False)
    lookup.end_run(error, tracking)
    run = scene.run()
    assert (run.info.status, run.data.tags["batchai.executionState"]) == ("KILLED", "failed")
    assert run.data.tags["batchai.reason"] == "terminated; nothing of it had been started"
    with pytest.raises(NoFolderError, match="no job folder: terminated; nothing of it had been started") as again:
        lookup.find("toy-012345", tracking)
    assert (again.value.unstarted, again.value.run_ended) == (False, True)
    assert "batchai job terminate" not in str(again.value)


def test_the_run_of_a_job_that_did_begin_is_not_ended_for_want_of_its_folder(scene):
    _, tracking = lost(scene)
    scene.mlflow.set_tag(scene.run().info.run_id, "batchai.executionState", "running")
    scene.mlflow.update_run(scene.run().info.run_id, status="RUNNING")
    with pytest.raises(NoFolderError) as error:
        lookup.find("toy-012345", tracking)
    assert not error.value.run_ended
    with pytest.raises(NoFolderError):
        lookup.end_run(error.value, tracking)
    assert scene.run().info.status == "RUNNING"


@pytest.mark.parametrize("here", ["another share", "an empty folder", "nothing"])
def test_a_job_whose_share_is_elsewhere_on_this_machine(scene, here):
    """What lies at the submitter's path on this machine doesn't matter where its document of the cluster leads to the job."""
    submitted = scene.submit()
    (scene.root / "share").rename(scene.root / "mounted")
    if here != "nothing":
        elsewhere = DirectoryShare(scene.root / "share")
        if here == "another share":
            upload(elsewhere, scene.code)
    with pytest.raises(JobError if here == "another share" else ShareError, match="toy-012345") as error:
        lookup.find("toy-012345", submitted.tracking)
    if here != "another share":  # that is no place of which one could say that nothing was ever started there
        assert "mount it there, or describe cluster 'local' here" in str(error.value)
    documents = scene.root / "home" / "clusters"
    documents.mkdir(parents=True)
    (documents / "local.yaml").write_text(f"engine: local\nshare: {scene.root / 'mounted'}\n", encoding="utf-8")
    found = lookup.find("toy-012345", submitted.tracking)
    assert (found.job.share.root, found.run_id) == (scene.root / "mounted", submitted.run_id)


def retag(scene, submitted, tags):
    """Say as its submitter that a job lies elsewhere."""
    there = {**runs.tags_of(scene.run()), **tags}
    for name, value in {**there, runs.TAG_MAC: runs.signature(submitted.run_id, there)}.items():
        scene.mlflow.set_tag(submitted.run_id, name, value)


def test_a_job_whose_cluster_is_not_known_here_is_never_said_to_have_none(scene):
    submitted = scene.submit()
    retag(scene, submitted, {runs.TAG_CLUSTER: "gpus"})
    shutil.rmtree(scene.root / "share" / submitted.job.folder)
    with pytest.raises(ShareError, match=r"not on this machine \(there is no job at .*; there is no cluster 'gpus'"):
        lookup.find("toy-012345", submitted.tracking)


def test_a_job_on_an_azure_share_from_a_shell_without_credentials(scene, monkeypatch):
    """Nothing is to be mounted: what is missing is what opens it."""
    submitted = scene.submit()
    retag(scene, submitted, {runs.TAG_CLUSTER: "gpus", runs.TAG_SHARE: "http://127.0.0.1:1/nobody/jobs"})
    monkeypatch.setattr(credentials, "_named", {"http://127.0.0.1:1/ACCOUNT"})
    with pytest.raises(ShareError, match=r"job toy-012345 can't be read from here: there is no key, SAS or Azure") as error:
        lookup.find("toy-012345", submitted.tracking)
    assert "mount" not in str(error.value)


# Watching.


class Console:
    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)

    def state(self, text):
        self.said.append(text)

    def records(self, records):
        self.said += [record["k"] for record in records]

    def tell_step(self):
        pass

    def sending(self, told):
        self.said += [told] if told else []

    def close(self):
        self.said.append("closed")


@pytest.fixture
def watching(folder, monkeypatch):
    """(job folder, submitted, script): at each wait the next thing of the script happens."""
    made = folder()
    script = []
    monkeypatch.setattr(runner.time, "sleep", lambda seconds: script.pop(0)())
    monkeypatch.setattr(detached, "start_follower", lambda submitted: None)
    submitted = Submitted(made.job, "r" * 32, None)
    return made, submitted, script


def finish(made):
    lease = Lease(made.job)
    lease.acquire()
    lease.save({}, finished=True)


def test_watch_shows_all_until_the_run_is_finished(watching):
    made, submitted, script = watching
    made.announce(0)
    made.segment(0, {"k": "a"})

    def end():
        made.segment(1, {"k": "b"})
        made.verdict()

    script += [end, lambda: finish(made)]
    console = Console()
    assert runner.watch(submitted, console, Signals()).execution_state == "succeeded"
    assert console.said == ["a", "running", "b", "closed"]


def away(job, monkeypatch, *times):
    """Have the share fail for the looks of those numbers."""
    state, looks = job.state, itertools.count()

    def look(*arguments):
        if next(looks) in times:
            raise ShareError("share https://x: there is no host x")
        return state(*arguments)

    monkeypatch.setattr(job, "state", look)


def test_a_share_that_is_away_for_a_while_is_looked_for(watching, monkeypatch):
    """This machine slept, and has no network yet: a job of days is not left for that."""
    made, submitted, script = watching
    made.announce(0)
    away(submitted.job, monkeypatch, 1, 2)
    script += [lambda: made.segment(0, {"k": "a"}), lambda: None, lambda: None, lambda: None, lambda: None]
    script += [made.verdict, lambda: finish(made)]
    console = Console()
    assert runner.watch(submitted, console, Signals()).execution_state == "succeeded"
    said = "share https://x: there is no host x (job toy-0123 goes on; still looking for it)"
    assert console.said == ["running", "a", said, "closed"]


def test_a_share_that_stays_away_is_left_in_the_end(watching, monkeypatch):
    _, submitted, _ = watching
    now = [1000.0]
    away(submitted.job, monkeypatch, *range(1000))
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(runner.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    with pytest.raises(ShareError, match="there is no host x; job toy-0123 goes on: batchai job attach toy-0123"):
        runner.watch(submitted, Console(), Signals())
    assert now[0] - 1000 == pytest.approx(runner.SHARE_PATIENCE_SECONDS, rel=0.1)


def test_only_what_comes_from_now_on(watching):
    made, submitted, _ = watching
    for number in range(1500):
        made.segment(number, {"k": str(number)})
    made.verdict()
    finish(made)
    console = Console()
    runner.watch(submitted, console, Signals(), from_start=False)
    assert console.said == ["closed"]


def test_a_follower_that_keeps_dying_is_told_of(watching, monkeypatch):
    _, submitted, script = watching
    submitted.follower = 1
    monkeypatch.setattr(detached, "start_follower", lambda job: setattr(job, "starts", job.starts + 1))
    script += [lambda: None] * 9
    with pytest.raises(JobError, match=r"keeps ending; see .*0123456789\.log"):
        runner.watch(submitted, Console(), Signals())
    assert submitted.starts == detached.FOLLOWER_STARTS


def test_ctrl_c_ends_the_job_and_a_second_one_leaves_it(watching):
    made, submitted, script = watching
    console = Console()

    def look():
        assert [request["why"] for request in made.job.requests()] == ["Ctrl-C"]
        os.kill(os.getpid(), signal.SIGINT)

    script += [lambda: os.kill(os.getpid(), signal.SIGINT), look]
    with pytest.raises(JobDetachedError, match="left before it has ended"):
        runner.watch(submitted, console, Signals())
    assert len(made.job.requests()) == 1
    assert "ending job toy-0123" in console.said[1]


EMPTY = """
name: g
entry_points:
  main: {command: "true"}
  zero:
    parameters:
    command: "true"
"""


def test_a_project_is_the_same_from_a_folder_a_git_version_and_an_archive(tmp_path, monkeypatch):
    """One reader for all: MLflow's own fails for an empty ``parameters:`` with a Python error.

    A folder inside may be written with slashes (mlflow 1534), a value may hold "=" (mlflow 3346), and is kept and handed on as
    it is, without quotes (mlflow 6811).
    """
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))
    project = tmp_path / "project"
    project.mkdir()
    (project / "in").mkdir()
    for folder in (project, project / "in"):
        (folder / "MLproject").write_text(EMPTY, encoding="utf-8")
    git = ["git", "-C", str(project), "-c", "user.name=x", "-c", "user.email=x@y"]
    for arguments in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True)
    shutil.make_archive(str(tmp_path / "project"), "zip", project)
    for uri, version in ((project, None), (project.as_uri(), "main"), (tmp_path / "project.zip", None)):
        for name, below in (("main", ""), ("zero", ""), ("zero", "#/in/")):
            source = submitting.read(f"{uri}{below}", name, version, {}, print)
            assert source.project.directory.name == ("in" if below else source.project.directory.name)
            ready = submitting.prepare(source, {"extra": "1 + 2 = 3"}, None, print)
            assert ready.prepared.plan.command == 'true --extra "${BATCHAI_PARAM_extra}"'
            assert ready.prepared.parameters == {"extra": "1 + 2 = 3"}
            assert ready.prepared.plan.parameters == {"BATCHAI_PARAM_extra": "1 + 2 = 3"}


@pytest.mark.parametrize(
    ("uri", "version", "reason"),
    [
        ("file:///nowhere/x.git", None, "'/nowhere/x.git' does not appear to be a git repository"),
        ("{}/broken.zip", None, "it is no zip archive"),
        ("http://127.0.0.1:9/x.zip", None, "there is no answer"),
        ("{}", "v9", "only supported for Git project"),
        ("http://me:hush@127.0.0.1:9/x.git", "v9", "git repo http://127.0.0.1:9/x.git-"),
    ],
)
def test_why_a_project_can_t_be_fetched_is_no_python_text(tmp_path, capfd, uri, version, reason):
    (tmp_path / "broken.zip").write_text("x", encoding="utf-8")
    with pytest.raises(ProjectError) as error:
        submitting.read(uri.format(tmp_path), "main", version, {}, print)
    assert reason in str(error.value)
    assert not re.search(r"Cmd|Errno|Pool|object|Error", str(error.value))
    assert "hush" not in f"{error.value}{capfd.readouterr()}"
