"""Whole jobs on four machines of their own: power, cables, firewalls, frozen nodes, GPUs, and Horovod between them."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from netns import Machines, Setup, unavailable
from ssh_world import HereClient, config, describe, ended, on_machines, running, until

from mlflow_batchai.follower import follower, retries, starting
from mlflow_batchai.plan import planning

pytestmark = [
    pytest.mark.skipif(unavailable() is not None, reason=unavailable() or ""),
    pytest.mark.timeout(200),
]

SLEEPS = "import time; print('up', flush=True); time.sleep(300)"
# Every rank listens at its node's own address of the list, calls all others, and tells which of them it has met.
MEETS = """
    import os, socket, threading
    hosts, rank, port = os.environ["AZ_BATCH_HOST_LIST"].split(","), int(os.environ["HOROVOD_RANK"]), 5077
    server = socket.create_server((hosts[rank], port))
    def answer():
        while True:
            with server.accept()[0] as caller:
                caller.sendall(b"%s %d" % (socket.gethostname().encode(), rank))
    threading.Thread(target=answer, daemon=True).start()
    def call(host):
        for _ in range(200):
            try:
                with socket.create_connection((host, port), 2) as connection:
                    return connection.recv(100).decode()
            except ConnectionRefusedError:
                threading.Event().wait(0.05)
    met = [call(host) for host in hosts]
    print(os.environ["HOROVOD_GLOO_IFACE"], met, flush=True)
    # Until all have met us.
    threading.Event().wait(1)
"""
NVIDIA_SMI = """#!/bin/sh
echo 'GPU 0: Tesla K80 (UUID: GPU-11111111-aaaa)'
echo 'GPU 1: Tesla K80 (UUID: GPU-22222222-bbbb)'
"""


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    root = tmp_path_factory.mktemp("netns")
    (root / "share").mkdir()
    with Machines(root, [Setup(share=root / "share")] * 4) as made:
        yield made


@pytest.fixture
def here(world: Any, machines: Machines, monkeypatch: pytest.MonkeyPatch) -> HereClient:
    """The client, with a cluster of all four."""
    describe(world, on_machines(machines, world), share=str(machines[0].setup.share))
    # The minute after which a silent node is lost would be too long for a test, and so are ten seconds for one that is off.
    monkeypatch.setattr(planning, "LOSS_SECONDS", 8.0)
    (world.root / ".ssh").mkdir()
    (world.root / ".ssh" / "config").write_text("Host *\n  ConnectTimeout 3\n")
    monkeypatch.setenv("HOME", str(world.root))
    return HereClient(world, monkeypatch)


def works(world: Any, here: HereClient, nodes: int) -> None:
    """The next job gets its nodes at once."""
    run = here.submit(world.project("print('mine')", name="next", batchai=config(nodes)))
    assert ended(world, run).info.status == "FINISHED"


def test_ranks_meet_at_the_host_list(world: Any, machines: Machines, here: HereClient) -> None:
    run = ended(world, here.submit(world.project(MEETS, batchai=config(4))))
    assert run.info.status == "FINISHED", run.data.tags
    met = [f"{machine.hostname} {rank}" for rank, machine in enumerate(machines)]
    for rank in range(4):
        assert world.log(f"stdout-{rank}.txt", run) == f"eth0 {met}\n"


def test_node_0_loses_its_power(world: Any, machines: Machines, here: HereClient) -> None:
    """Nobody is left who could say so but the follower: it does."""
    run = here.submit(world.project(SLEEPS, batchai=config(4)))
    running(world, 4)
    machines[0].power_off()
    began = time.monotonic()
    try:
        run = ended(world, run, 110)
    finally:
        machines[0].power_on()
    assert run.info.status == "FAILED" and run.data.tags["batchai.errorCode"] == "NodeLost"
    assert "node-0 was lost" in run.data.tags["batchai.reason"] and machines[0].address in run.data.tags["batchai.reason"]
    assert time.monotonic() - began < 90
    world.wait_gone()
    works(world, here, 4)


def test_a_job_goes_on_without_a_node(
    world: Any, machines: Machines, here: HereClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``minNodes``: the next attempt is on the nodes that answer, with fewer ranks; one that is off is given time to end its own."""
    monkeypatch.setattr(retries, "ENDING_SECONDS", 0.0)
    monkeypatch.setattr(retries, "FENCE_MARGIN_SECONDS", 2.0)
    script = """
        import os, time
        print("up", flush=True)
        time.sleep(300 if os.environ["BATCHAI_ATTEMPT"] == "1" else 0)
    """
    followed: list[Any] = []

    def follow(submitted: Any) -> None:
        # Here, where its patience can be shortened.
        followed.append(threading.Thread(target=follower.follow, args=(submitted.job, submitted.tracking), daemon=True))
        followed[0].start()

    monkeypatch.setattr(starting, "start_follower", follow)
    document = {**json.loads(config(4)), "retries": 1, "minNodes": 2, "terminateGrace": "PT1S"}
    run = here.submit(world.project(script, batchai=json.dumps(document)))
    running(world, 4)
    machines[1].power_off()
    try:
        run = ended(world, run, 120)
    finally:
        machines[1].power_on()
    assert (run.info.status, run.data.tags["batchai.attempt"]) == ("FINISHED", "2"), run.data.tags
    assert "attempt 1 ended: node-1" in run.data.tags["batchai.notes"]
    assert sorted(world.log("attempt-2/stdout.txt", run).splitlines()) == ["[0] up", "[1] up", "[2] up"]
    hosts = [
        json.loads(file.read_text().splitlines()[0])["host"]
        for file in world.folder(run).glob("batchai/attempts/2/nodes/*/announce.json")
    ]
    assert len(hosts) == 3 and machines[1].hostname not in hosts
    followed[0].join(60)
    world.wait_gone()


