"""The follower around a relay: a store or share that is away, a run that is deleted, a job that was lost; when it ends."""

from __future__ import annotations

import re
import threading
import time

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import (
    PERMISSION_DENIED,
)
from relay_world import EXPECTED, Gone, StoreClient, down, fill, history, up
from waiting import wait_for

from mlflow_batchai.errors import ClusterError, ShareError
from mlflow_batchai.follower import detached, follower, supervisor
from mlflow_batchai.job import lease as lease_module
from mlflow_batchai.job.lease import Lease, LeaseState
from mlflow_batchai.tracking import runs
from mlflow_batchai.tracking.relay import Relay
from mlflow_batchai.tracking.retrying import GivenUpError


def test_it_waits_for_a_store_that_is_down(following):
    made, client, follow = following
    fill(made)
    made.verdict()
    client.before["log_batch"] = [ConnectionError("down")] * 5
    client.before["get_run"] = [ConnectionError("down")] * 5
    assert follow().execution_state == "succeeded"
    assert history(client, made.plan["runId"]) == EXPECTED


def test_a_run_that_is_restored_while_its_job_runs_is_relayed_on(following, monkeypatch):
    """Of a deleted one the store is asked from time to time only."""
    made, client, follow = following
    run_id, looks = made.plan["runId"], []
    monkeypatch.setattr(follower, "GONE_LOOK_SECONDS", 1.0)
    monkeypatch.setattr(supervisor.Watch, "check_or_complain", lambda watch: None)

    def run_gone(relay, run_gone=Relay.run_gone):
        looks.append(run_gone(relay))
        if looks == [True, True]:
            client.restore_run(run_id)
        return looks[-1]

    def describe(relay, state):
        made.verdict()

    monkeypatch.setattr(Relay, "run_gone", run_gone)
    monkeypatch.setattr(Relay, "describe", describe)
    fill(made)
    made.announce(0)
    client.delete_run(run_id)
    assert follow().execution_state == "succeeded"
    assert looks == [True, True, False]
    assert history(client, run_id) == EXPECTED


def test_a_follower_whose_way_to_the_share_is_gone_leaves_when_another_has_ended_the_run(following, monkeypatch):
    """Its SAS has expired, say; without this it would try for ever, and hold connections to the nodes."""
    made, client, follow = following
    made.announce(0)

    def refused(*arguments):
        raise ShareError("the SAS has expired")

    lost = []

    def state(job, ending=True):
        lost.append(job)
        if len(lost) == 20:
            client.set_terminated(made.plan["runId"], "KILLED")
        return refused()

    monkeypatch.setattr(follower.Job, "state", state)
    monkeypatch.setattr(supervisor.Watch, "check_or_complain", lambda watch: None)
    assert follow() is None
    assert 20 <= len(lost) <= 21


def test_the_deadline(following, monkeypatch):
    """The lease is let go with the reason, and the next follower has it at once."""
    made, client, follow = following
    monkeypatch.setattr(follower.time, "sleep", _nap)
    made.write(made.paths.plan, {**made.plan, "relaySeconds": 0.2})
    fill(made)
    made.announce(0)
    made.verdict()
    down(client)
    with pytest.raises(GivenUpError) as given_up:
        follow()
    said = (
        r"the tracking server could not be used for \d+ s \(at last: ConnectionError: down\); job toy-0123 ended succeeded; its"
        rf" results are at {re.escape(made.share.url)}/{made.paths.folder} and go .* with: batchai job attach toy-0123"
    )
    assert re.fullmatch(said, str(given_up.value))
    view = Lease(made.job).view()
    assert (view.state, view.trouble) == (LeaseState.FREE, str(given_up.value))
    up(client)
    assert follow().execution_state == "succeeded"
    run = client.get_run(made.plan["runId"])
    assert (run.info.status, run.info.end_time) == ("FINISHED", 1_700_000_000_000)
    assert history(client, made.plan["runId"]) == EXPECTED


def test_a_database_that_cannot_be_opened_is_waited_for_while_the_nodes_are_watched(following, monkeypatch):
    made, client, follow = following
    made.announce(0)
    tries = []

    def opened(tracking):
        tries.append(1)
        if len(tries) < 3:
            raise MlflowException("could not connect to the database")
        return client

    monkeypatch.setattr(runs, "client", opened)
    assert follow().error_code == "NodeLost"
    assert client.get_run(made.plan["runId"]).info.status == "FAILED" and len(tries) == 3


