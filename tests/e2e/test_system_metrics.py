"""System metrics of a job's nodes in the store, as MLflow's UI groups them; a retry goes on where the attempt before ended."""

from __future__ import annotations

import json
from typing import Any

from ssh_world import HereClient, ended

# A node that computes all the time, until it has been sampled; the first attempt fails then.
TOY = """
    import os, sys, time
    memory = bytearray(b"x" * 80_000_000)
    until = time.monotonic() + 3
    while time.monotonic() < until:
        pass
    sys.exit(1 if os.environ["BATCHAI_ATTEMPT"] == "1" else 0)
"""
NAMES = {
    "cpu_utilization_percentage",
    "system_memory_usage_megabytes",
    "system_memory_usage_percentage",
    "disk_usage_percentage",
    "network_receive_megabytes",
    "network_transmit_megabytes",
    "process_cpu_percentage",
    "process_memory_megabytes",
}


def project(world: Any, **document: Any) -> Any:
    properties = {
        "nodeCount": 2,
        "horovodSettings": {},
        # MLflow's own sampling in a rank would add metrics of no node.
        "environmentVariables": [{"name": "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "value": "true"}],
    }
    return world.project(TOY, batchai=json.dumps({**document, "properties": properties}))


def test_two_nodes_and_a_retry(world: Any, here: HereClient) -> None:
    run = ended(world, here.submit(project(world, systemMetrics=1, retries=1)))
    assert run.info.status == "FINISHED", run.data.tags
    assert (run.data.tags["batchai.attempt"], run.data.metrics) != ("1", {})
    for node in ("node-0", "node-1"):
        found = {key.rpartition("/")[2] for key in run.data.metrics if key.startswith(f"system/{node}/")}
        assert found == NAMES
        points = world.client.get_metric_history(run.info.run_id, f"system/{node}/process_memory_megabytes")
        assert [point.step for point in points] == list(range(len(points))) and len(points) >= 4
        times = [point.timestamp for point in points]
        assert times == sorted(times) and run.info.start_time < times[0] < times[-1] < run.info.end_time
        assert max(point.value for point in points) > 80
        used = world.client.get_metric_history(run.info.run_id, f"system/{node}/process_cpu_percentage")
        assert max(point.value for point in used) > 10
    assert {key.split("/")[0] for key in run.data.metrics} == {"system"}
    world.wait_gone()
