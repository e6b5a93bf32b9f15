"""examples/pytorch as it stands there, and DistributedDataParallel on nodes over SSH: weights are equal, a killed rank ends the job."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from example_text import commands
from ssh_world import HereClient, describe, ended, on_servers
from sshd import SshNodes

EXAMPLE = Path(__file__).parents[2] / "examples" / "pytorch"

pytestmark = pytest.mark.timeout(600)


def train(world: Any, python: Path, number: int) -> Any:
    """Run a command of the README on the local cluster; its run, when it has succeeded with equal weights on both ranks."""
    (world.home / "clusters").mkdir(parents=True)
    (world.home / "clusters" / "local.yaml").write_text(json.dumps({"engine": "local", "nodes": 2, "python": str(python)}))
    world.cwd = EXAMPLE.parents[1]
    variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = world.call(["bash", "-c", commands(EXAMPLE)[number]], timeout=300, **variables)
    assert done.returncode == 0, done.stderr + world.log("stderr.txt")
    digests = re.findall(r"^\[(\d)\] weights (\w{16})$", world.log(), re.M)
    assert sorted(rank for rank, _ in digests) == ["0", "1"] and len({digest for _, digest in digests}) == 1, world.log()
    assert [step for step, _ in world.points()] == [0, 1]
    return world.last


def test_distributed_data_parallel(world: Any, torch_python: Path) -> None:
    run = train(world, torch_python, 0)
    (output,) = run.outputs.model_outputs
    model = world.client.get_logged_model(output.model_id)
    assert (model.name, str(model.status)) == ("resnet18", "READY")


@pytest.mark.timeout(1800)  # it may have to build Horovod
def test_stock_horovod(world: Any, torch_horovod_python: Path) -> None:
    run = train(world, torch_horovod_python, 1)
    assert [file.path for file in world.client.list_artifacts(run.info.run_id) if file.path.endswith(".pt")] == ["resnet18.pt"]


ENDLESS = """
    import hashlib, os, time
    import torch
    import torch.distributed as dist

    dist.init_process_group(os.environ["AZ_BATCHAI_PYTORCH_BACKEND"])
    torch.manual_seed(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(1000000):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        if step == 9:
            weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
            print("weights", hashlib.sha256(weights).hexdigest()[:16], flush=True)
        time.sleep(0.01)
"""


def test_a_killed_rank_ends_the_job_over_ssh(world: Any, torch_python: Path, ssh_servers: SshNodes, here: HereClient) -> None:
    describe(world, on_servers(ssh_servers, world, range(2)), python=str(torch_python))
    settings = {"cluster": "nc6", "properties": {"nodeCount": 2, "pyTorchSettings": {"communicationBackend": "TCP"}}}
    run = here.submit(world.project(ENDLESS, batchai=json.dumps(settings)))

    def digests() -> list[str]:
        with contextlib.suppress(FileNotFoundError, KeyError):
            return re.findall(r"weights (\w{16})", "".join(world.log(f"stdout-{rank}.txt", run) for rank in (0, 1)))
        return []

    world.wait(lambda: len(digests()) == 2, what="both ranks have trained")
    assert len(set(digests())) == 1
    killed = world.rank_1()
    assert killed is not None
    killed.kill()
    began, verdict = time.monotonic(), world.folder(run) / "batchai" / "attempts" / "1" / "verdict" / "verdict.json"
    world.wait(verdict.exists, what="the job ends")
    assert time.monotonic() - began < 10
    run = ended(world, run)
    assert run.info.status == "FAILED"
    assert run.data.tags["batchai.reason"].startswith("rank 1 on node-1 was killed by SIGKILL"), run.data.tags["batchai.reason"]
    world.wait_gone()
