"""Agents that wait for long are small programs, and whatever happens to them the job goes on as with an agent that is awake."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from node_world import Cluster, Job
from waiting import wait_for

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.reservation import agents
from mlflow_batchai.agent.share.mounted import MountedShare

# Runs until ``release``.
HOLD = 'echo go; until [ -e "$AZ_BATCHAI_SHARED_JOB_TEMP/end" ]; do sleep 0.05; done'


def release(job: Job) -> None:
    (job.share / job.plan.folder / "shared" / "end").touch()
    assert job.wait()["executionState"] == "succeeded", job.said()


def sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text() == "bash\n"


def kilobytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


# Nobody waits for long.
QUICK = """
from mlflow_batchai.agent.reservation import waiter
waiter.LOOK_SECONDS = waiter.SELDOM_SECONDS = 0.5
agent.PLAN_SECONDS = 1.0
"""
SELDOM = """
from mlflow_batchai.agent.reservation import waiter
waiter.LOOK_SECONDS, waiter.SELDOM_SECONDS = 0.05, 600.0
"""


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest, cluster: Cluster) -> None:
    # Where the agents' real command line matters they have their real paces.
    cluster.patch = SELDOM if "seldom" in request.node.name else "" if "its_turn" in request.node.name else QUICK


@pytest.fixture
def waiting(cluster: Cluster) -> tuple[Job, Job]:
    """A job of two nodes that runs, and one that waits for them and sleeps."""
    first = cluster.submit(HOLD, nodes=2)
    wait_for(lambda: first.log("stdout.txt").count("go") == 2, what=first.said)
    second = cluster.submit(
        'echo "rank $BATCHAI_RANK: $SECRET"; echo $PPID', nodes=2, secrets={"SECRET": 'it\'s a \\"s3cret"; $(é)'}
    )
    wait_for(lambda: all(sleeps(agent.pid) for agent in second.agents), what=second.said)
    return first, second


def test_it_is_small_and_found_like_an_agent_and_starts_when_its_turn_has_come(
    cluster: Cluster, waiting: tuple[Job, Job]
) -> None:
    first, second = waiting
    number = second.reservation["number"]
    for node, agent in enumerate(second.agents):
        root = cluster.roots[int(second.reservation["nodes"][node])]
        family = [agent.pid, *proc.descendants(agent.pid)]
        assert len(family) == 2 and sum(map(kilobytes, family)) < 2000
        assert agents.state(str(root), number, 0, time.time()) == "held"
        record = agents.read(str(root), number)
        assert record is not None and record["pid"] == agent.pid and agents.is_alive(record)
        assert agents.last_report(str(root), number) == {"state": "waiting"}
        assert f"--root={root}" in proc.command_line(agent.pid)
        for pid in family:
            seen = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
            assert b"s3cret" not in seen
    release(first)
    begun = time.monotonic()
    assert second.wait()["executionState"] == "succeeded", second.said()
    assert time.monotonic() - begun < 20
    assert second.log("stdout.txt").count(': it\'s a \\"s3cret"; $(é)\n') == 2
    for node in (0, 1):
        log = second.log(f"execution-node-{node}.log")
        exit_record = second.exit(node)
        assert exit_record is not None
        assert exit_record["logs"][f"execution-node-{node}.log"] == [len(log.encode()), log.count("\n")]
        written = len(list((second.share / second.paths.events).glob(f"*/agent-{node}-*.jsonl")))
        assert exit_record["segments"] == written
    for file in cluster.folder.rglob("*"):
        if file.is_file() and not file.name.startswith("stdout") and file.suffix != ".jsonl":
            assert b"s3cret" not in file.read_bytes(), file


def test_it_looks_seldom_later_and_still_sees_its_turn_at_once(waiting: tuple[Job, Job]) -> None:
    first, second = waiting
    beats = [(second.share / second.paths.events).parent / "board" / f"beats-agent-{node}" for node in (0, 1)]
    wait_for(lambda: all(file.stat().st_size == 7 for file in beats), what=second.said)
    time.sleep(1)
    assert all(file.stat().st_size == 7 for file in beats)
    release(first)
    assert second.wait()["executionState"] == "succeeded", second.said()


def test_a_cancel_is_heeded(waiting: tuple[Job, Job]) -> None:
    first, second = waiting
    begun = time.monotonic()
    second.cancel("ann", "enough")
    verdict = second.wait()
    assert time.monotonic() - begun < 15
    assert (verdict["reason"], verdict["errors"][0]["code"]) == ("terminated by ann: enough", "JobTerminated")
    assert "stopping" in second.log("execution-node-0.log")
    release(first)


def test_a_sigterm_to_node_0_is_heeded(waiting: tuple[Job, Job]) -> None:
    """Its peer sleeps, and is not waited for."""
    first, second = waiting
    second.agents[0].terminate()
    begun = time.monotonic()
    assert second.wait()["reason"] == "node-0: the agent was told to end (SIGTERM)"
    assert time.monotonic() - begun < 15
    release(first)


def test_one_that_is_killed_leaves_nothing(cluster: Cluster, waiting: tuple[Job, Job]) -> None:
    first, second = waiting
    third = cluster.submit("echo third", nodes=2)
    for agent in second.agents:
        family = proc.descendants(agent.pid)
        agent.kill()
        agent.wait()
        wait_for(lambda family=family: not any(map(proc.start_time, family)))
    for root in cluster.roots:
        assert agents.state(str(root), second.reservation["number"], 0, time.time()) == "ended"
    release(first)
    assert third.wait()["executionState"] == "succeeded", third.said()


def test_a_verdict_by_a_client_ends_it(waiting: tuple[Job, Job]) -> None:
    first, second = waiting
    client = {"executionState": "failed", "exitCode": None, "errors": [], "reason": "mine", "terminated": False, "endTime": 1}
    (second.share / second.paths.verdict).mkdir()
    (second.share / second.paths.verdict_file).write_bytes(protocol.encode([client]))
    assert second.wait() == client
    release(first)


def test_a_share_that_is_away_when_its_turn_comes(cluster: Cluster, waiting: tuple[Job, Job]) -> None:
    first, second = waiting
    (cluster.share / protocol.identity_path("x")).mkdir(parents=True)
    cluster.share.rename(cluster.folder / "away")
    cluster.share.mkdir()
    for agent in first.agents:
        agent.kill()
    wait_for(lambda: not any(sleeps(agent.pid) for agent in second.agents))
    time.sleep(1.5)
    assert [agent.poll() for agent in second.agents] == [None, None]
    assert not any(Path(f"/proc/{agent.pid}/fd/63").is_symlink() for agent in second.agents), "bash's own"
    cluster.share.rmdir()
    (cluster.folder / "away").rename(cluster.share)
    assert second.wait()["executionState"] == "succeeded", second.said()


def test_a_job_whose_folder_was_removed_gives_its_nodes_back(cluster: Cluster, waiting: tuple[Job, Job]) -> None:
    first, second = waiting
    (cluster.share / protocol.identity_path("x")).mkdir(parents=True)
    shutil.rmtree(second.share / second.plan.folder)
    release(first)
    assert [agent.wait(15) for agent in second.agents] == [1, 1]
    assert "there is no plan at" in second.said()


def test_its_peers_wake_when_a_node_of_the_job_is_taken(cluster: Cluster) -> None:
    first, other = cluster.submit(HOLD), cluster.submit(HOLD)
    wait_for(lambda: first.log("stdout.txt") and other.log("stdout.txt"))
    job = cluster.submit("echo go", nodes=2)
    wait_for(lambda: all(sleeps(agent.pid) for agent in job.agents), what=job.said)
    release(first)
    wait_for(lambda: not any(sleeps(agent.pid) for agent in job.agents), what=job.said)
    time.sleep(2)
    assert not any(sleeps(agent.pid) for agent in job.agents)
    release(other)
    assert job.wait()["executionState"] == "succeeded", job.said()


# Has lost sight of node 0.
LEAVE = """
from mlflow_batchai.agent.outcome import Stop
def leave(self):
    raise Stop("node0", "node-0 is silent")
