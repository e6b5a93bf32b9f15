"""Agents that are asked to make room: their attempt ends, and its verdict puts the job back in the queue."""

from __future__ import annotations

from node_world import Cluster
from test_agent import HOLD, assert_clean, release
from waiting import wait_for

from mlflow_batchai.agent import protocol

STAYS = "trap '' TERM; echo started; while true; do sleep 0.1; done"


def test_requeue_while_running(cluster: Cluster) -> None:
    """Its ranks have their time to save; that they end so is no failure."""
    saves = "trap 'echo saved > \"$AZ_BATCHAI_SHARED_JOB_TEMP/$BATCHAI_RANK\"; exit 5' TERM; echo started; while true; do sleep 0.05; done"
    job = cluster.submit(saves, nodes=2)
    wait_for(lambda: job.log("stdout.txt").count("started") == 2)
    job.ask(protocol.REQUEUE, "ann", "the cluster gets smaller")
    verdict = job.wait()
    assert (verdict["executionState"], verdict["next"], verdict["reason"]) == ("queued", 2, "the cluster gets smaller")
    assert (verdict["errors"], verdict["exitCode"], verdict["terminated"]) == ([], None, False)
    shared = job.share / job.plan.folder / "shared"
    assert [(shared / str(rank)).read_text() for rank in (0, 1)] == ["saved\n", "saved\n"]
    assert_clean(cluster, job)


def test_requeue_while_queued_leaves_the_job_before_alone(cluster: Cluster) -> None:
    first = cluster.submit(HOLD)
    wait_for(lambda: first.log("stdout.txt"))
    second = cluster.submit("echo never", nodes=2)
    wait_for(lambda: "node taken" in second.log("execution-node-1.log") and "waiting" in second.log("execution-node-0.log"))
    second.ask(protocol.REQUEUE, "bob", "")
    assert second.wait()["next"] == 2
    assert second.log("stdout.txt") == ""
    release(first)


def test_who_wants_the_end_comes_before_who_wants_room(cluster: Cluster) -> None:
    """Even if he comes while the ranks are being ended for the other."""
    job = cluster.submit(STAYS, terminateSeconds=1.5)
    wait_for(lambda: job.log("stdout.txt"))
    job.ask(protocol.REQUEUE, "bob", "")
    wait_for(lambda: "stopping" in job.log("execution.log"))
    job.cancel("ann", "enough")
    verdict = job.wait()
    assert (verdict["executionState"], verdict["reason"]) == ("failed", "terminated by ann: enough")
    assert "next" not in verdict
    assert_clean(cluster, job)


def test_what_another_attempt_was_asked_is_nothing_to_this_one(cluster: Cluster) -> None:
    job = cluster.submit(HOLD)
    job.ask(protocol.CANCEL, "ann", "the one before", attempt=3)
    wait_for(lambda: job.log("stdout.txt"))
    release(job)
