"""Records that nobody waits for: with others, in place of a heartbeat, and all of them at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import wait_for

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.share import mounted
from mlflow_batchai.agent.transport import shipper
from mlflow_batchai.agent.transport.shipper import MOST, MOST_AT_ONCE, Shipper, Unhurried


def test_they_wait_for_a_while() -> None:
    now = [0.0]
    queue = Unhurried(lambda: now[0])
    queue.add("system", n=0)
    now[0] = 9.0
    queue.add("system", n=1)
    assert queue.take(10.0) == []
    now[0] = 10.0
    assert [record["n"] for record in queue.take(10.0)] == [0, 1]
    assert queue.take() == []
    for number in range(MOST + 5):
        queue.add("system", n=number)
    assert [record["n"] for record in queue.take()] == list(range(5, 5 + MOST_AT_ONCE)), "the oldest are given up"


@pytest.fixture
def ship(make_layout: Callable[..., NodeLayout], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Shipper]]:
    made: list[Shipper] = []
    monkeypatch.setattr(shipper, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(mounted, "FLUSH_SECONDS", 0.05)

    def start(heartbeat: float, linger: float) -> Shipper:
        monkeypatch.setattr(mounted, "HEARTBEAT_SECONDS", heartbeat)
        layout = make_layout(0)
        layout.attempt.linger_seconds = linger
        made.append(Shipper(layout, []))
        made[-1].start()
        return made[-1]

    yield start
    for thread in made:
        assert thread.finish(60)


def kinds(thread: Shipper) -> list[list[str]]:
    """The kinds of records in each segment."""
    events = Path(thread._layout.control.where(thread._layout.paths.events))
    return [[record["k"] for record in protocol.decode(file.read_bytes())] for file in sorted(events.glob("*/*.jsonl"))]


def test_they_ride_along(ship: Callable[..., Shipper]) -> None:
    thread = ship(600.0, 600.0)
    wait_for(lambda: thread.sequence == 1)  # its first heartbeat
    thread.sample(n=0)
    thread.sample(n=1)
    thread.record("started", urgent=True)
    wait_for(lambda: thread.sequence == 2)
    thread.sample(n=2)
    assert thread.finish(60)
    assert kinds(thread) == [["beat"], ["started", "system", "system"], ["system"]]


def test_they_leave_in_place_of_a_heartbeat(ship: Callable[..., Shipper]) -> None:
    thread = ship(0.1, 0.0)
    wait_for(lambda: thread.sequence >= 1)
    thread.sample(n=0)
    wait_for(lambda: ["system"] in kinds(thread))


def test_where_a_segment_costs_requests_they_wait_longer(ship: Callable[..., Shipper]) -> None:
    thread = ship(0.05, 600.0)
    thread.sample(n=0)
    wait_for(lambda: thread.sequence >= 4)
    assert {kind for segment in kinds(thread) for kind in segment} == {"beat"}
