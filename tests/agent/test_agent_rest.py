"""Agents whose control share is an Azure file share: nothing is lost when it fails, and what it refuses is told."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable

import pytest
from azure_server import AzureServer, Request
from node_world import QUICK, Cluster, Job
from waiting import freeze, wait_for

from mlflow_batchai.agent import protocol

HOLD = 'echo go; until [ -e "$AZ_BATCHAI_SHARED_JOB_TEMP/end" ]; do sleep 0.1; done'


def ours(azure: AzureServer, name: str = "") -> list[Request]:
    return [
        request for request in azure.requests() if request.agent.startswith("mlflow-batchai-agent") and name in request.path
    ]


def assert_all_arrived(job: Job, lines: list[str]) -> None:
    """Each of two ranks has these lines, once and in order, in its log file and in the records."""
    for rank in (0, 1):
        assert job.log(f"stdout-{rank}.txt").splitlines() == lines
        said = [record["x"] for record in job.records("log") if record["r"] == rank and record["s"] == "out"]
        assert "".join(said).splitlines() == lines
        assert [line[4:] for line in job.log("stdout.txt").splitlines() if line.startswith(f"[{rank}]")] == lines
    assert job.records("dropped") == []


def test_a_tenth_of_the_requests_fails(rest_cluster: Cluster, azure: AzureServer) -> None:
    azure.fail(rate=0.1, kinds=("503", "500", "429", "cut"), seed=5)
    job = rest_cluster.submit(
        "for i in $(seq 200); do echo line $i; [ $((i % 20)) = 0 ] && sleep 0.2; done; true", nodes=2, code=[], patch=QUICK
    )
    assert job.wait(90)["executionState"] == "succeeded", job.said()
    failed = [request for request in ours(azure) if request.error and request.status not in (404, 409)]
    assert len(failed) >= 3, "requests did fail"
    assert_all_arrived(job, [f"line {number}" for number in range(1, 201)])
    for node in (0, 1):
        record = job.exit(node)
        segments = list((job.share / job.paths.events).glob(f"*/agent-{node}-*.jsonl"))
        assert record and record["segments"] == len(segments)
        assert (job.share / job.paths.marker(f"segments-agent-{node}")).stat().st_size == len(segments)


def test_a_service_that_stops_answering_loses_nothing(rest_cluster: Cluster, azure: AzureServer) -> None:
    count = 400
    job = rest_cluster.submit(
        f"for i in $(seq {count}); do echo line $i; sleep 0.02; done; {HOLD}",
        nodes=2,
        patch=QUICK + "wire.ANSWER_SECONDS = 1.0\n",
    )
    wait_for(lambda: job.log("stdout.txt").count("line") > 20)
    freeze(azure.pid)
    try:
        time.sleep(6)
        assert all(agent.poll() is None for agent in job.agents)
    finally:
        os.kill(azure.pid, signal.SIGCONT)
    wait_for(lambda: job.log("stdout.txt").count("go") == 2)
    (job.share / job.plan.folder / "shared" / "end").touch()
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert_all_arrived(job, [*(f"line {number}" for number in range(1, count + 1)), "go"])


def test_a_lost_node_is_noticed(rest_cluster: Cluster) -> None:
    job = rest_cluster.submit(
        "echo started; sleep 600", nodes=2, patch=QUICK + "index.HEARTBEAT_SECONDS = 1.0", lossSeconds=5.0
    )
    wait_for(lambda: job.log("stdout.txt").count("started") == 2)
    time.sleep(6)
    assert job.verdict() is None, "a node that only sends heartbeats is not lost"
    job.agents[1].kill()
    job.agents[1].wait()
    verdict = job.wait()
    assert (verdict["errors"][0]["code"], verdict["executionState"]) == ("NodeLost", "failed"), job.said()
    assert "node-1 has not been heard of for" in verdict["reason"]


def test_an_agent_that_is_killed_before_its_last_marker(rest_cluster: Cluster) -> None:
    """It has said how it ended: its node is not lost."""
    killed = """
_write = index.IndexedFiles.write
def write(self, marker, path, records):
    if marker == "exit-1":
        import os
        self._share.write_closed(path, records)
        os.kill(os.getpid(), 9)
    _write(self, marker, path, records)
index.IndexedFiles.write = write
index.HEARTBEAT_SECONDS = 0.5
"""
    job = rest_cluster.submit("true", nodes=2, patch=QUICK + killed, lossSeconds=3.0)
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert job.agents[1].returncode == -signal.SIGKILL


def test_a_sas_that_ends_before_the_job(rest_cluster: Cluster, azure: AzureServer) -> None:
    """Nobody can say how it ended: nodes are given back, and the client finds the reason where it looks for it."""
    rest_cluster.sas = azure.sas(rest_cluster.address.split("/")[-2], seconds=3)
    hurry = "sharefiles.PATIENCE_SECONDS = ending.DRAIN_SECONDS = ending.CLAIM_SECONDS = 0.5\npeers.REFUSED_SECONDS = 2.0\n"
    job = rest_cluster.submit("sleep 4", nodes=2, patch=QUICK + hurry)
    for agent, log in zip(job.agents, job.logs, strict=True):
        assert agent.wait(60) == 1
        assert re.search(r"the file share \S+ .*the SAS has expired \(it ended at", log.read_text().splitlines()[-1]), (
            log.read_text()
        )
    assert (job.verdict(), job.processes()) == (None, set())


@pytest.mark.parametrize(
    ("sas", "sentence"),
    [
        (lambda azure, name: azure.sas(name, seconds=-60), "the SAS has expired (it ended at 20"),
        (lambda azure, name: azure.sas(name, permissions="rl"), "the SAS does not allow it: it has to permit reading, listing"),
    ],
    ids=["expired", "read-only"],
)
def test_an_agent_that_may_not_says_so(
    rest_cluster: Cluster, azure: AzureServer, sas: Callable[[AzureServer, str], str], sentence: str
) -> None:
    told = {"share": sas(azure, rest_cluster.address.split("/")[4])}
    hurry = "ending.DRAIN_SECONDS = sharefiles.PATIENCE_SECONDS = 0.5"
    job = rest_cluster.submit("echo never", told=told, patch=hurry)
    assert job.agents[0].wait(60) == 1
    said = job.logs[0].read_text()
    assert sentence in said and "sig=" not in said and "Traceback" not in said


def test_code_is_fetched(rest_cluster: Cluster, azure: AzureServer) -> None:

    code = []
    for number in range(40):
        data = b"print(%d)\n" % number
        sha256 = hashlib.sha256(data).hexdigest()
        path = rest_cluster.share / protocol.object_path(sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        code.append({"path": f"dir/file {number}.py", "sha256": sha256, "size": len(data), "mode": 0o644})
    azure.latency(0.2)
    job = rest_cluster.submit(f"cat dir/*.py | sort -u | wc -l; {sys.executable} -S 'dir/file 7.py'", code=code)
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert job.log("stdout.txt") == "40\n7\n"
    gets = [request for request in ours(azure, ".batchai/objects") if request.method == "GET"]
    assert len(gets) == 40
    assert sum(get.seconds for get in gets) > 3 * (gets[-1].time + gets[-1].seconds - gets[0].time), "several at a time"
