"""Ranks are placed and numbered exactly as Horovod's own launcher would."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import bare_plan

from mlflow_batchai.agent.attempt import ranks
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
    assert not ranks.needs_rendezvous(plan)
    found = ranks.rank_variables(plan, slots[0], {"address": "a", "port": 0}, "lo")
    assert found == {"BATCHAI_RANK!": "0", "BATCHAI_SIZE!": "1"}
    # What it starts itself may use every GPU.
    assert ranks.slots_per_node(plan, [2, 2, 0]) == [2, 2, 0]


def test_variables_of_a_rank() -> None:
    plan = bare_plan(framework="horovod", process_count=3, node_count=2)
    assert ranks.slots_per_node(plan, [0, 0]) == [2, 1]
    slot = ranks.slots_of(plan, [0, 0])[2]
    found = ranks.rank_variables(plan, slot, {"address": "10.0.0.4", "port": 4711}, None)
    sizes = {"RANK": 2, "SIZE": 3, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": 1, "CROSS_SIZE": 2}
    server = {
        "GLOO_RENDEZVOUS_ADDR": "10.0.0.4",
        "GLOO_RENDEZVOUS_PORT": "4711",
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
    }
    assert found == {
        "BATCHAI_RANK!": "2",
        "BATCHAI_SIZE!": "3",
        "HOROVOD_HOSTNAME!": "node-1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
        **{f"HOROVOD_{name}!": str(value) for name, value in {**sizes, **server}.items()},
    }
    assert ranks.rank_variables(plan, slot, {"address": "a", "port": 1}, "eth0")["HOROVOD_GLOO_IFACE"] == "eth0"


def test_hostfile() -> None:
    assert ranks.hostfile(["a", "b"], [3, 0]) == "a slots=3\nb slots=1\n"
