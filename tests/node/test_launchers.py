"""Ranks are placed and numbered exactly as Horovod's own launcher would."""

from __future__ import annotations

import pytest

from mlflow_batchai.node import launchers
from mlflow_batchai.node.layout import node_id

TABLE = [(processes, nodes) for nodes in (1, 2, 3, 4, 7) for processes in (1, 2, 3, 4, 5, 8, 9, 16, 29)]


@pytest.mark.parametrize(("processes", "nodes"), TABLE)
def test_slots_are_horovod_s(processes: int, nodes: int) -> None:
    hosts = pytest.importorskip("horovod.runner.common.util.hosts")
    sizes = launchers.spread(processes, nodes)
    text = ",".join(f"{node_id(node)}:{size}" for node, size in enumerate(sizes) if size)
    theirs = hosts.get_host_assignments(hosts.parse_hosts(text), processes)
    ours = launchers.assign(processes, nodes)
    assert [
        (node_id(slot.node), slot.rank, slot.size, slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size)
        for slot in ours
    ] == [
        (slot.hostname, slot.rank, slot.size, slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size)
        for slot in theirs
    ]


@pytest.mark.parametrize(
    ("processes", "nodes", "sizes"), [(8, 2, [4, 4]), (5, 2, [3, 2]), (1, 3, [1, 0, 0]), (3, 3, [1, 1, 1]), (7, 3, [3, 2, 2])]
)
def test_spread(processes: int, nodes: int, sizes: list[int]) -> None:
    assert launchers.spread(processes, nodes) == sizes


def test_custom_runs_once_on_node_zero() -> None:
    plan = {"framework": "custom", "processCount": 1, "nodeCount": 3}
    assert launchers.slots_of(plan) == [launchers.Slot(0, 1, 0, 0, 1, 0, 1)]
    assert not launchers.needs_rendezvous(plan)
    assert launchers.rank_variables(plan, launchers.slots_of(plan)[0], {"address": "a", "port": 0}, "lo") == {
        "BATCHAI_RANK!": "0",
        "BATCHAI_SIZE!": "1",
    }


def test_variables_of_a_rank() -> None:
    plan = {"framework": "horovod", "processCount": 3, "nodeCount": 2}
    slot = launchers.slots_of(plan)[2]
    found = launchers.rank_variables(plan, slot, {"address": "10.0.0.4", "port": 4711}, None)
    assert found == {
        "BATCHAI_RANK!": "2",
        "BATCHAI_SIZE!": "3",
        "HOROVOD_HOSTNAME!": "node-1",
        "HOROVOD_RANK!": "2",
        "HOROVOD_SIZE!": "3",
        "HOROVOD_LOCAL_RANK!": "0",
        "HOROVOD_LOCAL_SIZE!": "1",
        "HOROVOD_CROSS_RANK!": "1",
        "HOROVOD_CROSS_SIZE!": "2",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR!": "10.0.0.4",
        "HOROVOD_GLOO_RENDEZVOUS_PORT!": "4711",
        "HOROVOD_CONTROLLER!": "gloo",
        "HOROVOD_CPU_OPERATIONS!": "gloo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
    }
    assert launchers.rank_variables(plan, slot, {"address": "a", "port": 1}, "eth0")["HOROVOD_GLOO_IFACE"] == "eth0"


def test_hostfile() -> None:
    assert launchers.hostfile(["a", "b"], [3, 0]) == "a slots=3\nb slots=1\n"
