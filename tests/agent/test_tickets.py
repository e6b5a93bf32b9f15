"""The ticket book, with real processes: distinct rising numbers, one order on all nodes, and nodes free only when they are."""

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
from booking import take
from waiting import wait_for

from mlflow_batchai.agent import processes, tickets


@pytest.fixture
def roots(tmp_path: Path) -> list[str]:
    return [str(tmp_path / "nodes" / str(index)) for index in range(3)]


@pytest.fixture
def book(tmp_path: Path) -> str:
    """A book whose numbers begin with 1."""
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "book.json").write_text('{"next": 1, "tickets": []}')
    return str(tmp_path / "book")


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs Python code in a process of its own; it says ``ready`` when it is, and is ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str) -> subprocess.Popen[str]:
        prelude = "import os, subprocess, sys, time\nfrom mlflow_batchai.agent import tickets\n"
        process = subprocess.Popen([sys.executable, "-c", prelude + code, *arguments], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout and process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


CLAIM = "file = tickets.claim(sys.argv[1], int(sys.argv[2]), time.time()); print('ready', flush=True); time.sleep(600)"


def test_many_processes_take_at_once(book: str, roots: list[str]) -> None:
    code = "import json, sys; from booking import take; print(json.dumps(take(sys.argv[1], sys.argv[4:], sys.argv[2], int(sys.argv[3]))))"
    argv = [sys.executable, "-c", code, book]
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    started = [
        subprocess.Popen([*argv, f"job{number}", str(number % 3 + 1), *roots], stdout=subprocess.PIPE, text=True, env=here)
        for number in range(8)
    ]
    taken = [json.loads(process.communicate()[0]) for process in started]
    assert sorted(ticket["number"] for ticket in taken) == list(range(1, 9))
    # One order: on every node, each ticket stands behind exactly the earlier ones there.
    for ticket in taken:
        for index in ticket["nodes"]:
            earlier = [other["number"] for other in taken if other["number"] < ticket["number"] and index in other["nodes"]]
            assert ticket["after"][index] == sorted(earlier)


def test_nodes_with_the_fewest_jobs_are_taken(book: str, roots: list[str]) -> None:
    first = take(book, roots, "a", 1, now=100)
    assert (first["number"], first["nodes"], first["after"]) == (1, ["0"], {"0": []})
    assert take(book, roots, "b", 1, now=101)["nodes"] == ["1"]
    both = take(book, roots, "c", 2, now=102)
    assert (both["nodes"], both["after"]) == (["0", "2"], {"0": [1], "2": []})
    assert take(book, roots, "d", 3, now=103)["after"] == {"0": [1, 3], "1": [2], "2": [3]}


def test_nodes_with_one_id_are_refused(book: str) -> None:
    with pytest.raises(tickets.BookError, match="3 nodes are wanted of 2 that have different ids"):
        tickets.take(book, ["x", "y", "x"], "a", 3, {})
    assert tickets.listing(book) == []


def test_a_lost_book_gives_no_number_twice(book: str, roots: list[str]) -> None:
    """Its tickets' files are still on the nodes, and old numbers would be taken for ended ones."""
    now = time.time()
    os.unlink(book + "/book.json")
    first = take(book, roots, "a", 1, now=now - 5)
    os.unlink(book + "/book.json")
    assert take(book, roots, "b", 1, now=now)["number"] > first["number"]


def test_asked_again_for_the_same_job_gives_the_same_ticket(book: str, roots: list[str]) -> None:
    take(book, roots, "a", 1, now=100)
    first = take(book, roots, "b", 2, now=101)
    take(book, roots, "c", 2, now=102)
    again = take(book, roots, "b", 2, now=103)
    assert again == {**first, "age": 2}


def test_nodes_that_left_the_cluster_keep_no_ticket_for_ever(book: str, roots: list[str]) -> None:
    tickets.take(book, ["left"], "a", 1, {}, now=100)
    take(book, roots, "b", 1, now=200)
    assert [ticket["job"] for ticket in tickets.listing(book, 300)] == ["a", "b"]
    take(book, roots, "c", 1, now=100 + tickets.FORGET_SECONDS + 1)
    assert [ticket["job"] for ticket in tickets.listing(book, 300)] == ["c"]


def test_an_agent_that_never_came_is_given_up(book: str, roots: list[str]) -> None:
    given_up = tickets.ARRIVAL_SECONDS + tickets.MARGIN_SECONDS
    take(book, roots[:1], "a", 1, now=100)
    assert take(book, roots[:1], "b", 1, now=100 + given_up - 0.1)["after"] == {"0": [1]}
    root, taken = roots[0], 5000.0
    assert tickets.predecessors(root, [1], taken, taken + given_up - 0.1) == [1]
    assert tickets.predecessors(root, [1], taken, taken + given_up) == []
    later = take(book, roots[:1], "c", 1, now=100 + given_up)
    assert (later["number"], later["after"]) == (3, {"0": [2]})
    # A clock that was set back by a second gives nobody up.
    assert tickets.state(root, 3, taken, taken - 1) == "waiting"


def test_who_comes_late_gives_up(roots: list[str]) -> None:
    root = roots[0]
    with pytest.raises(tickets.LateError, match="ticket was taken"):
        tickets.claim(root, 1, 100, clock=lambda: 100 + tickets.ARRIVAL_SECONDS)
    assert tickets.state(root, 1, 100, 100) == "ended"
    with tickets.claim(root, 2, 100, clock=lambda: 100 + tickets.ARRIVAL_SECONDS - 0.1):
        assert tickets.state(root, 2, 100, 1e9) == "held"


def test_a_ticket_has_one_agent(roots: list[str]) -> None:
    root = roots[0]
    with tickets.claim(root, 1, 100, clock=lambda: 100):
        for _ in range(2):
            with pytest.raises(tickets.TwinError, match="the ticket 1 has its agent already"):
                tickets.claim(root, 1, 100, clock=lambda: 100)
        assert os.listdir(root + "/tickets") == ["1"]
    with pytest.raises(tickets.TwinError):
        tickets.claim(root, 1, 100, clock=lambda: 100)


def test_a_ticket_is_never_seen_free_before_it_is_held(roots: list[str]) -> None:
    """Claimed many times while another thread of control looks: waiting, then held, never ended."""
    root = roots[0]
    moment = time.time()
    code = (
        "from mlflow_batchai.agent import tickets; import sys, time\n"
        "kept = [tickets.claim(sys.argv[1], number, time.time()) for number in range(300)]\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, root], stdin=subprocess.PIPE)
    try:
        for number in range(300):
            while (seen := tickets.state(root, number, moment, moment)) == "waiting":
                assert process.poll() is None
            assert seen == "held"
    finally:
        process.communicate()


def test_tickets_end_with_their_agents(book: str, roots: list[str], spawn: Callable[..., subprocess.Popen[str]]) -> None:
    first = take(book, roots, "a", 2)
    agents = [spawn(CLAIM, roots[int(index)], str(first["number"])) for index in first["nodes"]]
    now = time.time() + 1000
    assert [tickets.state(root, 1, 0, now) for root in roots] == ["held", "held", "ended"]
    assert take(book, roots[:2], "b", 2, now=now)["after"] == {"0": [1], "1": [1]}
    agents[0].kill()
    agents[0].wait()
    # Ended on one node: nobody waits for it there, though the ticket lives on the other.
    third = take(book, roots[:2], "c", 2, now=now)
    assert third["after"] == {"0": [2], "1": [1, 2]}
    agents[1].kill()
    agents[1].wait()
    assert take(book, roots[:2], "d", 1, now=now + 1000)["after"] == {"0": []}


def test_drop(book: str, roots: list[str]) -> None:
    take(book, roots, "a", 1, now=100)
    tickets.drop(book, 1, "other")
    assert [ticket["job"] for ticket in tickets.listing(book, 100)] == ["a"]
    tickets.drop(book, 1, "a")
    tickets.drop(book, 77, "a")
    assert take(book, roots, "b", 1, now=100) == {
        "number": 2,
        "job": "b",
        "folder": "",
        "nodes": ["0"],
        "after": {"0": []},
        "age": 0,
    }


def test_the_node_is_free_when_the_last_rank_is_gone(roots: list[str], spawn: Callable[..., subprocess.Popen[str]]) -> None:
    """The agent is killed: its ticket is free at once, the node only when the rank that inherited the lock has gone."""
    root = roots[0]
    code = """
held = tickets.claim(sys.argv[1], 1, time.time())
agent_lock, lock = tickets.open_agent_lock(sys.argv[1]), tickets.open_node_lock(sys.argv[1])
assert tickets.try_lock(agent_lock) and tickets.try_lock(lock)
rank = subprocess.Popen(["sleep", "600"], pass_fds=[lock], start_new_session=True, stdout=subprocess.DEVNULL)
open(sys.argv[1] + "/rank", "w").write(str(rank.pid))
print("ready", flush=True)
time.sleep(600)
"""
    agent = spawn(code, root)
    rank = int(Path(root, "rank").read_text())
    ours, agents = tickets.open_node_lock(root), tickets.open_agent_lock(root)
    try:
        assert tickets.state(root, 1, 0, 0) == "held"
        assert not tickets.try_lock(ours) and not tickets.try_lock(agents)
        # We have the file open too, and don't hold its lock.
        assert processes.lock_holders(tickets.lock_path(root)) == {agent.pid, rank}
        agent.kill()
        agent.wait()
        assert tickets.state(root, 1, 0, 0) == "ended"
        assert tickets.try_lock(agents) and not tickets.try_lock(ours)
        assert processes.lock_holders(tickets.lock_path(root)) == {rank}
        os.kill(rank, signal.SIGKILL)
        assert wait_for(lambda: tickets.try_lock(ours))
        assert processes.lock_holders(tickets.lock_path(root)) == set()  # ourselves don't count
    finally:
        os.close(ours)
        os.close(agents)
        if processes.start_time(rank):
            os.kill(rank, signal.SIGKILL)


def test_locks_of_other_files_are_not_taken_for_the_nodes(tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    code = (
        "lock = tickets.open_node_lock(sys.argv[1]); assert tickets.try_lock(lock); print('ready', flush=True); time.sleep(600)"
    )
    holders = [spawn(code, str(tmp_path / name)) for name in ("a", "b c")]
    os.symlink(tmp_path / "a", tmp_path / "link")
    assert processes.lock_holders(str(tmp_path / "a" / "lock")) == {holders[0].pid}
    assert processes.lock_holders(str(tmp_path / "link" / "lock")) == {holders[0].pid}
    assert processes.lock_holders(str(tmp_path / "b c" / "lock")) == {holders[1].pid}
    assert processes.lock_holders(str(tmp_path / "none")) == set()


def test_owner_and_state(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert tickets.owner(root) is None
    tickets.set_owner(root, "job with spaces/1", 3)
    assert tickets.owner(root) == ("job with spaces/1", 3)
    for text in ("", "x", "x y", "\n"):
        (tmp_path / "owner").write_text(text)
        assert tickets.owner(root) is None


def test_old_tickets_are_forgotten(roots: list[str]) -> None:
    root = roots[0]
    now = time.time()
    tickets.claim(root, 1, now).close()
    tickets.set_state(root, 1, "{}")
    with tickets.claim(root, 2, now):
        tickets.forget_ended(root, now + 3600)
        assert sorted(os.listdir(root + "/tickets")) == ["1", "1.state", "2"]
        tickets.forget_ended(root, now + 86500)
        assert os.listdir(root + "/tickets") == ["2"]
    assert tickets.state(root, 1, now, now + 86500) == "ended"
