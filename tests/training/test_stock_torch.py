"""Stock ``horovod.torch`` without a broadcast fails aloud. Its collectives are stand-ins here, PyTorch and its schedules are real."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from mlflow_batchai.training import guard

ROOT = Path(__file__).parents[2]

# The other rank holds the same weights, others, or has called hvd.join().
HOROVOD = """
import torch

Sum, global_process_set, PEER, compared = "sum", object(), "same", 0
size, rank = (lambda: 2), (lambda: 0)

def allreduce(table, op, name):
    global compared
    compared += 1
    return torch.stack([table[0], {"same": table[0], "other": torch.tensor(7), "joined": torch.tensor(0)}[PEER]])

def broadcast(weight, root, name):
    return weight + 1e-7 if weight.dim() == 1 else weight + 0.5

def allgather(differences, name):
    return torch.cat([differences, differences / 2])

def DistributedOptimizer(optimizer, named_parameters):
    optimizer._parameter_names = {weight: name for name, weight in named_parameters}
    return optimizer
"""
SCRIPT = """
import os
import horovod.torch as hvd
import torch

def train(steps):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    before = hvd.compared
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        schedule.step()
    return hvd.compared - before

print("same", train(9))
hvd.PEER = "joined"
print("joined", train(3))
hvd.PEER = "other"
try:
    train(1)
except RuntimeError as error:
    print(type(error).__name__, error)
os.environ["BATCHAI_WEIGHT_CHECK"] = "1000"
print("allowed", train(1))
os.environ["BATCHAI_WEIGHT_CHECK"] = "0"
print("off", train(1))
"""


def test_weights_are_compared_after_steps(torch_python: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(guard.SITECUSTOMIZE)
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "torch.py").write_text(HOROVOD)
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [torch_python, "-W", "error", "-c", SCRIPT], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    same, joined, diverged, allowed, off = done.stdout.splitlines()
    assert (same, joined, allowed, off) == ("same 4", "joined 2", "allowed 1", "off 0")
    assert diverged.startswith("RanksDivergedError The ranks hold different weights after step 1: checksums rank 0 ")
    assert "rank 1 0000000000000007; most in 0.weight, by " in diverged and "hvd.broadcast_parameters(" in diverged
