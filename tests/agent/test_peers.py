"""How long an agent waits for its peers at the end, by a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlflow_batchai.agent import peers
from mlflow_batchai.agent.peers import Peers

PLAN = SimpleNamespace(node_count=2, loss_seconds=60.0, terminate_seconds=5.0)


class Silent(Peers):
    """Node 0's peers, of which none says anything any more.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 100.0
        layout: Any = SimpleNamespace(plan=PLAN, node=0, node_id="node-0")
        shipper: Any = SimpleNamespace(inbox=SimpleNamespace(verdict=None), trouble=None)
        super().__init__(layout, shipper, clock=lambda: self.now)

    def all_ended(self) -> bool:
        return False

    def failures(self) -> list[Any]:
        return []

    def pump(self) -> None:
        self.now += 0.25


@pytest.fixture
def silent() -> Silent:
    return Silent()


def test_exits_are_awaited_for_the_whole_time(silent: Silent) -> None:
    silent.await_exits(silent.pump)
    assert silent.now == 100.0 + 60.0 + 5.0 + peers.LAST_WORDS_SECONDS


@pytest.mark.parametrize("told", [0.0, 10.0])
def test_after_a_sigterm_until_their_time_is_over(silent: Silent, told: float) -> None:
    """Even if it comes in the middle; peers that were told at the same moment have finished before."""

    def pump() -> None:
        if silent.now >= 100.0 + told:
            silent.on_sigterm()
        silent.pump()

    silent.await_exits(pump)
    assert silent.now == 100.0 + told + peers.TERMINATION_SECONDS - peers.EXITS_REST
    assert peers.PEERS_REST - peers.EXITS_REST >= 3.0  # signals and files take a moment
