"""A node that a scheduler has granted: its agent waits for nobody, locks nothing, and runs the job to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from node_world import Cluster

from mlflow_batchai.agent.api.host import drain


def test_agents_with_granted_nodes_run_a_job_to_its_end(cluster: Cluster) -> None:
    root = str(cluster.roots[0])
    drain(root, True)  # nobody looks at the queue's marks
    job = cluster.submit('echo "rank $BATCHAI_RANK of $BATCHAI_SIZE"', nodes=2, granted=True)
    verdict = job.wait()
    assert verdict["executionState"] == "succeeded", job.said()
    assert sorted(job.log("stdout.txt").split("\n")) == ["", "[0] rank 0 of 2", "[1] rank 1 of 2"]
    assert job.processes() == set()
    assert [agent.returncode for agent in job.agents] == [0, 0]
    # The scheduler keeps what the agent wrote.
    assert [json.loads(line) for line in job.logs[0].read_text().splitlines()] == [{"state": "ended"}]
    for index in job.reservation["nodes"]:
        left = set(os.listdir(cluster.roots[int(index)]))
        assert not left & {"tickets", "lock", "agent.lock", "owner"}
        assert os.listdir(cluster.roots[int(index)] / "jobs") == []


def test_an_agent_is_told_how_it_gets_its_node(agent_pyz: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-I", "-S", str(agent_pyz), "agent", "--share=/", "--folder=x", "--attempt=1", "--node=0"]
    done = subprocess.run([*argv, f"--root={tmp_path}"], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 2 and "one of the arguments --reservation --granted is required" in done.stderr
