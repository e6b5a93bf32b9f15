"""Agents whose control share is an Azure file share: nothing is lost when it fails, and few bytes and requests are sent."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from azure_server import AzureServer, Request
from node_world import QUICK, Cluster, Job, PlanMaker
from waiting import wait_for

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.share import index
from mlflow_batchai.agent.share.base import RUNNING
from mlflow_batchai.engines import archive
from mlflow_batchai.job.events import EventReader
from mlflow_batchai.job.jobs import Job as ReadJob
from mlflow_batchai.storage.directory import DirectoryShare

HOLD = 'echo go; until [ -e "$AZ_BATCHAI_SHARED_JOB_TEMP/end" ]; do sleep 0.1; done'


@pytest.fixture
def ten(tmp_path: Path, make_plan: PlanMaker, azure: AzureServer) -> Iterator[Cluster]:
    made = Cluster(tmp_path, make_plan, archive.stored(tmp_path / "agents"), nodes=10, server=azure)
    yield made
    made.close()


def release(job: Job, seconds: float = 40.0) -> None:
    (job.share / job.plan.folder / "shared" / "end").touch()
    assert job.wait(seconds)["executionState"] == "succeeded", job.said()


def ours(azure: AzureServer, name: str = "") -> list[Request]:
    return [
        request for request in azure.requests() if request.agent.startswith("mlflow-batchai-agent") and name in request.path
    ]


def test_a_tenth_of_the_requests_fails(rest_cluster: Cluster, azure: AzureServer) -> None:
    azure.fail(rate=0.1, kinds=("503", "500", "429", "cut"), seed=5)
    job = rest_cluster.submit(
        "for i in $(seq 200); do echo line $i; [ $((i % 20)) = 0 ] && sleep 0.2; done; true", nodes=2, code=[], patch=QUICK
    )
    verdict = job.wait(90)
    assert verdict["executionState"] == "succeeded", job.said()
    failed = [request for request in ours(azure) if request.error and request.status not in (404, 409)]
    assert len(failed) >= 3, "requests did fail"
    lines = [f"line {number}" for number in range(1, 201)]
    for rank in (0, 1):
        assert job.log(f"stdout-{rank}.txt").splitlines() == lines
        said = [record["x"] for record in job.records("log") if record["r"] == rank and record["s"] == "out"]
        assert "".join(said).splitlines() == lines
        assert [line[4:] for line in job.log("stdout.txt").splitlines() if line.startswith(f"[{rank}]")] == lines
    for node in (0, 1):
        record = job.exit(node)
        segments = list((job.share / job.paths.events).glob(f"*/agent-{node}-*.jsonl"))
        assert record and record["segments"] == len(segments)
        assert (job.share / job.paths.marker(f"segments-agent-{node}")).stat().st_size == len(segments)


def test_an_old_service(rest_cluster: Cluster, azure: AzureServer) -> None:
    """One that doesn't take data with Create File."""
    azure.newest("2025-01-05")
    job = rest_cluster.submit("echo hello", nodes=2, patch=QUICK)
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert sorted(job.log("stdout.txt").splitlines()) == ["[0] hello", "[1] hello"]
    refused = [request for request in ours(azure) if request.status == 400]
    assert len(refused) == 2, "each agent tries it once"


def test_a_service_that_stops_answering_loses_nothing(rest_cluster: Cluster, azure: AzureServer) -> None:
    count = 400
    job = rest_cluster.submit(
        f"for i in $(seq {count}); do echo line $i; sleep 0.02; done; {HOLD}",
        nodes=2,
        patch=QUICK + "wire.ANSWER_SECONDS = 1.0\n",
    )
    wait_for(lambda: job.log("stdout.txt").count("line") > 20)
    os.kill(azure.pid, signal.SIGSTOP)
    try:
        time.sleep(6)
        assert all(agent.poll() is None for agent in job.agents)
    finally:
        os.kill(azure.pid, signal.SIGCONT)
    wait_for(lambda: job.log("stdout.txt").count("go") == 2)
    release(job)
    lines = [*(f"line {number}" for number in range(1, count + 1)), "go"]
    for rank in (0, 1):
        assert job.log(f"stdout-{rank}.txt").splitlines() == lines
        said = [record["x"] for record in job.records("log") if record["r"] == rank and record["s"] == "out"]
        assert "".join(said).splitlines() == lines
    assert job.records("dropped") == []


