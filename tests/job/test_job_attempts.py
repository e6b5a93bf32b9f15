"""A job's attempts as clients read and write them: which is the current one, who begins the next, and the run that shows all."""

from __future__ import annotations

import pytest
from job_folder import report
from relay_world import EXPECTED, Crash, fill, history

from mlflow_batchai.agent import protocol
from mlflow_batchai.engines.base import Poll, PollState
from mlflow_batchai.follower.watch import CANCEL_PATIENCE_SECONDS, Watch
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease, LeaseState
from mlflow_batchai.tracking.retrying import GivenUpError


def requeued(made, why="room is needed"):
    """What node 0 writes last of an attempt that made room."""
    made.verdict("queued", next=made.paths.attempt + 1, reason=why, exitCode=None)


def test_the_current_attempt(folder):
    made = folder()
    first = made.job
    assert (first.attempt, first.newest()) == (1, 1)
    requeued(made)
    # Nobody has begun it yet, and all the same it is the one that a person means.
    assert (made.job.attempt, made.job.state().execution_state, made.job.handle()) == (2, "queued", None)
    assert (first.attempt, first.newest()) == (1, 2)
    for number in range(2, 11):
        made.begin(number)
        made.verdict("failed")
    assert (made.job.attempt, made.job.state().ended) == (10, True)
    assert made.job.at(2).state().execution_state == "failed"
    assert Job(made.share, made.paths.folder, 1).state().next_attempt == 2


def test_one_begins_the_next_attempt_and_none_one_that_was_given_up(folder):
    """Who was to begin that slept, and the follower said so."""
    made = folder()
    requeued(made)
    assert made.job.begin(2, {}).attempt == 2 and made.job.begin(2, {}) is None
    made.begin(2)
    requeued(made)
    assert made.job.claim_verdict(protocol.verdict_record("failed", "follower", reason="nobody came"))
    assert made.job.begin(3, {}) is None


@pytest.mark.parametrize("board", [False, True])
def test_requests_are_for_one_attempt(folder, board):
    made = folder(board=board)
    made.job.request_cancel("me", "it is wrong")
    assert made.job.state().execution_state == "terminating"
    made.add_marker("verdict")
    made.verdict("failed", terminated=True)
    made.begin(2)
    assert (made.job.requests(), made.job.state().execution_state) == ([], "queued")
    made.job.request_requeue("me", "room")
    assert [request["kind"] for request in made.job.requests()] == ["requeue"]
    assert [request["kind"] for request in made.job.at(1).requests()] == ["cancel"]


def test_who_cancels_an_attempt_that_is_over_cancels_the_next(folder):
    """A client that has not seen yet that the job was put back in the queue."""
    made = folder()
    stale = made.job
    requeued(made)
    stale.request_cancel("me", "")
    assert [request["attempt"] for request in made.job.requests()] == [2]


class Nodes:
    """An engine whose agents stay, whatever is asked of them."""

    poll_seconds = 1.0
    cancelled = 0

    def poll(self, handle):
        return Poll(PollState.ALIVE)

    def cancel(self, handle):
        self.cancelled += 1


@pytest.mark.parametrize(("kinds", "state"), [(["requeue"], "queued"), (["requeue", "cancel"], "failed")])
def test_agents_that_make_no_room_are_ended(folder, kinds, state):
    made = folder()
    made.handle()
    made.announce(0)
    job, nodes, now = made.job, Nodes(), [0.0]
    for kind in kinds:
        job._request(kind, "me", "room is needed")
    watch = Watch(job, nodes, clock=lambda: now[0])
    for now[0] in (1.0, CANCEL_PATIENCE_SECONDS, CANCEL_PATIENCE_SECONDS + 2):
        assert job.state().next_attempt is None and not job.state().ended
        watch.check()
    assert (nodes.cancelled, job.state().execution_state) == (1, state)
    assert job.state().next_attempt == (2 if state == "queued" else None)


# The lease: one for all attempts.


def lease(made):
    time = [0.0]
    return Lease(made.job, lambda: time[0], lambda s: time.__setitem__(0, time[0] + s))


def test_a_lease_that_is_finished_for_one_attempt_is_free_for_the_next(folder):
    made = folder()
    made.verdict("failed")
    first = lease(made)
    assert first.acquire()
    first.save({"attempt": 1, "dropped": 3}, finished=True)
    assert first.finished() and not lease(made).acquire()
    made.begin(2)
    second = lease(made)
    assert not second.finished() and first.finished()
    assert second.acquire()
    assert (second.number, second.attempt, second.memory) == (2, 2, {"attempt": 1, "dropped": 3})
    # To those who wait for the first attempt it is over, to those who wait for the second it isn't.
    assert first.finished() and not second.finished()
    second.save({}, finished=True)
    assert second.finished() and not lease(made).acquire()