phases.Phases._await_announces = leave
"""


def test_a_peer_that_leaves_before_our_node_is_taken_is_the_cause(cluster: Cluster) -> None:
    first = cluster.submit(HOLD)
    wait_for(lambda: first.log("stdout.txt"))
    job = cluster.submit("echo go", nodes=2, patch=LEAVE)
    assert job.reservation["nodes"][0] == first.reservation["nodes"][0]
    verdict = job.wait()
    assert verdict["errors"][0]["code"] == "NodeLost"
    assert verdict["reason"].startswith("node-1 ended its part: ")
    release(first)


def test_a_drained_node(cluster: Cluster) -> None:
    cluster.roots[0].mkdir(parents=True)
    agents.drain(str(cluster.roots[0]), True)
    job = cluster.submit("echo go")
    wait_for(lambda: sleeps(job.agents[0].pid), what=job.said)
    agents.drain(str(cluster.roots[0]), False)
    assert job.wait()["executionState"] == "succeeded", job.said()


def test_it_sends_heartbeats(cluster: Cluster) -> None:
    first = cluster.submit(HOLD, nodes=2)
    job = cluster.submit("echo go", nodes=2)
    wait_for(lambda: all(sleeps(agent.pid) for agent in job.agents), what=job.said)
    attempt = MountedShare(str(job.share)).attempt(job.paths, 0, 2)
    wait_for(lambda: attempt.heartbeats("agent-0") > 1 < attempt.heartbeats("agent-1"))
    release(first)
    assert job.wait()["executionState"] == "succeeded", job.said()


def test_without_a_flock_the_agent_stays_awake(cluster: Cluster, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sleep"):
        (tools / name).symlink_to(f"/bin/{name}")
    first = cluster.submit(HOLD)
    wait_for(lambda: first.log("stdout.txt"))
    second = cluster.submit(HOLD)
    wait_for(lambda: second.log("stdout.txt"))
    third = cluster.submit("echo go", environment={"PATH": str(tools)})
    wait_for(lambda: "waiting" in third.log("execution.log"))
    time.sleep(2)
    assert not sleeps(third.agents[0].pid)
    release(first)
    release(second)
    assert third.wait()["executionState"] == "succeeded", third.said()