def test_a_lost_node_is_noticed(rest_cluster: Cluster) -> None:
    job = rest_cluster.submit(
        "echo started; sleep 600", nodes=2, patch=QUICK + "index.HEARTBEAT_SECONDS = 1.0", lossSeconds=5.0
    )
    wait_for(lambda: job.log("stdout.txt").count("started") == 2)
    time.sleep(8)
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


@pytest.mark.parametrize("absent", [0, 1])
def test_an_agent_that_never_came_is_given_up(rest_cluster: Cluster, absent: int) -> None:
    hasty = QUICK + "peers.COMING_SECONDS = 1.0\nindex.HEARTBEAT_SECONDS = 0.5\nagent.CLAIM_SECONDS = 0.5"
    job = rest_cluster.submit("echo never", nodes=2, patch=hasty, absent=[absent], lossSeconds=3.0)
    assert f"the agent of node-{absent} never came" in job.wait()["reason"]


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


def test_a_peer_that_only_sends_heartbeats_has_come(rest_cluster: Cluster) -> None:
    first = rest_cluster.submit(HOLD, patch=QUICK)
    wait_for(lambda: first.log("stdout.txt"))
    hasty = QUICK + "peers.COMING_SECONDS = 0.5\nindex.HEARTBEAT_SECONDS = 0.5"
    job = rest_cluster.submit("echo mine", nodes=2, patch=hasty, lossSeconds=6.0)
    time.sleep(8)
    assert job.verdict() is None
    release(first)
    assert job.wait()["executionState"] == "succeeded", job.said()


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"share": None}, "asks for a SAS, and there is none"),
        (
            {"share": "sv=2021-08-06&se=2020-01-01T00%3A00%3A00Z&sr=s&sp=rcwdl&sig=aGlkZGVu"},
            "the SAS has expired (it ended at 2020-01-01T00:00:00Z)",
        ),
        ({"share": "sv=2021-08-06&se=2099-01-01T00%3A00%3A00Z&sr=s&sp=rcwdl&sig=aGlkZGVu"}, "refused the SAS"),
    ],
)
def test_an_agent_that_may_not_says_so(rest_cluster: Cluster, told: dict[str, str | None], sentence: str) -> None:
    job = rest_cluster.submit("echo never", told=told)
    assert job.agents[0].wait(60) == 1
    said = job.logs[0].read_text()
    assert sentence in said and said.count("\n") == 1 and "aGlkZGVu" not in said


def test_a_sas_without_write_ends_the_agent_with_a_sentence(rest_cluster: Cluster, azure: AzureServer) -> None:
    name = rest_cluster.address.split("/")[4]
    job = rest_cluster.submit(
        "echo never",
        told={"share": azure.sas(name, permissions="rl")},
        patch="ending.DRAIN_SECONDS = 0.5; sharefiles.PATIENCE_SECONDS = 0.5",
    )
    assert job.agents[0].wait(60) == 1
    said = job.logs[0].read_text()
    assert "the SAS does not allow it: it has to permit reading, listing" in said
    assert "sig=" not in said


