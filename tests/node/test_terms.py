"""What an attempt has of its own, and whether a job goes on after it."""

from __future__ import annotations

import pytest

from mlflow_batchai.node import protocol, terms

PLAN = {
    "framework": "horovod",
    "terminateSeconds": 5.0,
    "nodeCount": 4,
    "processCount": 8,
    "ranks": 8,
    "retries": 2,
    "command": "train",
}


def failed(code: str = protocol.JOB_FAILED, **changes: object) -> protocol.Record:
    verdict = protocol.verdict_record(protocol.FAILED, "agent-0", 3, [protocol.error_record(code)], "it broke")
    return {**verdict, **changes}


@pytest.mark.parametrize(
    ("verdict", "plan", "attempt", "left"),
    [
        (failed(), {"retriesLeft": 2}, 1, 1),
        (failed(protocol.NODE_LOST), {"retriesLeft": 1}, 7, 0),
        (failed(protocol.NODE_SETUP_FAILED), {"retriesLeft": 1}, 1, 0),
        (failed(), {"retriesLeft": 0}, 3, None),
        (failed(), {}, 1, None),
        (failed(terminated=True), {"retriesLeft": 2}, 1, None),
        (failed(protocol.JOB_TIMEOUT), {"retriesLeft": 2}, 1, None),
        (protocol.verdict_record(protocol.SUCCEEDED, "agent-0", 0), {"retriesLeft": 2}, 1, None),
        # A node that was taken away costs no retry, where that is to be expected.
        (failed(protocol.NODE_LOST), {"retriesLeft": 2, "lowPriority": True}, 1, 2),
        (failed(protocol.NODE_LOST), {"lowPriority": True}, terms.MOST_ATTEMPTS - 1, 0),
        (failed(protocol.NODE_LOST), {"lowPriority": True}, terms.MOST_ATTEMPTS, None),
        (failed(), {"retriesLeft": 2, "lowPriority": True}, 1, 1),
        (failed(), {"lowPriority": True}, 1, None),
    ],
)
def test_whether_a_job_goes_on(verdict: protocol.Record, plan: protocol.Record, attempt: int, left: int | None) -> None:
    found = terms.goes_on(verdict, plan, attempt)
    if left is None:
        assert found == verdict
        return
    kept = {key: verdict[key] for key in ("exitCode", "errors", "reason", "endTime", "by")}
    assert kept.items() <= found.items()
    assert (found["executionState"], found["retry"], found["retriesLeft"], found["next"]) == ("queued", True, left, attempt + 1)


def test_a_requeue_stays_one() -> None:
    verdict = protocol.requeued_record("room", "agent-0", 1)
    assert terms.goes_on(verdict, {"retriesLeft": 2}, 1) == verdict


def test_the_plan_of_an_attempt() -> None:
    assert terms.plan_of(PLAN, None) == {**PLAN, "retriesLeft": 2}
    own = terms.record(1, terms.RETRY, "it broke", terms.on_nodes(PLAN, 3))
    assert terms.is_record(own)
    assert terms.plan_of(PLAN, own) == {**PLAN, "nodeCount": 3, "processCount": 6, "ranks": 6, "retriesLeft": 1}
    # A job that an earlier version has submitted says nothing of what its ranks have to save a checkpoint.
    assert terms.plan_of({"nodeCount": 1}, None) == {"nodeCount": 1, "terminateSeconds": 10.0, "retriesLeft": 0}
    # What it has all nodes for says nothing of them.
    assert terms.plan_of(PLAN, terms.record(0, terms.MANUAL, "")) == {**PLAN, "retriesLeft": 0}


@pytest.mark.parametrize(
    "own", [None, [], {}, {"retriesLeft": -1}, {"retriesLeft": "1"}, {"retriesLeft": 1, "nodeCount": 0}, {"nodeCount": 1}]
)
def test_what_is_no_record_of_an_attempt(own: object) -> None:
    assert not terms.is_record(own)


@pytest.mark.parametrize(
    ("framework", "processes", "nodes", "left", "expected"),
    [
        ("horovod", 8, 4, 2, 4),
        ("horovod", 4, 4, 3, 3),
        ("horovod", 5, 4, 2, 2),  # never more ranks a node than before
        ("horovod", 4, 4, 1, 1),
        ("custom", 1, 4, 2, 1),
    ],
)
def test_ranks_on_fewer_nodes(framework: str, processes: int, nodes: int, left: int, expected: int) -> None:
    plan = {"framework": framework, "processCount": processes, "nodeCount": nodes}
    assert terms.on_nodes(plan, left) == {"nodeCount": left, "processCount": expected, "ranks": expected}


def test_whose_secrets_are_kept() -> None:
    assert terms.may_go_on({"retries": 1}) and terms.may_go_on({"lowPriority": True})
    assert not terms.may_go_on({"retries": 0, "lowPriority": False}) and not terms.may_go_on({})