def test_another_one_takes_over_from_a_follower_that_the_store_refuses(following, monkeypatch):
    """Its token has expired. Whoever attaches with a new one goes on at once; the old one leaves, and writes nothing more."""
    made, client, follow = following
    monkeypatch.setattr(follower, "TELL_SECONDS", 0.1)
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(lease_module, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(follower.time, "sleep", _nap)
    fill(made)
    made.announce(0)
    made.verdict()
    old, mine = StoreClient(client._real), threading.local()
    down(old, lambda: MlflowException("401", error_code=PERMISSION_DENIED))
    monkeypatch.setattr(runs, "client", lambda tracking: getattr(mine, "client", client))
    ended = []

    def refused():
        mine.client = old
        ended.append(follow())

    first = threading.Thread(target=refused)
    first.start()
    view = wait_for(lambda: (seen := Lease(made.job).view()).trouble and seen)
    assert view.state is LeaseState.HELD and "401" in view.trouble and view.who.startswith("process ")
    # One that the store refuses, too, leaves it alone.
    mine.client = old
    assert follow() is None and not ended
    mine.client = client
    assert follow().execution_state == "succeeded"
    first.join(20)
    assert ended == [None] and Lease(made.job).view().number == 2
    assert client.get_run(made.plan["runId"]).info.status == "FINISHED"
    assert history(client, made.plan["runId"]) == EXPECTED


def test_a_share_that_is_away_has_the_same_deadline(following, monkeypatch):
    made, _, follow = following
    made.write(made.paths.plan, {**made.plan, "relaySeconds": 0.2})
    monkeypatch.setattr(follower.time, "sleep", _nap)
    made.announce(0)

    def away(*arguments, **named):
        raise ShareError("there is no host x")

    monkeypatch.setattr(follower.Job, "state", away)
    with pytest.raises(
        GivenUpError, match=r"its share could not be used for .* no host x\); job toy-0123 goes on, as far as is known"
    ):
        follow()
    monkeypatch.setattr(Lease, "acquire", away)
    with pytest.raises(GivenUpError, match="its share could not be used for"):
        follow()


def test_nodes_that_cant_be_freed_are_told_of_once(following, monkeypatch, capsys):
    made, _, follow = following
    fill(made)
    made.verdict()
    monkeypatch.setattr(Gone, "node_limit", 1, raising=False)
    fails = iter(["away"] * 3 + ["slow"] * 2)
    monkeypatch.setattr(supervisor, "FREE_AGAIN_SECONDS", (0.0,) * 6)

    def clean_up(watch):
        if said := next(fails, None):
            raise ClusterError(said)

    monkeypatch.setattr(supervisor.Watch, "clean_up", clean_up)
    assert follow().execution_state == "succeeded"
    told = "".join(re.findall(r"away|slow|the nodes of job toy-0123 are free now", capsys.readouterr().err))
    assert told == "awayslowthe nodes of job toy-0123 are free now"


def test_what_nobody_expects_lets_go_of_the_job(following, monkeypatch):
    """Its process may live on, for other jobs; the next follower has it at once."""
    made, _, follow = following
    made.announce(0)

    def breaks(kept, attempt, seconds):
        raise AssertionError("a mistake of ours")

    with monkeypatch.context() as patch:
        patch.setattr(supervisor.Supervisor, "over", breaks)
        with pytest.raises(AssertionError, match="a mistake of ours"):
            follow()
    view = Lease(made.job).view()
    assert (view.state, view.trouble) == (LeaseState.FREE, "")
    assert follow().error_code == "NodeLost"


def test_a_run_that_a_person_has_ended_gets_its_true_end(following):
    made, client, follow = following
    made.announce(0)
    fill(made)
    client.set_terminated(made.plan["runId"], "KILLED")
    made.verdict()
    assert follow().execution_state == "succeeded"
    run = client.get_run(made.plan["runId"])
    assert (run.info.status, run.info.end_time) == ("FINISHED", 1_700_000_000_000)
    assert history(client, made.plan["runId"]) == EXPECTED


def test_who_watches_a_follower_in_trouble_tries_once(folder, monkeypatch):
    made = folder()
    holder = Lease(made.job)
    holder.acquire()
    started = []
    monkeypatch.setattr(detached, "start_follower", lambda job: (started.append(1), setattr(job, "starts", 1)))
    watcher = detached.Submitted(made.job, "r", runs.absolute("sqlite:///m.db", made.share.root))
    detached.keep_follower(watcher)
    assert not started
    holder.trouble = "401"
    holder.save({})
    watcher = detached.Submitted(made.job, "r", watcher.tracking)
    for _ in range(2):
        detached.keep_follower(watcher)
    assert started == [1]


_sleep = time.sleep


def _nap(seconds):
    _sleep(min(seconds, 0.05))
