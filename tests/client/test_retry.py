"""Another attempt of a job: refusals before anything is touched, the agents' secrets, and a start that fails half-way."""

from __future__ import annotations

import base64
import os
import shutil
import threading
from types import SimpleNamespace
from urllib.parse import parse_qs

import pytest
from idle_engine import Engine
from waiting import wait_for

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.attempt import overrides
from mlflow_batchai.client import attempts, runner
from mlflow_batchai.documents.cluster import ClusterDocument
from mlflow_batchai.errors import ClusterError, JobError
from mlflow_batchai.follower import service_client
from mlflow_batchai.follower.credentials import for_next_attempt
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.follower.service_client import Told
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease, LeaseState
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.tracking import runs

KEY = base64.b64encode(bytes(64)).decode()
FILES = {
    "scope": "job",
    "path": "data",
    "kind": "azureFiles",
    "how": "rclone",
    "name": "file share acct/data",
    "where": "job.json: mountVolumes.azureFileShares[0]",
    "account": "acct",
    "endpoint": "https://acct.file.core.windows.net",
    "container": "data",
    "folder": "",
    "share": "https://acct.file.core.windows.net/data",
}
BLOBS = {
    **FILES,
    "kind": "azureBlob",
    "name": "blob container acct/data",
    "share": None,
    "endpoint": "https://acct.blob.core.windows.net",
}


@pytest.fixture
def scene(folder, store_template, tmp_path, monkeypatch, no_storage_credentials):
    """A job that has failed, and its run."""

    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))
    shutil.copy(store_template, tmp_path / "m.db")
    tracking = runs.absolute("sqlite:///m.db", tmp_path)
    mlflow = runs.client(tracking)
    experiment = mlflow.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    run = runs.create(mlflow, experiment, {runs.TAG_JOB: "toy", runs.TAG_CANCEL: "true"}, {}, None, None)
    changes = {"protocol": protocol.PROTOCOL_VERSION, "runId": run.info.run_id, "container": None, "tools": {}, "python": "p"}
    made = folder(**changes, secretVariables=[], secretNames=[], maxWallClockSeconds=60.0)
    spawned = []
    monkeypatch.setattr(service_client, "follow", lambda order, environment: spawned.append(order) or Told(os.getpid(), True))
    cluster = SimpleNamespace(name="local", engine=Engine(), open_nodes=9, share=DirectoryShare(made.share.root), location=None)
    world = SimpleNamespace(made=made, cluster=cluster, spawned=spawned, mlflow=mlflow)
    world.found = lambda: Submitted(made.job, run.info.run_id, tracking)
    world.run = lambda: mlflow.get_run(run.info.run_id)

    def fail(reason="it broke"):
        made.verdict("failed", reason=reason)
        lease = Lease(made.job)
        lease.acquire()
        lease.save({}, finished=True)
        runs.fail(mlflow, run.info.run_id, reason)

    def plan(**changes):
        made.plan.update(changes)
        made.write(made.paths.plan, made.plan)

    world.fail, world.plan = fail, plan
    return world


def test_results_of_the_attempt_before_are_waited_for(scene):
    """The last that a person sees of it is what is waited for; only then its run is begun anew."""
    scene.made.verdict("failed", reason="it broke")
    lease, said = Lease(scene.made.job), []
    lease.acquire()

    def say(text):
        said.append(text)
        assert scene.run().data.tags[runs.TAG_CANCEL] == "true"
        runs.fail(scene.mlflow, scene.run().info.run_id, "it broke")
        lease.save({}, finished=True)

    attempts.retry(scene.found(), scene.cluster, say)
    assert not {runs.TAG_REASON, runs.TAG_CANCEL} & set(scene.run().data.tags), "the wish to end it was for the attempt before"
    assert said == ["the last results of attempt 1 of job toy-0123 are on their way to MLflow; waiting for that"]
    assert len(scene.cluster.engine.started) == 1


