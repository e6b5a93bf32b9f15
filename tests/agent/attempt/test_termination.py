"""SIGTERM to an agent: it ends its ranks, ships the rest, says why, and goes, with time left before a SIGKILL."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import pytest
from node_world import SAVES, Cluster, Job
from waiting import wait_for

from mlflow_batchai.agent import protocol

# A rank that says a last word when it is ended, and one that doesn't go.
LAST_WORD = "trap 'echo the last word; exit 0' TERM; echo up; while true; do sleep 0.05; done"
STAYS = "trap '' TERM; echo up; while true; do sleep 0.05; done"


def up(job: Job, ranks: int) -> None:
    wait_for(lambda: job.log("stdout.txt").count("up") == ranks)


def told(cluster: Cluster, *agents: int, command: str = LAST_WORD, **changes: Any) -> Job:
    """A job whose ranks are up, and whose agents on these nodes are told to end."""
    job = cluster.submit(command, nodes=changes.pop("nodes", 1), **changes)
    up(job, job.plan.node_count)
    for node in agents:
        job.agents[node].send_signal(signal.SIGTERM)
    return job


def assert_ended(cluster: Cluster, job: Job, node: int, seconds: float, granted: bool = False) -> None:
    """The job fails because this node's agent was told to end, within so many seconds; its nodes have said all, and nothing is
    left on them."""
    begun = time.monotonic()
    verdict = job.wait()
    assert time.monotonic() - begun < seconds, job.said()
    assert verdict["executionState"] == "failed", job.said()
    assert verdict["reason"] == f"node-{node}: the agent was told to end (SIGTERM)"
    assert [error["code"] for error in verdict["errors"]] == [protocol.NODE_LOST]
    assert job.processes() == set()
    if granted:  # by a scheduler: then nobody else removes its root
        assert not job.logs[node].parent.exists()
    else:  # the agent's own log, whose last line the poll shows, has no traceback
        assert job.logs[node].read_text() in ("", '{"state": "ended"}\n')
    for index, root in enumerate(job.reservation["nodes"]):
        exit_record = job.exit(index)
        assert exit_record and exit_record["left"] == []
        assert verdict["totals"][str(index)]
        assert not (cluster.roots[int(root)] / "jobs" / job.plan.job).exists()


@pytest.mark.parametrize(("node", "granted"), [(0, False), (1, True)])
def test_in_the_middle_of_a_job(cluster: Cluster, node: int, granted: bool) -> None:
    job = told(cluster, node, nodes=2, granted=granted)
    assert_ended(cluster, job, node, 10, granted)
    assert sorted(job.log("stdout.txt").splitlines()) == [
        *("[0] the last word", "[0] up"),
        *("[1] the last word", "[1] up"),
    ]
    assert job.agents[node].returncode == 1
    # Its node is free.
    assert cluster.submit("true", nodes=2).wait()["executionState"] == "succeeded"


def test_ranks_are_told_at_the_same_moment(cluster: Cluster) -> None:
    """As Slurm and systemd do it: all processes of the job at once. The reason is still the agent's end."""
    job = cluster.submit(LAST_WORD.replace("exit 0", "exit 143"), nodes=2)
    up(job, 2)
    for pid in [*(agent.pid for agent in job.agents), *job.processes()]:
        with contextlib.suppress(ProcessLookupError):  # a rank's own short-lived child
            os.kill(pid, signal.SIGTERM)
    verdict = job.wait()
    assert verdict["reason"] in [f"node-{node}: the agent was told to end (SIGTERM)" for node in (0, 1)], job.said()
    assert job.processes() == set()


@pytest.mark.parametrize("preparation", [None, "echo up; (sleep 0.1; kill -TERM $PPID) & kill -TERM $$"])
def test_others_are_told_a_moment_before(cluster: Cluster, preparation: str | None) -> None:
    command = "echo up; (sleep 0.1; kill -TERM $PPID) & kill -TERM $$"
    job = cluster.submit(command, preparation=preparation, patch="peers.SAME_MOMENT_SECONDS = 5.0")
    assert_ended(cluster, job, 0, 20)


def test_while_it_waits_for_its_node(cluster: Cluster) -> None:
    first = told(cluster)
    cluster.submit("true").wait()  # on the other node
    job = cluster.submit("echo never", nodes=2)
    wait_for(lambda: "waiting for 1 job(s) before us" in job.log("execution-node-0.log"))
    job.agents[0].send_signal(signal.SIGTERM)
    assert_ended(cluster, job, 0, 10)
    first.cancel("me", "")
    first.wait()


def test_ranks_that_take_their_time(cluster: Cluster) -> None:
    """They have ``terminateSeconds``, though no more than leaves time for the verdict; one more signal changes nothing."""
    job = cluster.submit(SAVES, terminateSeconds=20)
    wait_for(lambda: "started" in job.log("stdout.txt"))
    for _ in range(3):
        job.agents[0].send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert_ended(cluster, job, 0, 10)
    assert "saved" in job.log("stdout.txt")


def test_ranks_that_do_not_go_leave_time_for_the_verdict(cluster: Cluster) -> None:
    job = told(cluster, 0, 1, command=STAYS, nodes=2, terminateSeconds=600, patch="peers.TERMINATION_SECONDS = 17.0")
    verdict = job.wait(17)
    assert verdict["errors"][0]["code"] == protocol.NODE_LOST, job.said()
    assert set(verdict["totals"]) == {"0", "1"}
    assert job.processes() == set()


def test_while_ranks_take_their_time_after_a_cancel(cluster: Cluster) -> None:
    job = told(cluster, command=STAYS, terminateSeconds=600, patch="peers.TERMINATION_SECONDS = 17.0")
    job.cancel("me", "")
    wait_for(lambda: "stopping" in job.log("execution.log"))
    job.agents[0].send_signal(signal.SIGTERM)
    assert job.wait(17)["terminated"], job.said()
    assert job.processes() == set()


def test_a_container_is_removed_when_the_last_word_is_written(cluster: Cluster) -> None:
    patch = """
def remove(self):
    paths = self.layout.paths
    last = paths.exit(1) if self.layout.node else paths.verdict_file
    sys.stderr.write(f"{self.layout.control.read_closed(last) is not None}\\n")
runtime.Runtime.remove_container = remove
"""
    job = told(cluster, 0, 1, nodes=2, patch=patch)
    job.wait()
    assert [log.read_text() for log in job.logs] == ["True\n", "True\n"]


def test_before_it_listens(cluster: Cluster) -> None:
    patch = """
import os, signal
init = agent.Agent.__init__
def told(self, *arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    init(self, *arguments)
agent.Agent.__init__ = told
"""
    assert_ended(cluster, cluster.submit(STAYS, patch=patch), 0, 15)


def test_when_all_has_ended_well(cluster: Cluster) -> None:
    patch = """
import os, signal
run = ending.Ending.run
def told(self, *arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    return run(self, *arguments)
ending.Ending.run = told
"""
    job = cluster.submit("echo done", nodes=2, patch=patch)
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert sorted(job.log("stdout.txt").splitlines()) == ["[0] done", "[1] done"]
