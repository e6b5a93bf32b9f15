"""Training goes on from its newest checkpoint, also with another number of ranks; SIGTERM saves one."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from mlflow_batchai.training.checkpoints import Checkpoints

JOBS, ROOT = Path(__file__).parent / "jobs", Path(__file__).parents[2]
SETTINGS = {"a": 1}


class Results:
    """What the two ranks have left."""

    def __init__(self, folder, ended):
        self.folder, self.ended = folder, ended
        self.weights = [dict(np.load(folder / f"{rank}.npz")) for rank in (0, 1)]
        self.facts = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]

    def of(self, case, rank=0):
        """Return the weights of a case, then the state of its optimizer: iterations, learning rate, momentum."""
        found = {int(k.rpartition("/")[2]): w for k, w in self.weights[rank].items() if k.rpartition("/")[0] == case}
        values = [found[i] for i in sorted(found)]
        return values[:4], values[4:]


@pytest.fixture(scope="module")
def results(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    (example,) = [
        block for block in re.findall(r"^```python\n(.*?)^```", reference, re.S | re.M) if "CheckpointCallback" in block
    ]
    (folder / "example.py").write_text(example)
    ended = ranks(sys.executable, JOBS / "resume.py", folder, folder / "example.py")
    assert (folder / "1.json").exists(), ended[0].output[-3000:] + ended[1].output[-3000:]
    return Results(folder, ended)


def test_two_halves_are_the_whole(results):
    assert results.facts[0]["two"] == results.facts[1]["two"] == [2, 8]
    for rank in (0, 1):
        for whole, halves in zip(results.of("unbroken"), results.of("resumed", rank), strict=True):
            assert len(whole) == len(halves) > 0
            assert all(np.array_equal(one, other) for one, other in zip(whole, halves, strict=True))


def test_one_ranks_checkpoint_goes_on_on_two(results):
    saved, (steps, rate, *momentum) = results.of("one")
    weights, (steps_now, rate_now, *momentum_now) = results.of("restored")
    assert all(np.array_equal(a, b) for a, b in zip(saved, weights, strict=True))
    assert steps_now == steps and (rate, rate_now) == pytest.approx((0.05, 0.1))
    for a, b in zip(momentum, momentum_now, strict=True):
        assert b == pytest.approx(2 * a, rel=1e-6)
    for rank in (0, 1):
        assert results.facts[rank]["to two"] == [3, 3] and results.facts[rank]["to two trained"] == [3, 5]
    for a, b in zip(results.of("to two")[0], results.of("to two", 1)[0], strict=True):
        assert np.array_equal(a, b)


def test_a_damaged_checkpoint_costs_one_epoch(results):
    assert results.facts[0]["damaged"] == results.facts[1]["damaged"] == [3, 8]
    assert "checkpoint epoch-0004 in" in results.ended[0].output and "is not whole" in results.ended[0].output
    assert "is not whole" not in results.ended[1].output


def test_what_goes_on_from_where(results):
    for facts in results.facts:
        assert facts["done already"] == [4, 8], "training that was complete trains nothing"
        assert facts["example 0"] == [0, 8] and facts["example 1"] == [4, 8], "the documented script"
        assert "epoch-0004.weights.h5 doesn't fit this model (" in facts["misfit"] and "\n" not in facts["misfit"]
    # Another rank than 0 waits a minute for it.
    assert results.facts[1]["told 50 s ago"] is None and results.facts[1]["told 70 s ago"] == ["Told", ""]


def test_sigterm_saves_within_an_epoch_which_is_trained_again(results):
    facts = results.facts[0]
    assert facts["told 0"] == ["epoch-0002-batch-000002.json", "epoch-0002.json"]
    assert facts["told 1"] == ["epoch-0002-batch-000002.json", "epoch-0002-batch-000004.json"]
    assert facts["handler"]
    assert facts["alone"] == [2, 3] and facts["alone iterations"] == 2 * 5 + 2 + 2 + 5


def test_sigterm_after_the_save_of_an_epoch_ends_before_the_next(results):
    assert results.facts[0]["told at the end"] == ["epoch-0001.json"]
    assert "SIGTERM: saved after epoch 1 as epoch-0001.weights.h5\n" in results.ended[0].output


def test_what_is_wrong_is_one_sentence(results):
    facts, output = results.facts[0], results.ended[0].output
    assert facts["full"] == [0, 2] and output.count("No checkpoint after epoch ") == 2
    assert facts["no restore"] == [
        "RuntimeError",
        "CheckpointCallback: call restore(model) before fit, and give fit its result as initial_epoch.",
    ]
    assert facts["no Input"][0] == "ValueError" and "compile and build the model first" in facts["no Input"][1]
    assert facts["no folder"][0] == "CheckpointError" and "Not a directory" in facts["no folder"][1]
    assert facts["plain"] == [3, 3]


def test_sigterm_on_two_ranks_saves_and_ends_both(results):
    first, second = results.ended
    assert (first.code, second.code) == (-15, -15), second.output[-3000:]
    found = Checkpoints(results.folder / "term", SETTINGS).newest()
    assert (found.epochs_done, found.batches, found.state["worker_epochs"], found.state["ranks"]) == (3, 4, 6, 2)
    assert f"SIGTERM: saved after epoch 3 and 4 batches as {Path(found.path).name}" in first.output
    assert "Traceback" not in first.output + second.output
