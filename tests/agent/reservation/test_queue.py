"""The queue, with real processes: distinct rising numbers, one order on all nodes, and nodes free only when they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from booking import reserve
from waiting import wait_for

from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.reservation import agents, locks, queue, reservations


@pytest.fixture
def roots(tmp_path: Path) -> list[str]:
    return [str(tmp_path / "nodes" / str(index)) for index in range(3)]


@pytest.fixture
def book(tmp_path: Path) -> str:
    """The folder of a queue whose numbers begin with 1."""
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "book.json").write_text('{"next": 1, "tickets": []}')
    return str(tmp_path / "book")


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs Python code in a process of its own; it says ``ready`` when it is, and is ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str) -> subprocess.Popen[str]:
        prelude = "import os, subprocess, sys, time\nfrom mlflow_batchai.agent.reservation import agents, locks\n"
        process = subprocess.Popen([sys.executable, "-c", prelude + code, *arguments], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout and process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


CLAIM = "file = agents.claim(sys.argv[1], int(sys.argv[2]), time.time()); print('ready', flush=True); time.sleep(600)"


def test_many_processes_reserve_at_once(book: str, roots: list[str]) -> None:
    code = "import json, sys; from booking import reserve; print(json.dumps(reserve(sys.argv[1], sys.argv[4:], sys.argv[2], int(sys.argv[3]))))"
    argv = [sys.executable, "-c", code, book]
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    started = [
        subprocess.Popen([*argv, f"job{number}", str(number % 3 + 1), *roots], stdout=subprocess.PIPE, text=True, env=here)
        for number in range(8)
    ]
    taken = [json.loads(process.communicate()[0]) for process in started]
    assert sorted(entry["number"] for entry in taken) == list(range(1, 9))
    # One order: on every node, each reservation stands behind exactly the earlier ones there.
    for entry in taken:
        for index in entry["nodes"]:
            earlier = [other["number"] for other in taken if other["number"] < entry["number"] and index in other["nodes"]]
            assert entry["after"][index] == sorted(earlier)


def test_nodes_with_the_fewest_jobs_are_taken(book: str, roots: list[str]) -> None:
    first = reserve(book, roots, "a", 1, now=100)
    assert (first["number"], first["nodes"], first["after"]) == (1, ["0"], {"0": []})
    assert reserve(book, roots, "b", 1, now=101)["nodes"] == ["1"]
    both = reserve(book, roots, "c", 2, now=102)
    assert (both["nodes"], both["after"]) == (["0", "2"], {"0": [1], "2": []})
    assert reserve(book, roots, "d", 3, now=103)["after"] == {"0": [1, 3], "1": [2], "2": [3]}


def test_nodes_with_one_id_are_refused(book: str) -> None:
    with pytest.raises(queue.QueueError, match="3 nodes are wanted of 2 that have different ids"):
        queue.reserve(book, ["x", "y", "x"], "a", 3, {})
    assert queue.listing(book) == []


def test_a_lost_queue_gives_no_number_twice(book: str, roots: list[str]) -> None:
    now = time.time()
    os.unlink(book + "/book.json")
    first = reserve(book, roots, "a", 1, now=now - 5)
    os.unlink(book + "/book.json")
    assert reserve(book, roots, "b", 1, now=now)["number"] > first["number"]


def test_asked_again_for_the_same_job_gives_the_same_reservation(book: str, roots: list[str]) -> None:
    reserve(book, roots, "a", 1, now=100)
    first = reserve(book, roots, "b", 2, now=101)
    reserve(book, roots, "c", 2, now=102)
    again = reserve(book, roots, "b", 2, now=103)
    assert again == {**first, "age": 2}


def test_nodes_that_left_the_cluster_keep_no_reservation_for_ever(book: str, roots: list[str]) -> None:
    queue.reserve(book, ["left"], "a", 1, {}, now=100)
    reserve(book, roots, "b", 1, now=200)
    assert [entry["job"] for entry in queue.listing(book, 300)] == ["a", "b"]
    reserve(book, roots, "c", 1, now=100 + queue.FORGET_SECONDS + 1)
    assert [entry["job"] for entry in queue.listing(book, 300)] == ["c"]


def test_an_agent_that_never_came_is_given_up(book: str, roots: list[str]) -> None:
    given_up = agents.ARRIVAL_SECONDS + agents.MARGIN_SECONDS
    reserve(book, roots[:1], "a", 1, now=100)
    assert reserve(book, roots[:1], "b", 1, now=100 + given_up - 0.1)["after"] == {"0": [1]}
    root, taken = roots[0], 5000.0
    assert agents.before(root, [1], taken, taken + given_up - 0.1) == [1]
    assert agents.before(root, [1], taken, taken + given_up) == []
    later = reserve(book, roots[:1], "c", 1, now=100 + given_up)
    assert (later["number"], later["after"]) == (3, {"0": [2]})
    # A clock that was set back by a second gives nobody up.
    assert agents.state(root, 3, taken, taken - 1) == "waiting"


def test_who_comes_late_gives_up(roots: list[str]) -> None:
    root = roots[0]
    with pytest.raises(agents.LateError, match="the node was reserved"):
        agents.claim(root, 1, 100, clock=lambda: 100 + agents.ARRIVAL_SECONDS)
    assert agents.state(root, 1, 100, 100) == "ended"
    with agents.claim(root, 2, 100, clock=lambda: 100 + agents.ARRIVAL_SECONDS - 0.1):
        assert agents.state(root, 2, 100, 1e9) == "held"


def test_a_reservation_has_one_agent(roots: list[str]) -> None:
    root = roots[0]
    with agents.claim(root, 1, 100, clock=lambda: 100):
        for _ in range(2):
            with pytest.raises(agents.TwinError, match="the reservation 1 has its agent already"):
                agents.claim(root, 1, 100, clock=lambda: 100)
        assert os.listdir(root + "/tickets") == ["1"]
    with pytest.raises(agents.TwinError):
        agents.claim(root, 1, 100, clock=lambda: 100)


def test_a_reservation_is_never_seen_free_before_it_is_held(roots: list[str]) -> None:
    root = roots[0]
    moment = time.time()
    code = (
        "from mlflow_batchai.agent.reservation import agents; import sys, time\n"
        "kept = [agents.claim(sys.argv[1], number, time.time()) for number in range(300)]\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, root], stdin=subprocess.PIPE)
    try:
        for number in range(300):
            while (seen := agents.state(root, number, moment, moment)) == "waiting":
                assert process.poll() is None
            assert seen == "held"
    finally:
        process.communicate()


def test_reservations_end_with_their_agents(book: str, roots: list[str], spawn: Callable[..., subprocess.Popen[str]]) -> None:
    first = reserve(book, roots, "a", 2)
    processes = [spawn(CLAIM, roots[int(index)], str(first["number"])) for index in first["nodes"]]
    now = time.time() + 1000
    assert [agents.state(root, 1, 0, now) for root in roots] == ["held", "held", "ended"]
    assert reserve(book, roots[:2], "b", 2, now=now)["after"] == {"0": [1], "1": [1]}
    processes[0].kill()
    processes[0].wait()
    # Ended on one node: nobody waits for it there, though the reservation lives on the other.
    third = reserve(book, roots[:2], "c", 2, now=now)
    assert third["after"] == {"0": [2], "1": [1, 2]}
    processes[1].kill()
    processes[1].wait()
    assert reserve(book, roots[:2], "d", 1, now=now + 1000)["after"] == {"0": []}


def test_drop(book: str, roots: list[str]) -> None:
    reserve(book, roots, "a", 1, now=100)
    queue.drop(book, 1, "other")
    assert [entry["job"] for entry in queue.listing(book, 100)] == ["a"]
    queue.drop(book, 1, "a")
    queue.drop(book, 77, "a")
    fresh = {"number": 2, "job": "b", "folder": "", "nodes": ["0"], "after": {"0": []}, "age": 0}
    assert reserve(book, roots, "b", 1, now=100) == fresh


def test_the_node_is_free_when_the_last_rank_is_gone(roots: list[str], spawn: Callable[..., subprocess.Popen[str]]) -> None:
    """The agent is killed: its reservation is free at once, the node only when the rank that inherited the lock has gone."""
    root = roots[0]
    code = """
