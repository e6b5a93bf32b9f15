"""What an attempt changes in the job's plan, and whether the job goes on after it: pure functions.

The plan is the same for all attempts. What differs stands in ``attempt.json`` of each attempt after the first, written once by
who begins it: how many nodes and ranks it has, how many retries are left, who began it and why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mlflow_batchai.agent import protocol, records
from mlflow_batchai.agent.plan import Plan
from mlflow_batchai.agent.protocol import Record

# Who begins an attempt: the follower after a failure, who wanted room, a person.
RETRY = "retry"
REQUEUE = "requeue"
MANUAL = "manual"

# An attempt that lost a node which could be taken away at any time costs no retry, up to so many attempts.
MOST_ATTEMPTS = 100
# Ends that would be no other the next time, or that somebody wanted.
_FINAL = frozenset((protocol.JOB_TIMEOUT, protocol.JOB_TERMINATE, protocol.JOB_TERMINATED))
COUNTS = {"nodeCount": "node_count", "processCount": "process_count", "ranks": "ranks"}


def record(left: int, by: str, why: str, counts: Mapping[str, int] | None = None) -> Record:
    """The content of ``attempt.json``.

    Args:
        left: how often the job starts again by itself if this attempt fails.
        by: ``RETRY``, ``REQUEUE`` or ``MANUAL``.
        counts: what ``on_nodes`` gave, for an attempt that doesn't have all nodes.
    """
    return dict(counts or {}, retriesLeft=left, by=by, why=why, time=protocol.now_ms())


def is_record(value: object) -> bool:
    if not isinstance(value, dict) or not records.has(value, {"retriesLeft": records.is_count}):
        return False
    return all(records.is_node_count(value[key]) for key in COUNTS if key in value)


def plan_of(plan: Plan, attempt: int, own: Mapping[str, Any] | None) -> Plan:
    """The plan as it holds for one attempt; ``own``: its ``attempt.json``; None: it has none, as the first."""
    own = own or {}
    counts = {name: own[key] for key, name in COUNTS.items() if key in own}
    return dataclasses.replace(plan, attempt=attempt, retries_left=own.get("retriesLeft", plan.retries), **counts)


def on_nodes(plan: Plan, nodes: int) -> Mapping[str, int]:
    """Nodes, processes and ranks of an attempt on so many of the job's nodes: as many ranks a node as the plan has."""
    processes = max(nodes, plan.process_count * nodes // plan.node_count) if plan.is_distributed else 1
    return {"nodeCount": nodes, "processCount": processes, "ranks": processes}


def counts_on(plan: Plan, nodes: int) -> Mapping[str, int] | None:
    """The overrides (``record``) of an attempt on so many nodes; None: it has all of them."""
    return None if nodes == plan.node_count else on_nodes(plan, nodes)


def goes_on(verdict: Record, plan: Plan, attempt: int) -> Record:
    """Turn the verdict of a failed attempt into a requeue if the job starts again by itself; else return it as it is.

    That is in the queue again, as after a requeue, with what failed kept: ``retry`` is true, ``retriesLeft`` what the next
    attempt has.
    """
    codes = {error["code"] for error in verdict["errors"]}
    if verdict["executionState"] != protocol.FAILED or verdict["terminated"] or codes & _FINAL:
        return verdict
    left = plan.retries_left
    # Batch AI put a job whose low-priority node was taken away back into the queue.
    preempted = plan.low_priority and protocol.NODE_LOST in codes and attempt < MOST_ATTEMPTS
    if not preempted and left <= 0:
        return verdict
    return again(verdict, attempt, left - (not preempted))


def again(verdict: Record, attempt: int, left: int) -> Record:
    """A failed verdict as one after which the job starts again by itself, with so many retries left."""
    return dict(verdict, executionState=protocol.QUEUED, retry=True, retriesLeft=left, next=attempt + 1)
