"""The pace at which an agent looks at the index: quick while there is news, rare while there is none; with a clock of its own."""

from __future__ import annotations

import pytest

from mlflow_batchai.agent.share.base import ENDING, GATHERING, QUEUED, RUNNING, STARTING
from mlflow_batchai.agent.share.index import PACES, Index

TICK = 0.25


class Wall:
    """What is put up, who looks when, and a clock."""

    def __init__(self, node: int, peers: int = 9) -> None:
        self.now = 1000.0
        self.markers: dict[str, int] = {}
        self.looks: list[float] = []
        self.failing = False
        self.index = Index(self.listing, node, lambda name: not name.startswith("beats-"), peers, lambda: self.now)

    def listing(self) -> dict[str, int]:
        self.looks.append(self.now)
        if self.failing:
            raise OSError("not now")
        return dict(self.markers)

    def run(self, seconds: float) -> list[float]:
        """How long it took from look to look, in so many seconds of ticks."""
        del self.looks[:-1]
        until = self.now + seconds
        while self.now < until:
            try:
                self.index.look()
            except OSError:
                assert self.failing
            self.now += TICK
        return [after - before for before, after in zip(self.looks, self.looks[1:], strict=False)]


@pytest.mark.parametrize(("node", "idle"), [(0, 4.0), (3, 18.0)])
@pytest.mark.parametrize("phase", [QUEUED, RUNNING])
def test_an_idle_agent_looks_rarely(node: int, idle: float, phase: str) -> None:
    wall = Wall(node)
    wall.index.pace(phase)
    waits = wall.run(200)
    assert waits == sorted(waits) and waits[0] <= PACES[phase][min(node, 1)].news * 1.5 + TICK
    assert set(waits[-3:]) == {idle}
    # Heartbeats are no news.
    for number in range(20):
        wall.markers["beats-agent-1"] = number
        assert set(wall.run(idle * 2)) == {idle}
    assert wall.index.count("beats-agent-1") == 19


@pytest.mark.parametrize(("peers", "idle"), [(1, 4.0), (3, 6.0), (9, 18.0), (99, 18.0)])
def test_the_fewer_they_are_the_more_often_each_looks(peers: int, idle: float) -> None:
    wall = Wall(1, peers)
    wall.index.pace(RUNNING)
    assert set(wall.run(200)[-3:]) == {idle}


def test_news_make_it_look_again_soon() -> None:
    wall = Wall(0)
    wall.index.pace(RUNNING)
    wall.run(60)
    assert wall.index.interval == 4.0
    wall.markers["segments-agent-1"] = 1
    assert wall.run(20)[:4] == [4.0, 1.0, 1.5, 2.25]
    for number in range(2, 12):
        wall.markers["segments-agent-1"] = number
        waits = wall.run(1.0)
    assert waits == [1.0]


@pytest.mark.parametrize("node", [0, 5])
@pytest.mark.parametrize("phase", [STARTING, ENDING])
def test_it_is_never_slow_while_others_wait(node: int, phase: str) -> None:
    wall = Wall(node)
    wall.run(120)
    wall.index.pace(phase)
    begun = wall.now
    waits = wall.run(60)
    assert wall.looks[1] - begun <= 0.5, "however long it was to wait before"
    assert max(waits[1:]) == 2.0
    wall.index.pace(GATHERING)
    assert max(wall.run(300)) == (4.0 if node == 0 else 8.0)


def test_a_look_that_failed_is_made_again_at_its_time() -> None:
    wall = Wall(0)
    wall.index.pace(RUNNING)
    wall.markers["exit-1"] = 0
    wall.run(60)
    looked = wall.index.looked
    wall.failing = True
    assert set(wall.run(20)) == {4.0}
    assert wall.index.has("exit-1") and wall.index.looked == looked
    wall.failing = False
    wall.run(5)
    assert wall.index.looked > looked
