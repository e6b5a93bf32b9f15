"""Agents in network stacks of their own use the interfaces by which they reach node 0, or say why one doesn't reach it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from closed_file import read_closed
from islands import Islands
from netns import unavailable
from node_world import Cluster, Job, PlanMaker, python39
from waiting import wait_for

SAY = 'echo "$HOROVOD_GLOO_IFACE $AZ_BATCH_HOST_LIST $HOROVOD_GLOO_RENDEZVOUS_ADDR $(cut -d" " -f1 "$AZ_BATCHAI_MPI_HOST_FILE" | xargs)"'
LOOPBACK = "lo 127.0.0.1,127.0.0.1 127.0.0.1 127.0.0.1 127.0.0.1"

apart = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.fixture
def make_islands(tmp_path: Path) -> Iterator[Callable[[int], Islands]]:
    made: list[Islands] = []

    def make(count: int) -> Islands:
        made.append(Islands(tmp_path, count))
        return made[-1]

    yield make
    for islands in made:
        islands.close()


@pytest.fixture
def on(tmp_path: Path, make_plan: PlanMaker, agent_pyz: Path) -> Iterator[Callable[..., Job]]:
    """Starts a job of so many nodes with its agents on islands; ``training`` stands for the cluster's ``python``."""
    made: list[Cluster] = []

    def start(islands: Islands, count: int, command: str = SAY, training: str = "", **changes: Any) -> Job:
        folder = tmp_path / "cluster"
        folder.mkdir()
        cluster = Cluster(folder, make_plan, agent_pyz, nodes=count)
        made.append(cluster)
        if training:
            (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec "{training}" "$@"\n')
        enter = [islands[node].enter for node in range(count)]
        return cluster.submit(command, nodes=count, enter=enter, **changes)

    yield start
    for cluster in made:
        cluster.close()


def said(job: Job) -> list[str]:
    """What each rank said, when the job has succeeded."""
    verdict = job.wait()
    assert verdict["executionState"] == "succeeded", job.said()
    return [job.log(f"stdout-{rank}.txt").strip() for rank in range(job.plan.ranks)]


def reason(job: Job) -> str:
    """Why all nodes ended the job, which is one cause with our code."""
    verdict = job.wait()
    assert [error["code"] for error in verdict["errors"]] == ["NetworkFailed"], job.said()
    assert job.log("stdout.txt") == ""
    assert job.processes() == set()
    return str(verdict["reason"])


def test_on_one_machine_nothing_is_tried(cluster: Cluster) -> None:
    job = cluster.submit(SAY, nodes=2)
    assert said(job) == [LOOPBACK] * 2
    assert job.records("reached") == []
    assert not (job.share / job.paths.network).exists()


def test_a_named_interface_counts_on_one_machine_too(cluster: Cluster) -> None:
    assert said(cluster.submit(SAY, nodes=2, networkInterface="lo")) == [LOOPBACK] * 2
    assert " has no network interface ib7; it has lo (127.0.0.1)" in reason(cluster.submit("true", networkInterface="ib7"))


@apart
def test_four_nodes_find_the_network_that_connects_them(make_islands: Callable[[int], Islands], on: Callable[..., Job]) -> None:
    """An unconnected network comes first, Docker's bridge has the same address everywhere, hostnames are 127.0.1.1."""
    islands = make_islands(4)
    islands.connect("mgmt0", [f"192.168.9.{number}/24" for number in range(1, 5)], cut=True)
    for number in range(4):
        islands[number].ip("link add name docker0 type bridge")
        islands[number].ip("address add 172.17.0.1/16 dev docker0")
        islands[number].ip("link set docker0 up")
    islands.connect("eth1", [f"10.0.0.{number}/24" for number in range(1, 5)])
    addresses = "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4"
    job = on(islands, 4)
    assert said(job) == [f"eth1 {addresses} 10.0.0.1 {addresses.replace(',', ' ')}"] * 4
    announces = [read_closed(str(job.share / job.paths.announce(node))) for node in range(4)]
    assert [announce and announce["host"] for announce in announces] == [f"island-{number}" for number in range(4)]
    assert "network interface: eth1 (10.0.0.3)" in job.log("execution-node-2.log")


@apart
def test_each_node_has_its_own_name_for_the_network(make_islands: Callable[[int], Islands], on: Callable[..., Job]) -> None:
    """node-1's first interface leads elsewhere; node 0's other address answers nobody."""
    islands = make_islands(2)
    islands.connect("eth0", ["192.168.8.1/24", "192.168.7.1/24"], cut=True)
    islands.connect("net", ["10.0.0.1/24", "10.0.0.2/24"])
    islands[1].ip("link set net down")
    islands[1].ip("link set net name ens5")
    islands[1].ip("link set ens5 up")
    job = on(islands, 2, python=python39() or sys.executable)  # the oldest that a node may have
    assert [line.split()[0] for line in said(job)] == ["net", "ens5"]


@apart
def test_a_named_interface(make_islands: Callable[[int], Islands], on: Callable[..., Job]) -> None:
    islands = make_islands(2)
    islands.connect("eth0", ["10.0.0.1/24", "10.0.0.2/24"])
    islands.connect("ib0", ["10.1.0.1/24", "10.1.0.2/24"])
    assert said(on(islands, 2, networkInterface="ib0")) == ["ib0 10.1.0.1,10.1.0.2 10.1.0.1 10.1.0.1 10.1.0.2"] * 2


@apart
def test_a_named_interface_that_is_down_on_one_node(make_islands: Callable[[int], Islands], on: Callable[..., Job]) -> None:
    islands = make_islands(2)
    islands.connect("eth0", ["10.0.0.1/24", "10.0.0.2/24"])
    islands.connect("ib0", ["10.1.0.1/24", "10.1.0.2/24"])
    islands[1].ip("link set ib0 down")
    told = reason(on(islands, 2, networkInterface="ib0"))
    assert told.startswith(
        "node-1 (island-1) can't use its network interface ib0; it has lo (127.0.0.1), eth0 (10.0.0.2), ib0 (down)"
    )


@apart
def test_a_peer_that_drops_silently(make_islands: Callable[[int], Islands], on: Callable[..., Job]) -> None:
    islands = make_islands(3)
    islands.connect("eth0", ["10.0.0.1/24", "10.0.0.2/24", "10.0.0.3/24"])
    # Packets of node-2 to node-0 go to a card that nobody has; so do its answers.
    islands[2].ip("neigh replace 10.0.0.1 lladdr 02:00:00:00:00:99 dev eth0 nud permanent")
    islands[0].run("sh", "-c", "echo 40000 41000 > /proc/sys/net/ipv4/ip_local_port_range")
    started = time.monotonic()
    told = reason(on(islands, 3))
    assert told.startswith(
        "node-2 (island-2) can't reach node-0 (island-0) at 10.0.0.1 (eth0: no answer): open TCP ports 40000-41000"
    )
    assert time.monotonic() - started < 60.0  # the kernel would try for two minutes


@apart
def test_a_peer_that_is_rejected(make_islands: Callable[[int], Islands], on: Callable[..., Job]) -> None:
    islands = make_islands(2)
    islands.connect("eth0", ["10.0.0.1/24", "10.0.0.2/24"])
    islands.connect("eth1", ["10.9.0.1/24", "10.9.0.2/24"])
    islands[1].ip("route add prohibit 10.0.0.1")
    islands[1].ip("route add unreachable 10.9.0.1")
    told = reason(on(islands, 2))
    assert re.match(
        r"node-1 \(island-1\) can't reach node-0 \(island-0\) at 10.0.0.1 \(eth0: .+\), 10.9.0.1 \(eth1: .+\): open", told
    )


@apart
def test_a_cancel_while_addresses_are_tried(make_islands: Callable[[int], Islands], on: Callable[..., Job]) -> None:
    islands = make_islands(2)
    islands.connect("eth0", ["10.0.0.1/24", "10.0.0.2/24"], cut=True)
    job = on(islands, 2)
    wait_for(lambda: any(record["phase"] == "running" for record in job.records("phase")), what="all nodes are taken")
    job.cancel("me", "enough")
    verdict = job.wait()
    assert (verdict["terminated"], verdict["reason"]) == (True, "terminated by me: enough")
    assert job.log("stdout.txt") == ""


HOROVOD = """
import horovod.tensorflow as hvd
import tensorflow as tf
pair = hvd.ProcessSet([1, 2])
hvd.init(process_sets=[pair])
total = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum)
part = hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum, process_set=pair) if hvd.rank() else [0.0]
hvd.allreduce(tf.constant([0.0]))  # the first rank that ends takes Horovod down for all
print("rank", hvd.rank(), "of", hvd.size(), float(total[0]), float(part[0]))
"""


@apart
def test_horovod_over_the_network_that_was_found(make_islands: Callable[[int], Islands], on: Callable[..., Job]) -> None:
    """Its own rendezvous server, its ranks, and a process set, which has connections of its own."""
    islands = make_islands(2)
    islands.connect("mgmt0", ["192.168.9.1/24", "192.168.9.2/24"], cut=True)
    islands.connect("eth1", ["10.0.0.1/24", "10.0.0.2/24"])
    job = on(islands, 2, f"{sys.executable} -c '{HOROVOD}'", training=sys.executable, ranks=3)
    verdict = job.wait(90.0)
    assert verdict["executionState"] == "succeeded", job.said()
    assert sorted(job.log("stdout.txt").splitlines()) == [
        "[0] rank 0 of 3 6.0 0.0",
        "[1] rank 1 of 3 6.0 5.0",
        "[2] rank 2 of 3 6.0 5.0",
    ]
