"""The pure fold from what lies in a job folder to the job's state, and the job folder as clients read it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_batchai.agent import protocol
from mlflow_batchai.errors import JobNotFoundError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.states import JobState, Snapshot, failed_verdict, fold

ANNOUNCE = {"host": "h"}
GOOD = {"failure": None, "stopped": None}
BAD = {"failure": {"code": "JobFailed"}, "stopped": None}
STOPPED = {"failure": None, "stopped": "node 0 said so"}
REQUEST = {"kind": "cancel", "who": "me", "why": ""}
REQUEUE = {"kind": "requeue", "who": "me", "why": ""}


def verdict(state: str = "succeeded", **fields):
    base = {"executionState": state, "exitCode": 0, "errors": [], "reason": "", "terminated": False, "endTime": 12}
    return {**base, **fields}


BOTH = {0: ANNOUNCE, 1: ANNOUNCE}
CASES = [
    ({}, "queued", "SCHEDULED"),
    ({"announces": {0: ANNOUNCE}}, "queued", "SCHEDULED"),
    ({"announces": BOTH}, "running", "RUNNING"),
    ({"requests": [REQUEST]}, "terminating", "RUNNING"),
    ({"announces": BOTH, "requests": [REQUEST]}, "terminating", "RUNNING"),
    ({"announces": BOTH, "exits": {1: GOOD}}, "running", "RUNNING"),
    ({"exits": {1: GOOD}, "requests": [REQUEST]}, "running", "RUNNING"),
    ({"exits": {1: BAD}}, "terminating", "RUNNING"),
    ({"exits": {0: GOOD, 1: STOPPED}}, "terminating", "RUNNING"),
    ({"exits": {0: GOOD, 1: GOOD}}, "running", "RUNNING"),
    # Who makes room goes on running until it waits again.
    ({"requests": [REQUEUE]}, "queued", "SCHEDULED"),
    ({"announces": BOTH, "requests": [REQUEUE]}, "running", "RUNNING"),
    ({"exits": {1: STOPPED}, "requests": [REQUEUE]}, "running", "RUNNING"),
    ({"exits": {1: STOPPED}, "requests": [REQUEUE, REQUEST]}, "terminating", "RUNNING"),
    ({"requests": [REQUEUE, REQUEST]}, "terminating", "RUNNING"),
    ({"verdict": verdict()}, "succeeded", "FINISHED"),
    ({"verdict": verdict("failed", exitCode=3)}, "failed", "FAILED"),
    ({"verdict": verdict("failed", exitCode=None, terminated=True)}, "failed", "KILLED"),
    ({"exits": {0: BAD, 1: BAD}, "requests": [REQUEST], "verdict": verdict()}, "succeeded", "FINISHED"),
]


@pytest.mark.parametrize(("seen", "state", "status"), CASES)
def test_table(seen, state, status):
    found = fold(Snapshot(2, **seen))
    assert found.next_attempt is None
    assert (found.execution_state, found.run_status) == (state, status)
    assert found.ended == (seen.get("verdict") is not None)


snapshots = st.builds(
    Snapshot,
    st.just(3),
    st.dictionaries(st.integers(0, 2), st.just(ANNOUNCE)),
    st.dictionaries(st.integers(0, 2), st.sampled_from([GOOD, BAD, STOPPED])),
    st.lists(st.sampled_from([REQUEST, REQUEUE]), max_size=2),
    st.none() | st.sampled_from([verdict(), verdict("failed", exitCode=1), verdict("failed", terminated=True)]),
)


@given(snapshots)
def test_a_verdict_comes_before_exits_and_these_before_requests_and_announcements(snapshot: Snapshot):
    assert fold(snapshot).ended == (snapshot.verdict is not None)
    if snapshot.verdict:
        assert fold(snapshot) == fold(Snapshot(3, verdict=snapshot.verdict))
    elif snapshot.exits:
        assert fold(snapshot) == fold(Snapshot(3, exits=snapshot.exits, requests=snapshot.requests))
    elif REQUEST in snapshot.requests:
        assert fold(snapshot).execution_state == protocol.TERMINATING
    else:
        assert fold(snapshot) == fold(Snapshot(3, snapshot.announces))


def test_state_of_a_client_verdict():
    state = fold(Snapshot(1, verdict=failed_verdict(protocol.NODE_LOST, "node-0 was lost", "follower")))
    assert (state.error_code, state.reason, state.exit_code) == ("NodeLost", "node-0 was lost", None)
    assert JobState("running").error_code == ""


def test_a_folder_without_a_plan_is_no_job(folder):
    made = folder()
    with pytest.raises(JobNotFoundError, match="nowhere"):
        Job(made.share, "nowhere")
    made.share.write(made.paths.plan, b'{"half":')
    with pytest.raises(JobNotFoundError):
        _ = made.job


def test_a_job_grows_and_keeps_what_it_knew(folder):
    made = folder(nodes=2)
    job = made.job
    assert job.state().execution_state == "queued"
    made.announce(0)
    made.share.write(made.paths.announce(1), b'{"node":1}\n{"end":1')  # not closed yet: it isn't there
    assert job.state().execution_state == "queued"
    made.announce(1)
    assert job.state().execution_state == "running"
    job.request_cancel("me", "why not")
    assert [request["who"] for request in job.requests()] == ["me"]
    assert job.state().execution_state == "terminating"
    made.exit(1)
    made.exit(0)
    made.verdict()
    assert job.state().execution_state == "succeeded"
    # One that opens it after the end sees its nodes too.
    assert set(made.job.snapshot().announces) == {0, 1}


def test_exits_are_looked_for_where_there_may_be_one(folder):
    made = folder(nodes=3)
    for node in range(3):
        made.announce(node)
        made.exit(node, stopped="why")
    job = made.job
    assert job.state(ending=False).execution_state == "running"
    assert set(job.snapshot([1]).exits) == {1}
    assert job.state(ending=False).execution_state == "terminating"  # what is known stays known
    assert set(job.snapshot().exits) == {0, 1, 2}


ONE, LATE = failed_verdict("NodeLost", "one", "a"), failed_verdict("NodeLost", "late", "b")


def test_the_first_verdict_stands(folder):
    made = folder()
    assert made.job.claim_verdict(ONE)
    assert not made.job.claim_verdict(LATE)
    made.job.finish_claim(LATE)
    assert made.job.state().reason == "one"


@pytest.mark.parametrize("goes_on", [False, True], ids=["died", "frozen"])
def test_a_claim_whose_claimer_seems_dead_is_finished_by_another(folder, monkeypatch, goes_on):
    """If it was only frozen, it keeps the verdict that is there."""
    made = folder()
    job = made.job
    claim = job.share.claim

    def slow_claim(path):
        won = claim(path)
        assert not made.job.state().ended
        made.job.finish_claim(ONE)
        return won

    monkeypatch.setattr(job.share, "claim", slow_claim)
    if goes_on:
        assert not job.claim_verdict(LATE)
    else:
        job.share.claim(made.paths.verdict)
    assert made.job.state().reason == "one"


@pytest.mark.parametrize(
    ("times", "end", "start"),
    [
        ([1000, 2000], 30_000, 2000),
        ([1000, 601_000], 30_000, 1000),  # the second node's clock is ten minutes fast
        ([601_000, 602_000], 30_000, 30_000),  # both: the verdict is a client's
        ([1000, 601_000], 700_000, 601_000),
        ([1000, 601_000], None, 601_000),
    ],
)
def test_a_job_never_starts_after_its_end(times, end, start):
    announces = {node: {**ANNOUNCE, "time": time} for node, time in enumerate(times)}
    assert fold(Snapshot(2, announces, verdict=verdict(endTime=end))).start_time == start
