"""The attempts that a job goes on with by itself: when one is begun, on which nodes, and that it is begun once whoever dies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from idle_engine import Engine
from plans import bare_plan
from relay_world import Crash, Time

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.attempt import overrides
from mlflow_batchai.engines.base import Poll, PollState
from mlflow_batchai.errors import ClusterError, ClusterNotFoundError, JobError, ShareError
from mlflow_batchai.follower import detached, retries, service_client, supervisor
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.follower.retries import Leaving, NotHereError, Retries, fence_seconds, pause_before
from mlflow_batchai.follower.service_client import Told
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease, LeaseLostError, LeaseState
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.tracking.runs import Tracking


class Nodes(Engine):
    """Its agents are gone when they are asked; it may be told not to answer."""

    node_limit = usable = size = 3
    silent = None
    before = after = None

    def poll(self, handle):
        nodes = tuple(range(self.size))
        return Poll(PollState.UNKNOWN, "silent", (), nodes) if self.silent else Poll(PollState.GONE, "gone", nodes)

    def cancel(self, handle):
        if self.silent:
            raise ClusterError(self.silent)
        super().cancel(handle)

    def submit(self, request):
        if self.before:
            raise self.before
        handle = super().submit(request)
        if self.after:
            raise self.after
        return handle


@pytest.fixture
def scene(folder, monkeypatch):
    """A job of three nodes whose first attempt has failed, with one retry left, and whoever follows it."""
    made = folder(
        3,
        protocol=protocol.PROTOCOL_VERSION,
        framework="horovod",
        processCount=6,
        minNodes=2,
        retries=2,
        container=None,
        tools={},
        python="python",
        secretVariables=[],
        secretNames=[],
        maxWallClockSeconds=60.0,
    )
    made.handle()
    time, engine = Time(), Nodes()
    world = SimpleNamespace(made=made, time=time, engine=engine, said=[], checks=0, kept={}, lost=False, hook=None)
    share = DirectoryShare(made.share.root)
    cluster = SimpleNamespace(name="local", document=None, record=None, engine=engine, share=share, location=None, open_nodes=3)
    world.cluster = cluster
    monkeypatch.setattr(retries.clusters, "load", lambda name: (cluster, []))

    def check():
        world.checks += 1
        if world.lost:
            raise LeaseLostError("another process follows this job now")

    def wait(seconds):
        time.sleep(seconds)
        if world.hook:
            world.hook(time.now)

    def follower():
        return Retries(world.kept, check, wait, world.said.append, time.clock)

    def bring(by=None, attempt=2):
        (by or follower()).bring(made.job.at(attempt), engine)

    world.follower, world.bring = follower, bring
    return world


def fails(made, left=1, attempt=1, reason="rank 1 was killed\nits last line"):
    """An attempt's verdict after which the job goes on."""
    paths = protocol.JobPaths(made.plan["folder"], attempt)
    failed = protocol.verdict_record(protocol.FAILED, "agent-0", 3, [protocol.error_record("JobFailed")], reason)
    made.write(paths.verdict_file, overrides.again(failed, attempt, left))


def own(made, attempt):
    return made.job.at(attempt).overrides()


@pytest.mark.parametrize(("quick", "seconds"), [(0, 0), (1, 0), (2, 5), (3, 10), (4, 20), (5, 40), (6, 60), (99, 60)])
def test_pauses_grow(quick, seconds):
    assert pause_before(quick) == seconds


def test_after_how_long_a_node_that_does_not_answer_does_no_harm():
    """What it takes to be lost, its processes' time between SIGTERM and SIGKILL, 30 s to end what won't, and 15 s more."""
    assert fence_seconds(bare_plan(loss_seconds=60.0, terminate_seconds=10.0)) == 115.0


def test_it_is_begun_again(scene):
    fails(scene.made)
    scene.bring()
    record = own(scene.made, 2)
    assert (record["retriesLeft"], record["by"], record["why"]) == (1, "retry", "rank 1 was killed")
    assert "nodeCount" not in record
    (request,) = scene.engine.started
    assert (request.mark, request.attempt, request.node_count) == ("0123456789/2", 2, 3)
    job = scene.made.job
    assert (job.attempt, job.handle(), job.state().execution_state) == (2, {"engine": "fake", "nodes": [0]}, "queued")
    assert scene.checks == 1 and scene.time.now == 0.0
    # Asked again it has nothing to do, and neither has the next one who follows the job.
    scene.bring()
    assert len(scene.engine.started) == 1


