"""Samples of nodes as points: steps go on over attempts, damaged values are counted, a replay gives the same run."""

from __future__ import annotations

from typing import Any

import pytest
from relay_world import Crash, history

from mlflow_batchai.job.metrics import SampleFold


def sample(number: int, node: int = 0, t: Any = 7, **values: Any) -> dict[str, Any]:
    return {"k": "system", "t": t, "node": node, "n": number, "v": values}


def test_names_steps_and_times() -> None:
    fold = SampleFold(2)
    records = [sample(0, cpu=1), {"k": "beat"}, sample(0, 1, t=8, cpu=2.5, **{"a b\n/../c": 3, "": 4})]
    assert [tuple(point) for point in fold.feed(records)] == [
        ("system/node-0/cpu", 1.0, 7, 0),
        ("system/node-1/cpu", 2.5, 8, 0),
        ("system/node-1/a b_/__/c", 3.0, 8, 0),  # as MLflow takes it
        ("system/node-1", 4.0, 8, 0),
    ]


def test_the_next_attempt_goes_on() -> None:
    first = SampleFold(2)
    first.feed([sample(0, cpu=1), sample(1, cpu=1), sample(0, 1, cpu=1)])
    # A crash in the same attempt changes nothing; the next attempt starts behind it, whoever folds it.
    again = SampleFold(2, first.remember())
    assert [point.step for point in again.feed([sample(2, cpu=1)])] == [2]
    second = SampleFold(2, again.remember(), same_attempt=False)
    assert [point.step for point in second.feed([sample(0, cpu=1), sample(0, 1, cpu=1)])] == [3, 1]
    third = SampleFold(2, second.remember())
    assert [point.step for point in third.feed([sample(1, cpu=1), sample(1, 1, cpu=1)])] == [4, 2]


@pytest.mark.parametrize("value", [None, "1", True, [1], float("nan"), float("inf"), 2**70])
def test_what_is_no_number_or_of_no_node_is_counted(value: Any) -> None:
    fold = SampleFold(1)
    assert [tuple(point) for point in fold.feed([sample(0, cpu=value, gpu=1)])] == [("system/node-0/gpu", 1.0, 7, 0)]
    assert fold.feed([sample(0, 1, cpu=1, gpu=1), sample(2**63 - 1, cpu=1)]) == []
    assert fold.unread == 4
    assert SampleFold(1, fold.remember()).unread == 4


def test_a_relay_that_dies_is_made_up_for(relayed: Any) -> None:
    made, client, relay = relayed
    made.segment(0, sample(0, cpu=1), sample(1, cpu=2))
    first = relay()
    assert first.step() == 1
    made.segment(1, sample(2, cpu=3), sample("x", cpu=3), sample(3, cpu="x"))
    client.after["log_batch"] = [Crash()]
    with pytest.raises(Crash):
        first.step()
    client.dead = False
    made.verdict()
    relay().finish(made.job.state())
    run_id = made.plan["runId"]
    assert history(client, run_id) == {"system/node-0/cpu": [(0, 1.0, 7), (1, 2.0, 7), (2, 3.0, 7)]}
    notes = client.get_run(run_id).data.tags["batchai.notes"]
    assert "1 metric values were no numbers" in notes and "1 lines" in notes
