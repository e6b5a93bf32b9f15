"""A sweep over nodes that are reached by SSH: as many jobs at once as have nodes, the rest when nodes become free."""

from __future__ import annotations

import json
from typing import Any

from command_line import Cli
from ssh_world import config, describe, on_servers
from sshd import SshNodes

MLPROJECT = """
    name: toy
    entry_points:
      main:
        parameters: {lr: float}
        command: python train.py {lr}
"""
TRAIN = """
    import sys
    from mlflow_batchai.training import report
    report.log({"val_loss": float(sys.argv[1])}, step=0)
    if sys.argv[1] == "0.3":
        sys.exit("diverged")
"""


def test_a_sweep_on_two_machines(cli: Cli, ssh_servers: SshNodes) -> None:
    world = cli.world
    describe(world, on_servers(ssh_servers, world, range(2)))
    project = world.project(TRAIN, MLPROJECT, config(1, horovod=False))
    said = cli("sweep", project, "-P", "lr=0.2,0.1,0.3", "--run-name", "far", "-o", "json")
    assert said.code == 1, said
    assert "sweep far: 3 jobs, 3 at once" in said.err, "two have nodes, and one is ready"
    data: dict[str, Any] = json.loads(said.out)
    assert [(row["name"], row["state"]) for row in data["jobs"]] == [
        ("far-2", "succeeded"),
        ("far-1", "succeeded"),
        ("far-3", "failed"),
    ]
    assert data["jobs"][2]["reason"].endswith("exited with code 1: diverged")
    jobs = [run for run in world.runs() if run.info.run_name != "far"]
    assert {run.data.tags["batchai.engine"] for run in jobs} == {"ssh"}
    world.wait(lambda: not world.job_processes(), what="ranks are left")