def test_code_is_fetched(rest_cluster: Cluster, azure: AzureServer) -> None:

    code = []
    for number in range(100):
        data = b"print(%d)\n" % number
        sha256 = hashlib.sha256(data).hexdigest()
        path = rest_cluster.share / protocol.object_path(sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        code.append({"path": f"dir/file {number}.py", "sha256": sha256, "size": len(data), "mode": 0o644})
    azure.latency(0.2)
    job = rest_cluster.submit(f"cat dir/*.py | sort -u | wc -l; {sys.executable} -S 'dir/file 7.py'", code=code)
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert job.log("stdout.txt") == "100\n7\n"
    gets = [request for request in ours(azure, ".batchai/objects") if request.method == "GET"]
    assert len(gets) == 100
    assert sum(get.seconds for get in gets) > 3 * (gets[-1].time + gets[-1].seconds - gets[0].time), "several at a time"


def test_a_growing_log_is_sent_once(rest_cluster: Cluster, azure: AzureServer) -> None:
    """100 MB: bytes uploaded for the log file over its size, and for all of the job."""
    size = 100_000_000
    lines = r"""awk 'BEGIN { for (;;) printf "epoch 1 step %d loss %.6f accuracy %.6f\n", ++i, rand(), rand() }'"""
    job = rest_cluster.submit(f"{lines} | head -c {size}; {HOLD}")
    begun = time.monotonic()
    log = job.share / job.paths.stdouterr / "stdout.txt"
    wait_for(lambda: log.exists() and log.stat().st_size > size, 200, pause=0.2)
    taken = time.monotonic() - begun
    memory = int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{job.agents[0].pid}/status").read_text()).group(1)) / 1024
    release(job)
    written = log.stat().st_size
    assert job.records("dropped") == []
    requests = ours(azure)
    sent = sum(request.received for request in requests if request.path.endswith("/stdouterr/stdout.txt"))
    everything = sum(request.received for request in requests)
    print(
        f"log of {written / 1e6:.0f} MB in {taken:.1f} s: {sent / written:.4f} times its size uploaded for it,"
        f" {everything / written:.4f} for the whole job, {len(requests)} requests, agent {memory:.0f} MB"
    )
    assert memory < 100
    assert sent / written < 1.1
    assert everything / written < 1.6


# A minute of ours in an eighth of its time.
SCALE = 8.0
SCALED = f"""
from mlflow_batchai.agent.share.index import Pace
for phase, paces in index.PACES.items():
    index.PACES[phase] = tuple(Pace(pace.news / {SCALE}, pace.idle / {SCALE}) for pace in paces)
index.HEARTBEAT_SECONDS /= {SCALE}
shipper.TICK_SECONDS /= {SCALE}
"""


def test_ten_idle_agents_ask_little(ten: Cluster, azure: AzureServer) -> None:
    job = ten.submit(HOLD, nodes=10, patch=SCALED)
    wait_for(lambda: job.log("stdout.txt").count("go") == 10)
    time.sleep(45 / SCALE)  # the pace becomes that of an idle job
    azure.reset()
    seconds = 80
    time.sleep(seconds / SCALE)
    requests = ours(azure)
    looks = sum(request.comp == "list" for request in requests)
    heartbeats = sum("/beats-" in request.path for request in requests)
    print(f"ten idle agents: {len(requests) / seconds:.2f} requests a second: {looks} looks, {heartbeats} heartbeats")
    (first, peer), pause = index.PACES[RUNNING], index.HEARTBEAT_SECONDS
    assert 1 / first.idle + 9 / peer.idle + 10 / pause <= 1.3
    # A window of 80 s can hold one request of an agent more than its pace brings on average.
    assert looks <= seconds / first.idle + 1 + 9 * (seconds / peer.idle + 1)
    assert heartbeats <= 10 * (seconds / pause + 1)
    assert looks + heartbeats == len(requests)
    release(job, 60)


def test_latency_of_a_line(rest_cluster: Cluster) -> None:
    """From a rank's print to a reader of the index at a client's pace."""
    job = rest_cluster.submit(f"for i in $(seq 30); do echo at $(date +%s.%N); sleep 0.7; done; {HOLD}", nodes=2)
    share = DirectoryShare(job.share)
    wait_for(lambda: (job.share / job.paths.index / "announce-0").exists())
    reader = EventReader(ReadJob(share, job.plan.folder))
    seen: list[float] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            for _, _, records in reader.read():
                now = time.time()
                for record in records:
                    if record["k"] == "log":
                        seen.extend(now - float(text.split()[1]) for text in record["x"].splitlines() if text.startswith("at "))
            time.sleep(0.2)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        wait_for(lambda: len(seen) == 60, 90)
    finally:
        done.set()
        thread.join()
    release(job)
    ordered = sorted(seen)
    p95 = ordered[int(len(ordered) * 0.95)]
    print(f"rank to reader: median {statistics.median(ordered):.2f} s, p95 {p95:.2f} s, most {ordered[-1]:.2f} s")
    # Half of them: a machine that stands still for seconds makes some late, a pace that is slower than it should be all.
    assert statistics.median(ordered) < 2.5