def test_of_two_who_retry_at_once_one_does(scene):
    scene.fail()
    barrier, said = threading.Barrier(2), []
    found, begin = [scene.found(), scene.found()], Job.begin

    def together(job, attempt, own):
        barrier.wait()
        return begin(job, attempt, own)

    def go(mine):
        try:
            attempts.retry(mine, scene.cluster, print)
        except JobError as error:
            said.append(str(error))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "begin", together)
        threads = [threading.Thread(target=go, args=(mine,)) for mine in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert said == ["somebody else retries job toy-0123 just now; see it with: batchai job show toy-0123"]
    assert len(scene.cluster.engine.started) == 1
    assert scene.run().info.status == "SCHEDULED"


def test_half_a_retry_is_undone(scene):
    scene.fail()
    scene.cluster.engine.error = ClusterError("no nodes today")
    with pytest.raises(ClusterError):
        attempts.retry(scene.found(), scene.cluster, print)
    run, job = scene.run(), scene.found().job
    assert (run.info.status, run.data.tags[runs.TAG_REASON]) == ("FAILED", "no nodes today")
    assert (job.attempt, job.state().reason, job.at(1).state().reason) == (2, "no nodes today", "it broke")
    # It can be tried again, once the run has the end of that one.
    lease = Lease(job)
    assert lease.acquire()
    lease.save({}, finished=True)
    scene.cluster.engine.error = None
    attempts.retry(scene.found(), scene.cluster, print)
    assert scene.run().data.tags[runs.TAG_ATTEMPT] == "3"


REFUSED = [
    (
        {"protocol": 1},
        r"job toy-0123 was submitted by another version of mlflow-batchai \(its plan is of protocol 1, this is \d\)",
    ),
    (
        {"secretVariables": ["A", "B"], "secretNames": ["A"]},
        "job toy-0123 needs what only its submitter had; set BATCHAI_SECRET_A, BATCHAI_SECRET_B to what its document gave",
    ),
    ({"container": {"credentials": True, "image": "i"}}, "set BATCHAI_REGISTRY_USERNAME, BATCHAI_REGISTRY_PASSWORD to what"),
    (
        {"volumes": [BLOBS]},
        r"job toy-0123 can't start again from here: job.json: mountVolumes.azureFileShares\[0\] \(blob container acct/data\):"
        " there is no key for the account acct; set AZURE_BATCHAI_STORAGE_ACCOUNT and AZURE_BATCHAI_STORAGE_KEY",
    ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_is_not_here_is_told_before_anything_is_touched(scene, changes, words):
    scene.plan(**changes)
    with pytest.raises(JobError, match=words) as refused:
        attempts.requeue(scene.found(), scene.cluster, "room is needed", print)
    assert str(refused.value).endswith("; or wait for its end (waitforjobcompletion), or end it (terminate)")
    assert scene.made.job.requests() == []
    scene.fail()
    with pytest.raises(JobError, match=words):
        attempts.retry(scene.found(), scene.cluster, print)
    assert (scene.made.job.attempt, scene.run().info.status) == (1, "FAILED")
    assert scene.spawned == scene.cluster.engine.started == []


def test_a_cluster_with_another_share_is_refused(scene, tmp_path):
    scene.fail()
    scene.cluster.share = DirectoryShare(tmp_path / "another")
    with pytest.raises(JobError, match="which is not the share of cluster 'local' any more"):
        attempts.retry(scene.found(), scene.cluster, print)


def test_a_deleted_run_is_refused(scene):
    scene.fail()
    scene.mlflow.delete_run(scene.run().info.run_id)
    with pytest.raises(JobError, match=r"the run of job toy-0123 is deleted: mlflow runs restore --run-id \w{32}"):
        attempts.retry(scene.found(), scene.cluster, print)
    assert scene.made.job.attempt == 1


def test_what_agents_are_told_again(scene, monkeypatch):
    """Secrets from the environment; a new SAS of the job's lifetime for each share; keys where only they open a volume."""
    bound, by_key = {**FILES, "how": "bind"}, {**FILES, "how": "cifs"}
    volumes = [*scene.made.plan["volumes"], FILES, bound, by_key, BLOBS]
    names = {"secretVariables": ["COPIED", "TOKEN"], "secretNames": ["TOKEN"]}
    scene.plan(volumes=volumes, container={"credentials": True, "image": "i"}, **names)
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_ACCOUNT", "acct")
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_KEY", KEY)
    environment = {
        "BATCHAI_SECRET_TOKEN": "hush",
        "TOKEN": "not this one",
        "COPIED": "mine",
        "BATCHAI_REGISTRY_USERNAME": "me",
        "BATCHAI_REGISTRY_PASSWORD": "pass",
    }
    found = for_next_attempt(scene.made.job, scene.cluster, 3600.0, environment)
    assert found["variables"] == {"TOKEN": "hush", "COPIED": "mine"}
    assert found["registry"] == {"username": "me", "password": "pass"}
    sas = parse_qs(found["volumes"].pop("1")["sas"])
    assert (sas["sr"], "w" in sas["sp"][0]) == (["s"], True)
    assert found["volumes"] == {
        "3": {"key": KEY, "endpoint": by_key["endpoint"]},
        "4": {"key": KEY, "endpoint": BLOBS["endpoint"]},
    }


def test_a_setup_tasks_secrets_stand_in_the_clusters_document(scene):
    scene.plan(setupTask={"id": "i", "command": "x", "logs": {"volume": None, "path": ""}, "secretNames": ["TOKEN"]})
    task = {"commandLine": "x", "stdOutErrPathPrefix": "y", "secrets": [{"name": "TOKEN", "value": "hush"}]}
    scene.cluster.document = ClusterDocument(nodeSetup={"setupTask": task})
    assert for_next_attempt(scene.made.job, scene.cluster, 3600.0, {})["setup"] == {"TOKEN": "hush"}
    scene.cluster.document = ClusterDocument()
    with pytest.raises(JobError, match="the document of cluster 'local' has no TOKEN among the secrets of"):
        for_next_attempt(scene.made.job, scene.cluster, 3600.0, {})


# Requeue.


def test_a_job_that_has_ended_is_not_put_back(scene):
    scene.fail()
    with pytest.raises(JobError, match="job toy-0123 has ended"):
        attempts.requeue(scene.found(), scene.cluster, "room is needed", print)
    assert scene.made.job.requests() == []


def ends_once_asked(attempt, verdict):
    """A thread that gives the verdict of an attempt once somebody has asked for its end."""
    thread = threading.Thread(target=lambda: wait_for(attempt.requests) and verdict())
    thread.start()
    return thread


def test_requeued(scene, monkeypatch):
    """The follower that lives goes on with the next attempt: no other is started."""
    monkeypatch.setattr("mlflow_batchai.client.attempts.LOOK_SECONDS", 0.01)
    made, found = scene.made, scene.found()
    lease = Lease(made.job)
    lease.acquire()
    assert lease.view().state is LeaseState.HELD
    ended = ends_once_asked(made.job.at(1), lambda: made.verdict("queued", next=2, reason="room is needed"))
    said = []
    assert attempts.requeue(found, scene.cluster, "room is needed", said.append)
    assert said == ["job toy-0123 was asked to end its attempt 1; waiting for that"]
    ended.join()
    assert [(request["kind"], request["why"]) for request in made.job.at(1).requests()] == [("requeue", "room is needed")]
    (request,) = scene.cluster.engine.started
    assert (request.mark, found.job.attempt, found.job.handle()) == ("0123456789/2", 2, {"engine": "fake", "nodes": [0]})
    assert scene.spawned == []
    assert runner.state(found).execution_state == "queued"


def test_a_job_on_fewer_nodes_is_put_back_for_as_many(scene, monkeypatch):
    """Those that it has not are away, perhaps, and it would fail if it wanted them."""
    monkeypatch.setattr("mlflow_batchai.client.attempts.LOOK_SECONDS", 0.01)
    made = scene.made
    scene.plan(nodeCount=3, ranks=3, processCount=3)
    made.verdict("queued", next=2, retry=True, retriesLeft=1)
    made.job.at(1).begin(2, overrides.record(1, overrides.RETRY, "", {"nodeCount": 1, "processCount": 1, "ranks": 1}))
    found = scene.found()
    ended = ends_once_asked(made.job.at(2), lambda: found.job.claim_verdict(protocol.requeued_record("room", "me", 2)))
    assert attempts.requeue(found, scene.cluster, "room", print)
    ended.join()
    assert (found.job.attempt, found.job.node_count, found.job.plan.retries_left) == (3, 1, 1)


def test_retried_on_the_nodes_that_are_there(scene):
    """Of a cluster that has lost some, as the job does by itself."""
    scene.plan(nodeCount=3, ranks=3, processCount=3, minNodes=1, framework="horovod")
    scene.fail()
    found = scene.found()
    attempts.retry(found, scene.cluster, print)
    assert (found.job.attempt, found.job.node_count, found.job.plan.ranks) == (2, 1, 1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_cancels_meanwhile_has_his_way(scene, monkeypatch, when):
    made, found, other = scene.made, scene.found(), scene.found()
    cancel = threading.Thread(target=lambda: other.job._request(protocol.CANCEL, "me", "") if when == "after" else None)

    def verdict(job):
        if when == "before":
            made.verdict("failed", terminated=True, reason="terminated by me")
        else:
            made.verdict("queued", next=2, reason="room")
            cancel.start()
            cancel.join()
        return job.state()

    monkeypatch.setattr(attempts, "_await_verdict", verdict)
    assert not attempts.requeue(found, scene.cluster, "room", print)
    assert scene.cluster.engine.started == []
    state = runner.state(scene.found())
    assert (state.run_status, state.ended) == ("KILLED", True)
    assert scene.found().job.attempt == (1 if when == "before" else 2)


def test_a_job_that_could_not_start_again_is_left_as_it_is(scene):
    scene.cluster.engine.trouble = ClusterError("node gpu2 is away")
    with pytest.raises(JobError, match="node gpu2 is away; or wait for its end"):
        attempts.requeue(scene.found(), scene.cluster, "room", print)
    assert scene.found().job.requests() == [] and scene.spawned == []