held = agents.claim(sys.argv[1], 1, time.time())
agent_lock, lock = locks.open_agent_lock(sys.argv[1]), locks.open_node_lock(sys.argv[1])
assert locks.try_lock(agent_lock) and locks.try_lock(lock)
rank = subprocess.Popen(["sleep", "600"], pass_fds=[lock], start_new_session=True, stdout=subprocess.DEVNULL)
open(sys.argv[1] + "/rank", "w").write(str(rank.pid))
print("ready", flush=True)
time.sleep(600)
"""
    agent = spawn(code, root)
    rank = int(Path(root, "rank").read_text())
    ours, agents_lock = locks.open_node_lock(root), locks.open_agent_lock(root)
    try:
        assert agents.state(root, 1, 0, 0) == "held"
        assert not locks.try_lock(ours) and not locks.try_lock(agents_lock)
        # We have the file open too, and don't hold its lock.
        assert proc.lock_holders(locks.lock_path(root)) == {agent.pid, rank}
        agent.kill()
        agent.wait()
        assert agents.state(root, 1, 0, 0) == "ended"
        assert locks.try_lock(agents_lock) and not locks.try_lock(ours)
        assert proc.lock_holders(locks.lock_path(root)) == {rank}
        os.kill(rank, signal.SIGKILL)
        assert wait_for(lambda: locks.try_lock(ours))
        assert proc.lock_holders(locks.lock_path(root)) == set()  # ourselves don't count
    finally:
        os.close(ours)
        os.close(agents_lock)
        if proc.start_time(rank):
            os.kill(rank, signal.SIGKILL)


def test_locks_of_other_files_are_not_taken_for_the_nodes(tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    code = "lock = locks.open_node_lock(sys.argv[1]); assert locks.try_lock(lock); print('ready', flush=True); time.sleep(600)"
    holders = [spawn(code, str(tmp_path / name)) for name in ("a", "b c")]
    os.symlink(tmp_path / "a", tmp_path / "link")
    assert proc.lock_holders(str(tmp_path / "a" / "lock")) == {holders[0].pid}
    assert proc.lock_holders(str(tmp_path / "link" / "lock")) == {holders[0].pid}
    assert proc.lock_holders(str(tmp_path / "b c" / "lock")) == {holders[1].pid}
    assert proc.lock_holders(str(tmp_path / "none")) == set()


def test_who_holds_a_lock_is_seen_while_it_opens_and_closes_other_files(
    tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    code = """
