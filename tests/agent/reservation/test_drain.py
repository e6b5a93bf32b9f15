"""A drained node: what comes waits there and can be ended, what runs goes on; and what a node says of itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from booking import reserve
from node_world import Cluster
from waiting import wait_for

from mlflow_batchai.agent.api.host import census, drain
from mlflow_batchai.agent.outcome import Stop
from mlflow_batchai.agent.reservation import agents, locks, queue
from mlflow_batchai.agent.reservation.reservations import QueueReservation

HOLD = 'echo go; until [ -e "$AZ_BATCHAI_SHARED_JOB_TEMP/end" ]; do sleep 0.05; done'


def said(cluster: Cluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = census([str(root) for root in cluster.roots])["nodes"]
    return found


def test_an_agent_waits_until_its_node_takes_jobs(cluster: Cluster) -> None:
    root = str(cluster.roots[0])
    drain(root, True)
    drain(root, True)
    job = cluster.submit("echo done")
    wait_for(lambda: "takes no jobs until its cluster grows" in job.log("execution.log"))
    number = str(job.reservation["number"])
    assert [(node["drained"], node["agents"]) for node in said(cluster)] == [(True, {number: "waiting"}), (False, {})]
    drain(root, False)
    drain(root, False)
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert not agents.is_drained(root)


def test_what_runs_on_a_node_that_is_drained_goes_on(cluster: Cluster) -> None:
    job = cluster.submit(HOLD)
    wait_for(lambda: job.log("stdout.txt"))
    drain(str(cluster.roots[0]), True)
    later = cluster.submit("echo later")
    assert later.reservation["nodes"] == ["1"]
    assert later.wait()["executionState"] == "succeeded"
    (job.share / job.plan.folder / "shared" / "end").touch()
    assert job.wait()["executionState"] == "succeeded", job.said()


def test_drained_nodes_are_taken_last(tmp_path: Path) -> None:
    book, roots = str(tmp_path / "book"), [str(tmp_path / str(index)) for index in range(3)]
    reserve(book, roots, "a", 1, now=100)
    names = ["0", "1", "2"]
    first = queue.reserve(book, names, "b", 1, {}, 100, drained=["1", "2"], job_folder="jobs/b")
    assert (first["nodes"], first["folder"]) == (["0"], "jobs/b")
    assert queue.reserve(book, names, "c", 2, {}, 100, drained=["1", "2"])["nodes"] == ["0", "1"]
    assert [entry["folder"] for entry in queue.listing(book, 100)] == ["", "jobs/b", ""]


def test_a_queue_of_an_earlier_version(tmp_path: Path) -> None:
    (tmp_path / "book.json").write_text('{"next": 2, "tickets": [{"number": 1, "job": "j/1", "nodes": ["0"], "taken": 100}]}')
    assert queue.listing(str(tmp_path), 101) == [{"number": 1, "job": "j/1", "folder": "", "nodes": ["0"], "age": 1}]


def test_a_node_that_is_drained_while_it_is_taken(tmp_path: Path) -> None:
    """Who drains it has seen an agent that waits, so it has to go on waiting, and holds up nobody meanwhile."""
    root, told = str(tmp_path), []

    class Reservation(QueueReservation):
        def report(self, state: str, failure: Any = None) -> None:
            told.append(state)
            if told == ["waiting", "held"]:
                drain(root, True)

    def check() -> None:
        for path in (tmp_path / "lock", tmp_path / "agent.lock"):
            with path.open() as file:
                assert locks.try_lock(file.fileno())
        drain(root, False)

    layout: Any = SimpleNamespace(root=root, mark="j/1", node=0)
    reservation = Reservation(root, {"number": 1, "after": [], "taken": time.time()})
    (lock,) = reservation.acquire(layout, lambda text: None, check)
    os.close(lock)
    reservation._file.close()
    assert told == ["waiting", "held", "waiting", "held"]


def test_an_end_is_heeded_while_leftovers_are_ended(tmp_path: Path) -> None:
    """They have seconds to end by themselves, and these don't."""
    root = str(tmp_path)
    lock = locks.open_node_lock(root)
    assert locks.try_lock(lock)
    code = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True)); print(1, flush=True); time.sleep(60)"
    left = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True, pass_fds=[lock])
    os.close(lock)
    assert left.stdout and left.stdout.readline()
    asked: list[str] = []

    def check() -> None:
        assert left.stdout
        if noted and not asked:
            asked.append(left.stdout.readline())
            raise Stop("cancel", "enough")

    noted: list[str] = []
    layout: Any = SimpleNamespace(root=root, mark="j/1", node=0)
    reservation = QueueReservation(root, {"number": 1, "after": [], "taken": time.time()})
    begun = time.monotonic()
    try:
        with pytest.raises(Stop):
            reservation.acquire(layout, noted.append, check)
        assert time.monotonic() - begun < 4
        assert (noted, asked) == (["ending what the job before us left on this node"], ["asked\n"])
        assert left.poll() is None
    finally:
        left.kill()
        left.communicate()
        reservation._file.close()
