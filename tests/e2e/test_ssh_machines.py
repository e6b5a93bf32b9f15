"""Whole jobs on four machines of their own: power, cables, frozen nodes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from netns import Machines, Setup, unavailable
from ssh_world import HereClient, config, describe, ended, on_machines, running

from mlflow_batchai.follower import follower, retries, starting
from mlflow_batchai.plan import planning

pytestmark = [
    pytest.mark.skipif(unavailable() is not None, reason=unavailable() or ""),
    pytest.mark.timeout(200),
]

SLEEPS = "import time; print('up', flush=True); time.sleep(300)"


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