def some():
    return [os.open(os.devnull, os.O_RDONLY) for _ in range(400)]
before = some()
lock = locks.open_node_lock(sys.argv[1])
assert locks.try_lock(lock)
print("ready", flush=True)
while True:
    for each in before:
        os.close(each)
    before = some()
"""
    holder = spawn(code, str(tmp_path))
    assert all(proc.lock_holders(str(tmp_path / "lock")) == {holder.pid} for _ in range(30))


def test_owner_and_state(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert reservations.owner(root) is None
    reservations.set_owner(root, "job with spaces/1", 3)
    assert reservations.owner(root) == ("job with spaces/1", 3)
    for text in ("", "x", "x y", "\n"):
        (tmp_path / "owner").write_text(text)
        assert reservations.owner(root) is None


@pytest.mark.parametrize(
    ("name", "days", "stays"),
    [
        ("7.agent", 31, False),
        ("7.agent.lock", 31, False),
        ("7.4711", 31, False),
        ("7.agent", 29, True),
        ("12.agent", 99, True),
        ("odd", 99, True),
    ],
)
def test_what_agents_that_never_came_have_left(tmp_path: Path, name: str, days: float, stays: bool) -> None:
    now = time.time()
    with agents.claim(str(tmp_path), 12, now):
        path = tmp_path / "tickets" / name
        path.touch()
        os.utime(path, (now, now - days * 86400))
        agents.forget_ended(str(tmp_path), now)
        assert path.exists() is stays


def test_old_reservations_are_forgotten(roots: list[str]) -> None:
    root = roots[0]
    now = time.time()
    agents.claim(root, 1, now).close()
    agents.report(root, 1, {})
    with agents.claim(root, 2, now):
        agents.forget_ended(root, now + 3600)
        assert sorted(os.listdir(root + "/tickets")) == ["1", "1.state", "2"]
        agents.forget_ended(root, now + 86500)
        assert os.listdir(root + "/tickets") == ["2"]
    assert agents.state(root, 1, now, now + 86500) == "ended"