@pytest.mark.parametrize("verdict", ["failed", None])
def test_only_what_a_verdict_says_is_begun(scene, verdict):
    """An attempt after the job's end is a person's; before there is a verdict it is nobody's."""
    if verdict:
        scene.made.verdict(verdict)
    scene.bring()
    assert scene.engine.started == []


def test_its_secrets_are_those_that_were_kept(scene, monkeypatch):
    scene.made.plan.update(secretVariables=["TOKEN"], secretNames=["TOKEN"], container={"credentials": True, "image": "i"})
    scene.made.write(scene.made.paths.plan, scene.made.plan)
    fails(scene.made)
    # A follower has many jobs: its environment is that of whoever started it.
    for name in ("BATCHAI_SECRET_TOKEN", "BATCHAI_REGISTRY_USERNAME", "BATCHAI_REGISTRY_PASSWORD"):
        monkeypatch.setenv(name, "another submitter's")
    retries.check_can_start(scene.made.job)  # for a client its own environment counts
    with pytest.raises(NotHereError, match=r"^waiting for attach \(needs BATCHAI_SECRET_TOKEN, BATCHAI_REGISTRY_USERNAME"):
        scene.bring()
    assert not scene.made.job.is_begun()
    scene.kept = {"variables": {"TOKEN": "hush"}, "registry": {"username": "me", "password": "pass"}}
    scene.bring()
    (request,) = scene.engine.started
    assert request.secrets["variables"] == {"TOKEN": "hush"} and request.secrets["registry"]["username"] == "me"
    assert "hush" not in repr(request)


def test_a_cluster_that_is_not_known_here(scene, monkeypatch):
    def unknown(name):
        raise ClusterNotFoundError(f"there is no cluster '{name}'")

    monkeypatch.setattr(retries.clusters, "load", unknown)
    fails(scene.made)
    with pytest.raises(
        NotHereError, match=r"waiting for attach where the job's cluster can be used \(there is no cluster 'local'"
    ):
        scene.bring()


def test_fewer_nodes_are_enough(scene):
    scene.engine.usable = 2
    fails(scene.made)
    scene.bring()
    record = own(scene.made, 2)
    assert {key: record[key] for key in ("nodeCount", "processCount", "ranks")} == overrides.on_nodes(
        scene.made.job.at(1).plan, 2
    )
    assert scene.engine.started[0].node_count == 2
    job = scene.made.job
    assert (job.node_count, job.plan.ranks, job.at(1).node_count) == (2, 4, 3)
    # An attempt after it has all nodes again, if they are there.
    fails(scene.made, left=0, attempt=2)
    scene.engine.usable, scene.engine.size = 3, 2
    scene.bring(attempt=3)
    assert scene.engine.started[1].node_count == scene.made.job.node_count == 3


def test_not_more_nodes_than_take_jobs(scene):
    scene.cluster.open_nodes = 1
    fails(scene.made)
    scene.bring()
    assert scene.engine.started[0].node_count == 2


def test_too_few_nodes_are_waited_for(scene):
    scene.engine.trouble = ClusterError("node gpu2 is away")

    def later(now):
        if now > 100:
            scene.engine.trouble = None

    scene.hook = later
    fails(scene.made)
    scene.bring()
    assert "attempt 2 waits for 2 nodes: node gpu2 is away" in scene.said and scene.said[-1] == ""
    assert 100 < scene.time.now < 200 and len(scene.engine.started) == 1


def test_nodes_that_do_not_answer_are_waited_for(scene):
    """Their agents may still run what the attempt before has started."""
    scene.engine.silent = "node gpu2 does not answer"
    fails(scene.made)
    scene.bring()
    assert scene.time.now == pytest.approx(fence_seconds(scene.made.job.plan), abs=1)
    assert "attempt 2 waits until nodes that don't answer have ended attempt 1" in scene.said
    assert len(scene.engine.started) == 1


def test_nodes_that_have_said_how_they_ended_are_not_waited_for(scene):
    scene.engine.silent = "node gpu2 does not answer"
    for node in range(3):
        scene.made.write(scene.made.paths.exit(node), {"node": node, "failure": None, "stopped": "peer", "left": []})
    fails(scene.made)
    scene.bring()
    assert scene.time.now == 0.0


