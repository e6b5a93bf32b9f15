"""Agents ask a (stand-in) nvidia-smi, spread the ranks over what all of them found, and give every rank its own GPU."""

from __future__ import annotations

import os
import re
import socket
from typing import Any

from node_world import Cluster, Job

SHOW = (
    "echo $BATCHAI_RANK/$BATCHAI_SIZE on ${HOROVOD_HOSTNAME-none}: ${CUDA_VISIBLE_DEVICES-unset} ${CUDA_DEVICE_ORDER-unset}"
    " of $AZ_BATCHAI_NUM_GPUS"
)
HOST = socket.gethostname()


def gpu(node: int, index: int) -> str:
    return f"GPU-{os.getpid():08x}-{node}-{index}"


def on_path(cluster: Cluster, counts: list[int]) -> list[list[str]]:
    """What gives each agent an nvidia-smi of so many GPUs."""
    enter = []
    for node, count in enumerate(counts):
        tool = cluster.folder / f"smi-{node}" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        lines = "".join(f"GPU {index}: Toy (UUID: {gpu(node, index)})\n" for index in range(count))
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}END\n")
        tool.chmod(0o755)
        enter.append(["env", f"PATH={tool.parent}:{os.environ['PATH']}"])
    return enter


def shown(job: Job) -> list[str]:
    """What each rank printed, in rank order; of a GPU its index on the node."""
    said = re.sub(r"GPU-\w{8}-\d-(\d)", r"\1", job.log("stdout.txt"))
    lines = [line.partition("] ")[2] or line for line in said.splitlines()]
    return sorted(lines)


def run(cluster: Cluster, counts: list[int], command: str = SHOW, **changes: Any) -> Job:
    job = cluster.submit(command, nodes=2, enter=on_path(cluster, counts), **{"gpusPerNode": None, **changes})
    assert job.wait()["executionState"] == "succeeded", job.said()
    return job


def test_every_rank_has_its_own(cluster: Cluster) -> None:
    job = run(
        cluster, [2, 1], SHOW + '; cat "$AZ_BATCHAI_MPI_HOST_FILE" >&2', ranks=3, preparation="echo $AZ_BATCHAI_NUM_GPUS GPUs"
    )
    assert shown(job) == [
        "0/3 on node-0: 0 PCI_BUS_ID of 2",
        "1/3 on node-0: 1 PCI_BUS_ID of 2",
        "2/3 on node-1: 0 PCI_BUS_ID of 1",
    ]
    assert job.log("stderr-0.txt") == "127.0.0.1 slots=2\n127.0.0.1 slots=1\n"
    assert [job.log(f"stdout-job_prep-node-{node}.txt") for node in (0, 1)] == ["2 GPUs\n", "1 GPUs\n"]
    assert f"GPUs: {gpu(0, 0)}, {gpu(0, 1)} (nvidia-smi -L); cores: " in job.log("execution-node-0.log")


def test_more_ranks_than_gpus_are_refused_unless_they_may_share(cluster: Cluster) -> None:
    refused = cluster.submit(SHOW, nodes=2, enter=on_path(cluster, [2, 1]), gpusPerNode=None, ranks=4, preparation="echo begun")
    verdict = refused.wait()
    assert verdict["errors"][0]["code"] == "NodeSetupFailed", refused.said()
    assert verdict["reason"].startswith("processCount is 4 and the nodes have 3 GPUs (node-0: 2, node-1: 1): ")
    assert refused.log("stdout-job_prep-node-0.txt") == ""
    assert shown(run(cluster, [2, 1], ranks=5, oversubscribe=True)) == [
        "0/5 on node-0: 0 PCI_BUS_ID of 2",
        "1/5 on node-0: 1 PCI_BUS_ID of 2",
        "2/5 on node-0: 0 PCI_BUS_ID of 2",
        "3/5 on node-1: 0 PCI_BUS_ID of 1",
        "4/5 on node-1: 0 PCI_BUS_ID of 1",
    ]


def test_the_document_has_the_last_word(cluster: Cluster) -> None:
    """Also where ranks choose by their local rank, as under horovodrun: there all ranks of a node see all of its GPUs."""
    chosen = [{"name": "CUDA_VISIBLE_DEVICES", "value": "$BATCHAI_NODE_GPUS"}]
    assert shown(run(cluster, [2, 1], SHOW + " ${HOROVOD_LOCAL_RANK-}", ranks=3, environmentVariables=chosen)) == [
        "0/3 on node-0: 0,1 PCI_BUS_ID of 2 0",
        "1/3 on node-0: 0,1 PCI_BUS_ID of 2 1",
        "2/3 on node-1: 0 PCI_BUS_ID of 1 0",
    ]
    # A command that starts ranks itself sees all.
    job = run(cluster, [3, 2], SHOW + '; cat "$AZ_BATCHAI_MPI_HOST_FILE" >&2', ranks=1)
    assert shown(job) == ["0/1 on none: 0,1,2 PCI_BUS_ID of 3"]
    assert job.log("stderr.txt") == "127.0.0.1 slots=3\n127.0.0.1 slots=2\n"
    # On CPUs, whatever the machine has.
    assert shown(run(cluster, [1, 1], gpusPerNode=0))[1] == "1/2 on node-1: unset of 0"


def test_a_node_without_a_gpu_among_others_is_told_of(cluster: Cluster) -> None:
    job = run(cluster, [0, 2], ranks=2)
    assert shown(job) == [f"{rank}/2 on node-1: {rank} PCI_BUS_ID of 2" for rank in (0, 1)]
    assert f"node-0 ({HOST}): no GPU, and so no rank, where other nodes" in job.log("stderr-job_prep-node-0.txt")


def test_nodes_that_are_parts_of_one_machine(cluster: Cluster) -> None:
    # Both ask the same machine.
    enter = on_path(cluster, [3])[:1] * 2
    job = cluster.submit(SHOW + " $OMP_NUM_THREADS", nodes=2, enter=enter, parts=True, gpusPerNode=None)
    assert job.wait()["executionState"] == "succeeded", job.said()
    cores = max(1, len(os.sched_getaffinity(0)) // 2)
    assert shown(job) == [f"0/2 on node-0: 0 PCI_BUS_ID of 2 {cores}", f"1/2 on node-1: 2 PCI_BUS_ID of 1 {cores}"]
