"""Ranks are placed and numbered exactly as Horovod's own launcher would."""

from __future__ import annotations

import operator
import socket
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import bare_plan

from mlflow_batchai.agent.attempt import frameworks, ranks
from mlflow_batchai.agent.layout import node_id

TABLE = [(processes, nodes) for nodes in (1, 2, 3, 4, 7) for processes in (1, 2, 3, 4, 5, 8, 9, 16, 29)]


@pytest.mark.parametrize(("processes", "nodes"), TABLE)
def test_slots_are_horovod_s(processes: int, nodes: int) -> None:
    hosts = pytest.importorskip("horovod.runner.common.util.hosts")
    sizes = ranks.spread(processes, [0] * nodes)
    text = ",".join(f"{node_id(node)}:{size}" for node, size in enumerate(sizes) if size)
    theirs = hosts.get_host_assignments(hosts.parse_hosts(text), processes)
    ours = ranks.assign(sizes)
    fields = operator.attrgetter("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    assert [(node_id(slot.node), fields(slot)) for slot in ours] == [(slot.hostname, fields(slot)) for slot in theirs]


@pytest.mark.parametrize(
    ("processes", "gpus", "sizes"),
    [
        # No GPUs: ranks share the cores, as many as are asked for.
        (8, [0, 0], [4, 4]),
        (5, [0, 0], [3, 2]),
        (1, [0, 0, 0], [1, 0, 0]),
        (7, [0, 0, 0], [3, 2, 2]),
        # Never more than a node has, else as even as can be.
        (8, [4, 4], [4, 4]),
        (6, [4, 4], [3, 3]),
        (5, [4, 4], [3, 2]),
        (6, [4, 2], [4, 2]),
        (5, [4, 2], [3, 2]),
        (4, [1, 4, 2], [1, 2, 1]),
        (6, [1, 4, 2], [1, 3, 2]),
        (2, [4, 0, 4], [1, 0, 1]),
        (4, [0, 4], [0, 4]),
        # Shared: every GPU once, then again.
        (8, [4, 2], [5, 3]),
        (13, [4, 2], [9, 4]),
        (3, [1, 0], [3, 0]),
    ],
)
def test_spread(processes: int, gpus: list[int], sizes: list[int]) -> None:
    assert ranks.spread(processes, gpus) == sizes


@settings(deadline=None, derandomize=True, database=None)
@given(processes=st.integers(1, 40), gpus=st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_any_spread(processes: int, gpus: list[int]) -> None:
    sizes = ranks.spread(processes, gpus)
    assert sum(sizes) == processes
    if processes <= sum(gpus):
        assert all(size <= count for size, count in zip(sizes, gpus, strict=True))
        # Who has room has at most one less than any other.
        assert all(size >= max(sizes) - 1 for size, count in zip(sizes, gpus, strict=True) if size < count)
    assert [slot.rank for slot in ranks.assign(sizes)] == list(range(processes))


HOSTS = ["gpu-a", "gpu-b", "gpu-c"]


@pytest.mark.parametrize(
    ("processes", "gpus", "sentence"),
    [
        (6, [4, 2], None),
        (99, [0, 0], None),
        (8, [4, 2], "processCount is 8 and the nodes have 6 GPUs (node-0: 4, node-1: 2): lower processCount, or set oversub"),
        (8, [4, 0], "processCount is 8 and the nodes have 4 GPUs (node-0: 4, node-1: 0): lower processCount, or set oversub"),
    ],
)
def test_more_ranks_than_gpus(processes: int, gpus: list[int], sentence: str | None) -> None:
    plan = bare_plan(framework="horovod", process_count=processes, oversubscribe=False)
    refused = ranks.refusal(plan, gpus, HOSTS)
    assert refused is None if sentence is None else refused and refused.startswith(sentence)
    assert not refused or ("; node-1 (gpu-b): no GPU, and so no rank" in refused) == (gpus == [4, 0])
    assert ranks.refusal(replace(plan, oversubscribe=True), gpus, HOSTS) is None
    assert ranks.refusal(replace(plan, framework="custom"), gpus, HOSTS) is None


def test_nodes_that_get_nothing_to_do() -> None:
    plan = bare_plan(framework="horovod", process_count=4)
    assert (ranks.without_gpus(plan, [4, 0], HOSTS) or "").startswith("node-1 (gpu-b): no GPU, and so no rank")
    assert ranks.without_gpus(plan, [0, 0], HOSTS) is ranks.without_gpus(plan, [2, 2], HOSTS) is None
    assert ranks.without_gpus(bare_plan(), [4, 0], HOSTS) is None


def test_gpus_that_no_rank_uses() -> None:
    plan = bare_plan(framework="horovod", process_count=2)
    assert ranks.idle_gpus(plan, [4, 4]) == "2 rank(s) use 2 of 8 GPUs: set horovodSettings.processCount to 8 to use all"
    assert ranks.idle_gpus(plan, [1, 1]) is None is ranks.idle_gpus(replace(plan, framework="custom"), [4, 4])


def test_custom_runs_once_on_node_zero() -> None:
    plan = bare_plan(framework="custom", process_count=1, node_count=3)
    slots = ranks.slots_of(plan, [2, 2, 0])
    assert slots == [ranks.Slot(0, 1, 0, 0, 1, 0, 1)]
    assert frameworks.of("custom").variables(plan, slots[0], {"address": "a", "port": 0}, "lo", 2) == {}
    # What it starts itself may use every GPU.
    assert ranks.slots_per_node(plan, [2, 2, 0]) == [2, 2, 0]


def test_variables_of_a_rank() -> None:
    plan = bare_plan(framework="horovod", process_count=3, node_count=2)
    assert ranks.slots_per_node(plan, [0, 0]) == [2, 1]
    slot = ranks.slots_of(plan, [0, 0])[2]
    horovod = frameworks.of("horovod")
    found = horovod.variables(plan, slot, {"address": "10.0.0.4", "port": 4711}, None, 0)
    sizes = {"RANK": 2, "SIZE": 3, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": 1, "CROSS_SIZE": 2}
    server = {
        "GLOO_RENDEZVOUS_ADDR": "10.0.0.4",
        "GLOO_RENDEZVOUS_PORT": 4711,
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
    }
    assert found == {
        "HOROVOD_HOSTNAME!": "node-1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": 60,
        **{f"HOROVOD_{name}!": value for name, value in {**sizes, **server}.items()},
    }
    assert horovod.variables(plan, slot, {"address": "a", "port": 1}, "eth0", 0)["HOROVOD_GLOO_IFACE"] == "eth0"


def test_variables_of_a_rank_of_pytorch() -> None:
    plan = bare_plan(framework="pytorch", process_count=3, node_count=2, attempt=2, retries=4)
    slot = ranks.slots_of(plan, [0, 0])[2]
    pytorch = frameworks.of("pytorch")
    found = pytorch.variables(plan, slot, {"address": "10.0.0.4", "port": 4711}, "eth0", 0)
    torchrun = {"RANK": 2, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 1, "GROUP_WORLD_SIZE": 2}
    assert torchrun.items() <= {name.rstrip("!"): value for name, value in found.items()}.items()
    assert (found["MASTER_ADDR!"], found["MASTER_PORT!"]) == ("10.0.0.4", 4711)
    assert (found["TORCHELASTIC_RESTART_COUNT!"], found["TORCHELASTIC_MAX_RESTARTS!"]) == (1, 4)
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("eth0", "=eth0")
    batchai = {name[11:]: value for name, value in found.items() if name.startswith("AZ_BATCHAI_")}
    assert batchai == {"PYTORCH_INIT_METHOD": "tcp://10.0.0.4:4711", "PYTORCH_BACKEND": "gloo", "TASK_INDEX": 2}
    assert set(batchai) == set(pytorch.service_names)
    for asked, gpus, told in (("", 4, "nccl"), ("gloo", 4, "gloo"), ("mpi", 0, "mpi")):
        found = pytorch.variables(replace(plan, communication_backend=asked), slot, {"address": "a", "port": 1}, None, gpus)
        assert found["AZ_BATCHAI_PYTORCH_BACKEND"] == told and "GLOO_SOCKET_IFNAME" not in found


def test_the_port_of_pytorch_is_rank_zero_s_alone() -> None:
    pytorch = frameworks.of("pytorch")
    address, port = pytorch.serve(["10.0.0.4", "10.0.0.5"], [0, 2], lambda arguments: 0)
    assert address == "10.0.0.5"
    with pytest.raises(OSError), socket.socket() as other:
        other.bind(("", port))
    with pytorch.held, socket.create_server(("", port)):
        pass


def test_hostfile() -> None:
    assert ranks.hostfile(["a", "b"], [3, 0]) == "a slots=3\nb slots=1\n"