@pytest.mark.parametrize("at", [1, 2])
def test_a_cancel_ends_the_waiting(scene, at):
    scene.engine.trouble = ClusterError("node gpu2 is away")
    fails(scene.made)

    def cancel(now):
        if now >= 3 and not scene.made.job.at(at).requests():
            scene.made.job.at(at)._request(protocol.CANCEL, "me", "")

    scene.hook = cancel
    scene.bring()
    state = scene.made.job.state()
    assert (state.run_status, state.error_code, scene.engine.started) == ("KILLED", "JobTerminated", [])
    assert scene.time.now < 10


def test_who_cancels_while_it_begins_has_his_way(scene, monkeypatch):
    fails(scene.made)
    begin = Job.begin

    def begun(job, attempt, record):
        found = begin(job, attempt, record)
        job._request(protocol.CANCEL, "me", "")
        return found

    monkeypatch.setattr(Job, "begin", begun)
    scene.bring()
    assert scene.made.job.state().run_status == "KILLED" and scene.engine.started == []


def test_who_has_lost_the_lease_begins_nothing(scene):
    scene.lost = True
    fails(scene.made)
    with pytest.raises(LeaseLostError):
        scene.bring()
    assert not scene.made.job.is_begun()


def test_told_to_leave(scene):
    def leave(now):
        raise Leaving

    scene.hook, scene.engine.trouble = leave, ClusterError("away")
    fails(scene.made)
    with pytest.raises(Leaving):
        scene.bring()
    assert not scene.made.job.is_begun()


# Where whoever begins an attempt dies: (what of the share or the engine, whether that was still done).
DEATHS = [
    ("claim begun", True),
    ("write attempt.json", False),
    ("write attempt.json", True),
    ("submit", False),
    ("submit", True),
    ("write submitted.json", False),
    ("write submitted.json", True),
]


@pytest.mark.parametrize(("step", "made_it"), DEATHS)
def test_whoever_dies_it_is_begun_once(scene, monkeypatch, step, made_it):
    """What was begun and not started has a verdict, and one attempt runs, with as many retries left."""
    fails(scene.made)
    verb, _, name = step.partition(" ")
    if verb == "submit":
        setattr(scene.engine, "after" if made_it else "before", Crash())
    with monkeypatch.context() as patch:
        if verb != "submit":
            real = getattr(DirectoryShare, verb)

            def dies(share, path, *arguments):
                if not path.endswith(name):
                    return real(share, path, *arguments)
                if made_it:
                    real(share, path, *arguments)
                raise Crash

            patch.setattr(DirectoryShare, verb, dies)
        # A process that is killed undoes nothing.
        patch.setattr("mlflow_batchai.follower.starting._end_agents", lambda cluster, handle: None)
        with pytest.raises(Crash):
            scene.bring()
    scene.engine.before = scene.engine.after = None
    again = scene.follower()
    attempt = 2
    scene.bring(again, attempt)
    while (following := scene.made.job.at(attempt).state().next_attempt) is not None:
        assert own(scene.made, attempt).get("retriesLeft", 1) == 1
        attempt = following
        scene.bring(again, attempt)
    submitted = [number for number in range(1, attempt + 1) if scene.made.job.at(number).handle()]
    assert attempt == (2 if step == "write submitted.json" and made_it else 3)
    assert submitted == [1, attempt] and scene.made.job.attempt == attempt
    assert own(scene.made, attempt)["retriesLeft"] == 1
    if attempt == 3:
        assert "its starter died before attempt 2 was started" in scene.made.job.at(2).state().reason


def test_nodes_that_will_not_start_it(scene):
    """That costs no retry; the pauses grow."""
    fails(scene.made)
    scene.engine.error = ClusterError("node gpu2 went away")
    follower = scene.follower()
    follower.bring(scene.made.job.at(1), scene.engine)
    for attempt in (2, 3, 4):
        scene.bring(follower, attempt)
        state = scene.made.job.at(attempt).state()
        assert (state.next_attempt, state.retries_left) == (attempt + 1, 1)
    assert state.reason == "attempt 4 could not be started: node gpu2 went away"
    assert scene.time.now == 0 + 5 + 10


def test_attempts_that_train_a_while_are_followed_at_once(scene):
    follower = scene.follower()
    follower.bring(scene.made.job.at(1), scene.engine)
    for attempt in (2, 3, 4):
        fails(scene.made, attempt=attempt - 1)
        scene.time.sleep(90)
        scene.bring(follower, attempt)
    assert scene.time.now == 3 * 90


