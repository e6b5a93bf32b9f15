"""The control share stalls for longer than a silent node is waited for: nobody is lost by that, and nothing of what was said."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loop_disk import loop_disk
from node_world import Cluster, Job
from stalling import Stalling
from waiting import wait_for

from mlflow_batchai.agent import place
from mlflow_batchai.agent.api import host
from mlflow_batchai.engines import machines, ssh_hosts

LOSS_SECONDS = 3.0
STALL_SECONDS = 3 * LOSS_SECONDS
STEPS = 110
# Every rank reports, and writes a line, for longer than the stall; nothing of it is on the share itself.
WRITES = f"""
python3 -c '
import json, os, time
spool = open(os.path.join(os.environ["BATCHAI_SPOOL"], "report-%s-1.jsonl" % os.environ["BATCHAI_RANK"]), "a")
for step in range({STEPS}):
    print("line", step, flush=True)
    record = dict(type="metric", step=step, ts=0, values=dict(loss=1.0))
    spool.write(json.dumps(record) + chr(10))
    spool.flush()
    time.sleep(0.1)
'
"""
PATCH = "mounted.HEARTBEAT_SECONDS = 0.5"


@pytest.fixture
def frozen_disk(tmp_path: Path) -> Iterator[Stalling]:
    """All that writes hangs; what is read comes from memory."""
    with loop_disk(tmp_path, 64) as place:
        freeze = lambda way: subprocess.run(["fsfreeze", way, str(place)], check=False)  # noqa: E731
        yield Stalling(place, lambda: freeze("-f"), lambda: freeze("-u"))
        freeze("-u")


@pytest.mark.parametrize("kind", ["frozen_disk", "stopped_server"])
def test_a_share_that_stalls(agents: Callable[..., Cluster], request: pytest.FixtureRequest, kind: str) -> None:
    share: Stalling = request.getfixturevalue(kind)
    cluster = agents(share.place)
    job: Job = cluster.submit(WRITES, nodes=2, patch=PATCH, lossSeconds=LOSS_SECONDS)
    wait_for(lambda: job.log("stdout.txt").count("line 3\n") == 2)
    share.stall()
    time.sleep(STALL_SECONDS)
    assert all(agent.poll() is None for agent in job.agents)
    share.go_on()
    assert job.wait()["executionState"] == "succeeded", job.said()
    lines = [f"line {step}" for step in range(STEPS)]
    reports = job.records("report")
    for rank in (0, 1):
        assert job.log(f"stdout-{rank}.txt").splitlines() == lines
        assert [line[4:] for line in job.log("stdout.txt").splitlines() if line.startswith(f"[{rank}]")] == lines
    assert [report["body"]["step"] for report in reports] == [*range(STEPS), *range(STEPS)]
    assert job.records("dropped") == []


def test_a_node_whose_share_hangs_says_so(stopped_server: Stalling, tmp_path: Path) -> None:
    """Who sends a job there learns it in time, and does not take the node for one that is away."""
    stopped_server.stall()
    later = threading.Timer(2 * place.HANGS_SECONDS, stopped_server.go_on)
    later.start()
    asked = {"root": str(tmp_path / "root"), "share": str(stopped_server.place), "identity": "x", "python": sys.executable}
    begun = time.monotonic()
    try:
        said = host.answer("hello", asked)
    finally:
        later.cancel()
    assert said["share"] == "hangs" and time.monotonic() - begun < machines.ASK_SECONDS
    stopped_server.go_on()
    assert host.answer("hello", asked)["share"] == "another"
    assert ssh_hosts.share_sentence("node a", "/data", "hangs").startswith("node a: the share at its /data hangs; ")
