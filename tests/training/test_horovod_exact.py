"""Several ranks end with the weights that one process has on the joined batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

JOBS, ROOT = Path(__file__).parent / "jobs", Path(__file__).parents[2]

TOLERANCE = {"halves": 2e-3, "half precision": 2e-3, "accumulate, average": 2e-6}
SAME = ["sgd", "rmsprop", "uneven steps", "none, global clip", "rows, clip", "accumulate, average", "loss scale"]
SAME += ["half precision", "sum", "eager", "halves", "batch norm"]


# Horovod for it may have to be built.
TORCH = pytest.param("torch", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


class Results:
    """Weights (case/number -> array) and facts of the two ranks and of the process alone."""

    def __init__(self, folder):
        names = ["0", "1", "alone"]
        self.weights = [dict(np.load(folder / f"{name}.npz")) for name in names]
        self.facts = [json.loads((folder / f"{name}.json").read_text()) for name in names]

    def of(self, case):
        """Return the case's weights on rank 0, rank 1 and alone."""
        return [[w[k] for k in sorted(w) if k.startswith(case + "/")] for w in self.weights]


@pytest.fixture(scope="session", params=["tensorflow", TORCH, "jax"])
def results(request, ranks, tmp_path_factory):
    # JAX's gradients go through the binding of TensorFlow, which ``ranks`` needs.
    python = request.getfixturevalue("torch_horovod_python") if request.param == "torch" else sys.executable
    folder = tmp_path_factory.mktemp("exact")
    ended = ranks(python, JOBS / "exact.py", folder, env={"KERAS_BACKEND": request.param})
    assert [one.code for one in ended] == [0, 0], ended[0].output[-3000:] + ended[1].output[-3000:]
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD")}
    env.update(PYTHONPATH=str(ROOT), KERAS_BACKEND=request.param)
    subprocess.run([python, JOBS / "exact.py", folder], check=True, env=env)
    found = Results(folder)
    found.output, found.backend = [one.output for one in ended], request.param
    return found


@pytest.mark.parametrize("case", SAME)
def test_ranks_equal_one_process(results, case):
    rank0, rank1, alone = results.of(case)
    if case == "batch norm" and results.backend == "jax":
        pytest.skip("the emulation of batch normalization on halves is written with TensorFlow and PyTorch")
    assert len(rank0) == len(rank1) == len(alone) > 0
    for a, b, c in zip(rank0, rank1, alone, strict=True):
        assert np.array_equal(a, b)
        assert np.max(np.abs(a - c)) <= TOLERANCE.get(case, 1e-6)
    assert len({facts[f"{case}/iterations"] for facts in results.facts}) == 1


def test_four_ranks_equal_one_process_on_jax(results, ranks, tmp_path):
    if results.backend != "jax":
        pytest.skip("the exchange of JAX's gradients is ours, in flat buffers; the other backends' is Horovod's own")
    cases = ["uneven steps", "loss scale"]
    ended = ranks(sys.executable, JOBS / "exact.py", tmp_path, *cases, ranks=4, env={"KERAS_BACKEND": "jax"})
    assert [one.code for one in ended] == [0] * 4, ended[0].output[-3000:]
    found = [np.load(tmp_path / f"{rank}.npz") for rank in range(4)]
    for key in found[0]:
        alone = results.weights[2][key]
        assert all(np.array_equal(found[0][key], other[key]) for other in found[1:]), key
        assert np.max(np.abs(found[0][key] - alone)) <= 1e-6, key


def test_resumed_model_goes_on_as_if_it_had_not_stopped(results):
    for a, b in zip(results.of("resumed")[0], results.of("sgd")[0], strict=True):
        assert np.max(np.abs(a - b)) <= 1e-6


def test_what_one_rank_sees(results):
    facts = results.facts[0]
    assert facts["copy"], "a copy of the optimizer is plain"
    assert facts["imported nothing"] and not facts["mlflow"]
    assert facts["opted out"] is None, "ranks that are meant to differ may"


@pytest.mark.parametrize("suffix", ["h5", "keras"])
def test_saved_files_name_keras_own_class(results, suffix):
    module, name, iterations = results.facts[0][f"saved {suffix}"]
    assert (module.split(".")[0], name, iterations) == ("keras", "SGD", 3)
    assert results.facts[0][f"plain {suffix}"]
    assert results.facts[0][f"loaded {suffix}"] == [6, 3]


def test_jit_compile_is_switched_off_with_one_notice(results):
    notice = "the train step runs without jit_compile, as Horovod has no operation for XLA."
    assert results.output[0].count(notice) == (0 if results.backend == "jax" else 1)
    assert notice not in results.output[1]


def test_ranks_talk(results):
    for rank in (0, 1):
        facts = results.facts[rank]
        assert facts["ranks"] == [rank, 2, rank, 2, 0, 1]
        assert facts["allreduce"] == [0.5, 1.0]
        assert facts["tensor"] is True
        assert facts["allgather"] == [0, 1, 1]
        assert facts["broadcast"] == 4
        assert facts["objects"] == [{"a": 1}, [0, 1]]


def test_warm_up_rises_from_one_ranks_rate_to_all_ranks(results):
    rates = results.facts[0]["rates"]
    assert rates[:4] == pytest.approx([0.5, 0.6, 0.7, 0.8])
    assert "finished gradual learning rate warmup to 0.8" in results.output[0]


def test_logs_are_averaged_and_ranks_stop_together(results):
    first, second = (results.facts[rank]["history"] for rank in (0, 1))
    assert first == second
    assert len(first["loss"]) == 2
    assert {"val_loss", "learning_rate"} <= set(first)


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("no broadcast", "RanksDivergedError", "before the first step: checksums rank 0 "),
        ("no broadcast", "RanksDivergedError", "BroadcastGlobalVariablesCallback(0)"),
        ("epochs", "RanksDisagreeError", "rank 0 from 0 to 9, rank 1 from 3 to 9"),
        ("not an optimizer", "TypeError", "not 3."),
        ("passes", "TypeError", "gradient_accumulation_steps=4"),
        ("unknown", "TypeError", "does not take num_groups"),
        ("global", "RuntimeError", "BroadcastGlobalVariablesCallback(0)"),
        ("bad switch", "ValueError", "BATCHAI_WEIGHT_CHECK=maybe"),
    ],
)
def test_refusals_are_one_sentence_on_every_rank(results, what, error, words):
    for facts in results.facts[:2]:
        assert facts[what][0] == error
        assert words in facts[what][1]


def test_a_loop_of_the_users_own_on_jax(results):
    if results.backend != "jax":
        pytest.skip("the other backends have optimizer.apply, which every case uses")
    for facts in results.facts[:2]:
        assert facts["own loop"] == pytest.approx([0.995, 0.995])  # the mean gradient is a half
        assert facts["in jit"][0] == "RuntimeError" and "can't exchange gradients inside jax.jit" in facts["in jit"][1]