def requeued(made):
    made.verdict("queued", next=2, reason="room is needed", exitCode=None)


def test_who_put_it_back_in_the_queue_begins_it(scene):
    requeued(scene.made)
    scene.hook = lambda now: now > 2 and scene.made.job.begin(2, overrides.record(2, overrides.REQUEUE, "room"))
    scene.bring()
    assert scene.engine.started == [] and scene.time.now < 5


def test_if_he_has_died_it_is_begun_for_him(scene):
    requeued(scene.made)
    scene.bring()
    assert scene.time.now > retries.REQUESTER_SECONDS
    record = own(scene.made, 2)
    assert (record["retriesLeft"], record["by"], len(scene.engine.started)) == (2, "retry", 1)


def test_a_share_that_is_away_is_the_callers(scene, monkeypatch):
    def away(share, path):
        raise ShareError("the share is away")

    fails(scene.made)
    with monkeypatch.context() as patch:
        patch.setattr(DirectoryShare, "claim", away)
        with pytest.raises(ShareError):
            scene.bring()
    scene.bring()
    assert len(scene.engine.started) == 1


def test_volumes_that_can_not_be_opened_for_now(scene, monkeypatch):
    real, answers = retries.for_next_attempt, [JobError("Azure does not answer")] * 2

    def collect(*arguments):
        if answers:
            raise answers.pop()
        return real(*arguments)

    monkeypatch.setattr(retries, "for_next_attempt", collect)
    fails(scene.made)
    scene.bring()
    assert scene.said[:1] == ["attempt 2 waits: Azure does not answer"] and len(scene.engine.started) == 1
    answers += [JobError("Azure does not answer")] * 99
    fails(scene.made, attempt=2)
    with pytest.raises(NotHereError, match=r"waiting for attach \(Azure does not answer\)"):
        scene.bring(attempt=3)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_job_that_waits_for_attach(following, monkeypatch, ahead):
    """Its run says what is missing, the lease is free, and whoever ends the job needs nothing; also if the supervisor knows that before
    the relay of the attempt before has ended."""
    over = supervisor.Supervisor.over

    def late(kept, attempt, seconds):
        state = over(kept, attempt, seconds)
        if ahead and state and state.next_attempt:
            kept._thread.join(60)
        return state

    monkeypatch.setattr(supervisor.Supervisor, "over", late)

    def unknown(name):
        raise ClusterNotFoundError(f"there is no cluster '{name}'")

    monkeypatch.setattr(retries.clusters, "load", unknown)
    made, client, follow = following
    made.write(made.paths.plan, {**made.plan, "retries": 1})
    fails(made)
    assert follow() is None
    why = "waiting for attach where the job's cluster can be used (there is no cluster 'local')"
    run = client.get_run(made.plan["runId"])
    assert (run.info.status, run.data.tags["batchai.reason"], run.data.tags["batchai.attempt"]) == ("SCHEDULED", why, "2")
    assert run.data.tags["batchai.notes"].endswith("\nattempt 1 ended: rank 1 was killed")
    found = Lease(made.job).view()
    assert (found.state, found.trouble) == (LeaseState.FREE, f"job toy-0123: {why}")
    made.job.request_cancel("me", "")
    assert follow().terminated
    run = client.get_run(made.plan["runId"])
    assert (run.info.status, run.data.tags["batchai.reason"]) == ("KILLED", "terminated by me")


@pytest.mark.parametrize("secrets", [{}, {"variables": {"TOKEN": "hush"}}])
def test_who_watches_a_job_that_waits_for_attach(scene, monkeypatch, secrets):
    """They are told so, unless they have the secrets themselves."""
    told = []
    monkeypatch.setattr(service_client, "follow", lambda order, environment: told.append(order["told"]) or Told(1, True))
    lease = Lease(scene.made.job)
    lease.acquire()
    lease.release("job toy-0123: waiting for attach (needs BATCHAI_SECRET_TOKEN)")
    submitted = Submitted(scene.made.job, "r", Tracking("sqlite:///m.db", {}), secrets=secrets)
    if secrets:
        detached.keep_follower(submitted)
        assert told == [{"variables": {"TOKEN": "hush"}, "environment": {}}]
        assert "hush" not in repr(submitted)
        return
    with pytest.raises(JobError, match=r"job toy-0123: waiting for attach \(needs BATCHAI_SECRET_TOKEN\)"):
        detached.keep_follower(submitted)
    assert told == []
