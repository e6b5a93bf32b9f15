"""The network of one node is cut, share and peers with it: the others end, and so does what runs on the node that is cut off."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from azure_server import AzureServer
from netns import Machines, Setup, unavailable
from node_world import QUICK, Cluster
from plans import toy_plan
from waiting import wait_for

from mlflow_batchai.agent.reservation import agents

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")

# A quarter of an hour, in which a share may be away, is too long for a test.
HASTY = f"""{QUICK}
index.HEARTBEAT_SECONDS = 1.0
index.HASTE_SECONDS = 1.0
ending.LAST_DRAIN_SECONDS = 1.0
from mlflow_batchai.agent.share import sharefiles
sharefiles.AWAY_SECONDS = 6.0
"""
# Stands for an allreduce that would wait for ever.
HANGS = "trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done"


def test_a_cable_is_cut(tmp_path: Path, agent_pyz: Path) -> None:
    with (
        Machines(tmp_path / "machines", [Setup()] * 2) as machines,
        AzureServer(tmp_path / "azure", machines.network.client) as azure,
    ):
        cluster = Cluster(tmp_path, toy_plan, agent_pyz, server=azure)
        try:
            enter = [["nsenter", f"--net=/proc/{machine.pid}/ns/net"] for machine in machines]
            job = cluster.submit(HANGS, nodes=2, patch=HASTY, enter=enter, lossSeconds=3.0, terminateSeconds=2.0)
            wait_for(lambda: job.log("stdout.txt").count("up") == 2, what=job.said())
            begun = time.monotonic()
            machines[1].unplug()
            job.agents[0].wait(60)
            assert time.monotonic() - begun < 55
            verdict = job.verdict()
            assert verdict is not None and verdict["errors"][0]["code"] == "NodeLost", job.said()
            assert verdict["reason"].startswith("node-1 has not been heard of for ")
            job.agents[1].wait(60)
            told = agents.last_report(str(cluster.roots[int(job.reservation["nodes"][1])]), job.reservation["number"])
            assert told["failure"]["code"] == "ShareFailed"
            assert told["failure"]["message"].startswith("node-1: the share could not be used for ")
            assert not job.processes()
        finally:
            cluster.close()