def test_a_node_is_rebooted(world: Any, machines: Machines, here: HereClient) -> None:
    run = here.submit(world.project(SLEEPS, batchai=config(3)))
    running(world, 3)
    machines[1].power_off()
    machines[1].power_on()
    run = ended(world, run, 90)
    assert run.info.status == "FAILED" and run.data.tags["batchai.errorCode"] == "NodeLost"
    assert run.data.tags["batchai.reason"].startswith("node-1 ")
    world.wait_gone()
    works(world, here, 4)


def test_a_frozen_node(world: Any, machines: Machines, here: HereClient) -> None:
    """It says nothing any more: the job ends without it, the others are free, and it ends its part when it goes on."""
    run = here.submit(world.project(SLEEPS, batchai=config(3)))
    running(world, 3)
    machines[2].freeze()
    try:
        run = ended(world, run, 90)
        until(world, lambda: not [left for machine in list(machines)[:2] for left in machine.processes()])
        assert machines[2].processes()
    finally:
        machines[2].thaw()
    assert run.info.status == "FAILED" and run.data.tags["batchai.errorCode"] == "NodeLost"
    assert run.data.tags["batchai.reason"].startswith("node-2 has not been heard of")
    assert machines[2].address in run.data.tags["batchai.notes"] and "may go on" in run.data.tags["batchai.notes"]
    world.wait_gone()
    works(world, here, 4)


def test_an_unplugged_node(world: Any, machines: Machines, here: HereClient) -> None:
    """The client can't ask it, but the share tells all that counts: the job goes on and succeeds, with a note."""
    script = """
        import os, time
        print("up", flush=True)
        while not os.path.exists(os.environ["AZ_BATCHAI_SHARED_JOB_TEMP"] + "/go"):
            time.sleep(0.05)
    """
    run = here.submit(world.project(script, batchai=config(3)))
    running(world, 3)
    machines[2].unplug()
    try:
        (world.folder(run) / "shared" / "go").touch()
        run = ended(world, run, 90)
        assert run.info.status == "FINISHED"
        assert machines[2].address in run.data.tags["batchai.notes"]
    finally:
        machines[2].plug()
    # What answered the client there has not heard that it is gone; it ends after five minutes without a question.
    world.wait(lambda: {process.pid for process in world.processes()} <= world.serving())
    for process in world.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_a_firewall_before_node_0(world: Any, machines: Machines, here: HereClient) -> None:
    machines[0].block(machines[2])
    try:
        run = ended(world, here.submit(world.project(SLEEPS, batchai=config(3))))
    finally:
        machines[0].unblock(machines[2])
    assert run.info.status == "FAILED"
    reason = run.data.tags["batchai.reason"]
    assert re.search(r"node-2 \(bnode3\) can't reach node-0 \(bnode1\) at 10\.77\.", reason), reason
    assert re.search(r"open TCP ports \d+-\d+ on node-0 \(bnode1\)", reason), reason
    world.wait_gone()


def test_gpus(world: Any, machines: Machines, here: HereClient) -> None:
    """Two a node, by a stand-in for nvidia-smi: a GPU a rank, and no more ranks than GPUs unless the document says so."""
    programs = [machine.install("nvidia-smi", NVIDIA_SMI) for machine in list(machines)[:2]]
    look = """
        import os
        print(*(os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "AZ_BATCHAI_NUM_GPUS", "HOROVOD_LOCAL_RANK")))
    """
    try:
        project = world.project(look, batchai=config(2, horovodSettings={"processCount": 4}))
        run = ended(world, here.submit(project))
        one, two = "GPU-11111111-aaaa", "GPU-22222222-bbbb"
        printed = [f"[0] {one} 2 0", f"[1] {two} 2 1", f"[2] {one} 2 0", f"[3] {two} 2 1"]
        assert sorted(world.log(run=run).splitlines()) == printed
        project = world.project(look, batchai=config(2, horovodSettings={"processCount": 5}))
        run = ended(world, here.submit(project))
        assert run.info.status == "FAILED"
        assert "processCount is 5 and the nodes have 4 GPUs (node-0: 2, node-1: 2)" in run.data.tags["batchai.reason"]
        describe(world, on_machines(machines, world), share=str(machines[0].setup.share), oversubscribe=True)
        run = ended(world, here.submit(project))
        assert run.info.status == "FINISHED" and len(world.log(run=run).splitlines()) == 5
    finally:
        for program in programs:
            program.unlink()
