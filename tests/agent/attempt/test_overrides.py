"""The overrides of an attempt, and whether a job goes on after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plans import bare_plan

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.attempt import overrides

PLAN = bare_plan(framework="horovod", terminate_seconds=5.0, node_count=4, process_count=8, ranks=8, retries=2)


def failed(code: str = protocol.JOB_FAILED, **changes: object) -> protocol.Record:
    verdict = protocol.verdict_record(protocol.FAILED, "agent-0", 3, [protocol.error_record(code)], "it broke")
    return {**verdict, **changes}


@pytest.mark.parametrize(
    ("verdict", "plan", "attempt", "left"),
    [
        (failed(), {"retries_left": 2}, 1, 1),
        (failed(protocol.NODE_LOST), {"retries_left": 1}, 7, 0),
        (failed(protocol.NODE_SETUP_FAILED), {"retries_left": 1}, 1, 0),
        (failed(), {"retries_left": 0}, 3, None),
        (failed(), {}, 1, None),
        (failed(terminated=True), {"retries_left": 2}, 1, None),
        (failed(protocol.JOB_TIMEOUT), {"retries_left": 2}, 1, None),
        (protocol.verdict_record(protocol.SUCCEEDED, "agent-0", 0), {"retries_left": 2}, 1, None),
        # A node that was taken away costs no retry, where that is to be expected.
        (failed(protocol.NODE_LOST), {"retries_left": 2, "low_priority": True}, 1, 2),
        (failed(protocol.NODE_LOST), {"low_priority": True}, overrides.MOST_ATTEMPTS - 1, 0),
        (failed(protocol.NODE_LOST), {"low_priority": True}, overrides.MOST_ATTEMPTS, None),
        (failed(), {"retries_left": 2, "low_priority": True}, 1, 1),
        (failed(), {"low_priority": True}, 1, None),
    ],
)
def test_whether_a_job_goes_on(verdict: protocol.Record, plan: dict[str, Any], attempt: int, left: int | None) -> None:
    found = overrides.goes_on(verdict, bare_plan(**plan), attempt)
    if left is None:
        assert found == verdict
        return
    kept = {key: verdict[key] for key in ("exitCode", "errors", "reason", "endTime", "by")}
    assert kept.items() <= found.items()
    assert (found["executionState"], found["retry"], found["retriesLeft"], found["next"]) == ("queued", True, left, attempt + 1)


def test_a_requeue_stays_one() -> None:
    verdict = protocol.requeued_record("room", "agent-0", 1)
    assert overrides.goes_on(verdict, bare_plan(retries_left=2), 1) == verdict


def test_the_plan_of_an_attempt() -> None:
    assert overrides.plan_of(PLAN, 1, None) == replace(PLAN, retries_left=2)
    own = overrides.record(1, overrides.RETRY, "it broke", overrides.on_nodes(PLAN, 3))
    assert overrides.is_record(own)
    assert overrides.plan_of(PLAN, 2, own) == replace(PLAN, attempt=2, node_count=3, process_count=6, ranks=6, retries_left=1)
    # What it has all nodes for says nothing of them.
    assert overrides.plan_of(PLAN, 3, overrides.record(0, overrides.MANUAL, "")) == replace(PLAN, attempt=3)


@pytest.mark.parametrize(
    "own", [None, [], {}, {"retriesLeft": -1}, {"retriesLeft": "1"}, {"retriesLeft": 1, "nodeCount": 0}, {"nodeCount": 1}]
)
def test_what_is_no_record_of_an_attempt(own: object) -> None:
    assert not overrides.is_record(own)


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
    plan = bare_plan(framework=framework, process_count=processes, node_count=nodes)
    assert overrides.on_nodes(plan, left) == {"nodeCount": left, "processCount": expected, "ranks": expected}


def test_whose_secrets_are_kept() -> None:
    assert bare_plan(retries=1).may_go_on and bare_plan(low_priority=True).may_go_on
    assert not bare_plan().may_go_on
