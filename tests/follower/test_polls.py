"""Jobs of one cluster are polled together, and each gets its own answer."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from mlflow_batchai.engines.base import Poll, PollState
from mlflow_batchai.errors import ClusterError
from mlflow_batchai.follower import polls


class Asked:
    """An engine that remembers what it was asked together."""

    def __init__(self):
        self.batches, self.closed, self.broken = [], 0, None

    def poll_all(self, handles):
        self.batches.append(len(handles))
        if self.broken:
            raise self.broken
        return [Poll(PollState.QUEUED, handle["mark"]) for handle in handles]

    def close(self):
        self.closed += 1


@pytest.fixture
def cluster(monkeypatch):
    made = SimpleNamespace(name="c", document={"nodes": 2}, record=None, engine=Asked())
    monkeypatch.setattr(polls.clusters, "load", lambda name: (SimpleNamespace(**{**vars(made), "engine": Asked()}), []))
    return made


def at_once(poll, count):
    found = {}

    def ask(number):
        try:
            found[number] = poll({"mark": str(number)}).detail
        except ClusterError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_those_who_ask_at_one_moment_are_one_question(cluster, monkeypatch):
    monkeypatch.setattr(polls, "GATHER_SECONDS", 1.0)
    with polls.shared("c") as one, polls.shared("c") as other:
        assert one is other
        assert at_once(one.poll, 20) == {number: str(number) for number in range(20)}
        engine = one.cluster.engine
        assert engine.batches == [20]
        engine.broken = ClusterError("no route")
        assert at_once(one.poll, 3) == dict.fromkeys(range(3), "no route")
        assert engine.closed == 0
    assert engine.closed == 1


def test_a_cluster_that_is_described_otherwise_by_now_is_asked_apart(cluster):
    with polls.shared("c") as one:
        cluster.document = {"nodes": 3}
        with polls.shared("c") as other:
            assert one is not other
        assert other.cluster.engine.closed == 1 and one.cluster.engine.closed == 0
