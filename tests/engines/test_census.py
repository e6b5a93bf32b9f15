"""The census of a cluster: from nodes' answers, and with real agents on this machine and over SSH."""

from __future__ import annotations

from typing import Any

import pytest
from sshd import SshNodes
from test_engine_conformance import queued_site as site  # noqa: F401 (a fixture)
from waiting import wait_for

from mlflow_batchai.engines.census import NodeState, Place, work_out
from mlflow_batchai.errors import ClusterError


def answer(index: int, closed: bool = False, **agents: str) -> dict[str, Any]:
    return {"id": f"id{index}", "drained": closed, "agents": {name[1:]: state for name, state in agents.items()}}


def entry(number: int, *nodes: int, age: float = 1000.0) -> dict[str, Any]:
    return {"number": number, "job": f"j{number}/1", "folder": f"jobs/{number}", "nodes": [f"id{n}" for n in nodes], "age": age}


@pytest.mark.parametrize(
    ("answers", "book", "states", "queue"),
    [
        ([answer(0), answer(1)], [], ["idle", "idle"], []),
        ([answer(0, _1="held"), answer(1)], [entry(1, 0)], ["running", "idle"], [(1, True)]),
        # It has one of its nodes and waits for the other.
        (
            [answer(0, _1="held", _2="waiting"), answer(1, _2="held")],
            [entry(1, 0), entry(2, 0, 1)],
            ["running", "preparing"],
            [(1, True), (2, False)],
        ),
        # Its turn has come, and it is just taking the node.
        ([answer(0, _1="ended", _2="waiting")], [entry(1, 0), entry(2, 0)], ["preparing"], [(2, False)]),
        ([answer(0, True, _1="held"), answer(1, True)], [entry(1, 0)], ["leaving", "closed"], [(1, True)]),
        ([answer(0, True, _1="waiting")], [entry(1, 0)], ["closed"], [(1, False)]),
        # Its agent hasn't come yet, and its agent never came.
        ([answer(0)], [entry(1, 0, age=1.0)], ["idle"], [(1, False)]),
        ([answer(0)], [entry(1, 0)], ["idle"], []),
        # A node that can't be asked says nothing of its jobs; the others do.
        ([answer(0, _1="held"), ClusterError("it is off")], [entry(1, 0, 1)], ["running", "unusable"], [(1, True)]),
        ([ClusterError("it is off")], [entry(1, 0)], ["unusable"], []),
        # Of a job that is in another book, or in none any more.
        ([answer(0, _7="held")], [], ["running"], []),
    ],
)
def test_states(answers: list[Any], book: list[Any], states: list[str], queue: list[tuple[int, bool]]) -> None:
    places = [Place(str(index), "127.0.0.1", None) for index in range(len(answers))]
    found = work_out(places, answers, [""] * len(answers), book)
    assert [node.state.value for node in found.nodes] == states
    assert [(reservation.number, reservation.started) for reservation in found.reservations] == queue


def test_a_node_that_lacks_something_is_unusable_unless_it_runs_a_job() -> None:
    places = [Place(str(index), "127.0.0.1", None) for index in range(3)]
    answers = [answer(0, _1="held"), answer(1), answer(2, True)]
    found = work_out(places, answers, ["its disk is full"] * 3, [entry(1, 0)])
    assert [node.state for node in found.nodes] == [NodeState.RUNNING, NodeState.UNUSABLE, NodeState.CLOSED]
    assert (found.nodes[0].reservation, found.nodes[1].why) == (1, "its disk is full")


def states(site: Any) -> list[str]:  # noqa: F811
    return [node.state.value for node in site.engine.census().nodes]


def test_nodes_are_counted_and_closed(site: Any) -> None:  # noqa: F811
    """1: what they do just now. 2: what waits takes only nodes that are open."""
    assert states(site) == ["idle", "idle"]
    first = site.job("sleep 600", nodes=2)
    one = site.engine.submit(first)
    wait_for(lambda: states(site) == ["running", "running"])
    site.engine.admit(1)
    assert states(site) == ["running", "leaving"]
    second = site.job("sleep 600")
    two = site.engine.submit(second)
    reservations = site.engine.census().reservations
    assert [(reservation.mark, reservation.folder, reservation.nodes, reservation.started) for reservation in reservations] == [
        (first.mark, first.folder, (0, 1), True),
        (second.mark, second.folder, (0,), False),
    ]
    site.engine.cancel(one)
    wait_for(lambda: states(site) == ["running", "closed"])
    third = site.job("true", nodes=2)
    three = site.engine.submit(third)
    site.engine.cancel(two)
    wait_for(lambda: states(site) == ["preparing", "closed"])
    site.another_process().admit(2)
    wait_for(lambda: site.state(third).ended)
    assert site.state(third).execution_state == "succeeded"
    site.engine.cancel(three)
    wait_for(lambda: states(site) == ["idle", "idle"])


def test_a_machine_that_is_down_is_unusable(tmp_path: Any, ssh_servers: SshNodes) -> None:
    from test_engine_conformance import SshSite

    site = SshSite(tmp_path, ssh_servers)  # noqa: F811
    ssh_servers[1].stop()
    try:
        found = site.engine.census()
        assert [node.state.value for node in found.nodes] == ["idle", "unusable"]
        assert "refused the connection" in found.nodes[1].why
        assert (found.nodes[0].place.address, found.nodes[0].place.port) == (ssh_servers[0].address, ssh_servers[0].port)
        with pytest.raises(ClusterError, match="refused the connection"):
            site.engine.admit(0)
    finally:
        ssh_servers[1].start()
    assert states(site) == ["closed", "idle"]
    ssh_servers[0].stop()
    try:
        # It keeps the queue.
        found = site.engine.census()
        assert [node.state.value for node in found.nodes] == ["unusable", "idle"] and "refused the connection" in found.trouble
    finally:
        ssh_servers[0].start()
    site.engine.admit(2)
    site.close()