def test_an_heir_begins_with_the_attempt_that_was_not_done(folder):
    made = folder()
    holder = lease(made)
    holder.acquire()
    holder.save({"attempt": 1, "cursor": {"agent-0": 3}})
    requeued(made)
    made.begin(2)
    heir = lease(made)
    assert heir.acquire()
    assert (heir.attempt, heir.memory["cursor"]) == (1, {"agent-0": 3})


# The follower: from one attempt to the next, each metric once.


def again(made, **verdict):
    """The second attempt of a job, which trained the last of its steps again."""
    made.begin(2)
    made.segment(0, report(1, loss=9.9), report(2, loss=0.25))
    made.share.write(made.paths.stdouterr + "/stdout.txt", b"again\n")
    made.handle()
    made.verdict(**verdict)


def check_both(made, client):
    run = client.get_run(made.plan["runId"])
    assert history(client, made.plan["runId"]) == {**EXPECTED, "loss": [*EXPECTED["loss"], (2, 0.25, 5)]}
    assert (run.info.status, run.data.tags["batchai.attempt"]) == ("FINISHED", "2")
    assert "1 metric values came for a step that had one" in run.data.tags["batchai.notes"]
    assert [entry.path for entry in client.list_artifacts(made.plan["runId"], "logs/attempt-2")] == [
        "logs/attempt-2/stdout.txt"
    ]


@pytest.fixture
def two(following):
    """As ``following``, of a job that made room after its first steps, and went on."""
    made, client, follow = following
    fill(made)
    requeued(made)
    again(made)
    return made, client, follow


def test_a_run_that_was_deleted_is_no_end_of_the_job_between_its_attempts(two):
    """Its nodes are watched, and nobody takes it for relayed: restored, its run gets what each attempt has said."""
    made, client, follow = two
    run_id = made.plan["runId"]
    client.delete_run(run_id)
    with pytest.raises(GivenUpError, match=f"run {run_id} is deleted"):
        follow()
    left = Lease(made.job).view()
    assert left.state is LeaseState.FREE and "is deleted" in left.trouble
    client.restore_run(run_id)
    assert follow().execution_state == "succeeded"
    check_both(made, client)


@pytest.fixture
def orphaned(monkeypatch):
    """The holder of the lease was a process of this machine, and is gone: this one."""
    monkeypatch.setattr("mlflow_batchai.agent.processes.proc.identity", lambda: {"machine": "", "pid": 0, "started": 0})
    monkeypatch.setattr("mlflow_batchai.job.lease.GRACE_SECONDS", 0.0)
    monkeypatch.setattr("mlflow_batchai.job.lease.LOOK_SECONDS", 0.0)


# Where a follower dies: (method, which of its calls, whether that was still made).
CRASHES = [
    ("log_batch", 0, True),  # metrics of the first attempt
    ("log_batch", 1, False),  # those that were held back until its end
    ("log_batch", 2, False),  # the tags of the second attempt
    ("log_batch", 2, True),
    ("update_run", 0, True),
    ("log_batch", 3, True),  # its metrics
    ("set_terminated", 0, True),
]


@pytest.mark.usefixtures("orphaned")
@pytest.mark.parametrize(("method", "which", "made_it"), CRASHES)
def test_a_follower_that_dies_between_attempts_is_made_up_for(two, method, which, made_it):
    made, client, follow = two
    (client.after if made_it else client.before)[method] = [None] * which + [Crash()]
    with pytest.raises(Crash):
        follow()
    client.dead = False
    assert follow().execution_state == "succeeded"
    check_both(made, client)


@pytest.mark.usefixtures("orphaned")
def test_of_an_attempt_that_failed_the_run_is_told_once(following):
    """Though the follower dies when it has just noted that."""
    made, client, follow = following
    fill(made)
    made.verdict("queued", next=2, retry=True, retriesLeft=0, reason="it broke", exitCode=1)
    again(made)
    client.before["log_batch"] = [None, Crash()]  # what was held back until the end of the attempt
    with pytest.raises(Crash):
        follow()
    client.dead = False
    assert follow().execution_state == "succeeded"
    assert client.get_run(made.plan["runId"]).data.tags["batchai.notes"].count("attempt 1 ended: it broke") == 1
