"""One machine with four GPUs as four nodes: whole jobs on disjoint GPUs, which queue, are measured, and killed."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import psutil
import pytest
from nvidia_smi import NvidiaSmi
from ssh_world import NAME, HereClient, config, ended, until

from mlflow_batchai.tracking import runs

WAITS = """
    import os, time
    print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"], flush=True)
    while not os.path.exists(os.environ["AZ_BATCHAI_MOUNT_ROOT"] + "/share/go"):
        time.sleep(0.05)
    time.sleep(3)
"""


@pytest.fixture
def machine(world: Any, monkeypatch: pytest.MonkeyPatch) -> NvidiaSmi:
    made = NvidiaSmi(world.root / "driver", 4, slow=0.2)
    monkeypatch.setenv("PATH", made.path)
    world.environment["PATH"] = made.path
    (world.home / "clusters").mkdir(parents=True)
    document = {"nodes": 4, "gpusPerNode": 1, "share": str(world.root / "share")}
    (world.home / "clusters" / f"{NAME}.yaml").write_text(json.dumps(document))
    return made


def printed(world: Any, machine: NvidiaSmi, run: Any) -> list[int]:
    """Which GPUs the two ranks of a job saw, in rank order, once both have said so."""

    def both() -> list[str]:
        path = world.folder(run) / "stdouterr" / "stdout.txt"
        lines = sorted(path.read_text().splitlines()) if path.exists() else []
        return lines if len(lines) == 2 else []

    found = [re.fullmatch(r"\[\d\] (\S+) PCI_BUS_ID", line) for line in until(world, both)]
    return [machine.ids.index(match[1]) for match in found if match]


def test_four_nodes_of_one_gpu(world: Any, machine: NvidiaSmi, here: HereClient) -> None:
    project = world.project(WAITS, batchai=json.dumps({**json.loads(config(2)), "systemMetrics": 1}))
    first, second = here.submit(project), here.submit(project)
    assert printed(world, machine, first) == [0, 1]
    assert printed(world, machine, second) == [2, 3]
    third = here.submit(project)

    # Everything of the first dies at once, as in a power cut: agents, ranks, and who follows.
    mark, folder = world.plan(first)["job"], runs.tags_of(first)["batchai.folder"]
    for process in world.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.environ().get("BATCHAI_JOB", "").startswith(mark) or folder in " ".join(process.cmdline()):
                process.kill()
    assert printed(world, machine, third) == [0, 1]
    (world.root / "share" / "go").touch()
    for run, used in ((second, (2, 3)), (third, (0, 1))):
        metrics = ended(world, run).data.metrics
        for node, index in enumerate(used):
            said = {
                key.rpartition("/")[2]: value for key, value in metrics.items() if key.startswith(f"system/node-{node}/gpu_")
            }
            assert said["gpu_0_temperature_celsius"] == 40 + index and said["gpu_0_utilization_percentage"] == 10 * index
            assert {name[:6] for name in said} == {"gpu_0_"} and said["gpu_0_memory_usage_megabytes"] == 1048.6

    # The three that are left do.
    machine.lose(0)
    last = here.submit(project)
    assert printed(world, machine, last) == [1, 2]
    assert ended(world, last).info.status == "FINISHED"
