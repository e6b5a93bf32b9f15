"""The benchmark of GPUs without one: its arguments, what it would run, the page it writes."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "gpu"
MODULES = ("machine", "tables", "prove")


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
        for name in MODULES:
            del sys.modules[name]


def bench(gpu: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, cards: int, *options: str) -> Any:
    monkeypatch.setattr(gpu.prove, "gpus", lambda: ["NVIDIA H100"] * cards)
    return gpu.prove.Bench(gpu.prove.arguments([f"--out={folder / 'out'}", f"--work={folder / 'work'}", *options]))


def test_an_unknown_part_is_refused_and_so_is_a_machine_without_a_gpu(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu.prove.arguments(["--out=x", "--parts=cifar,weather"])
    assert "weather" in capsys.readouterr().err
    monkeypatch.setattr(gpu.prove, "gpus", list)
    assert gpu.prove.main([f"--out={tmp_path / 'out'}", f"--work={tmp_path / 'work'}"]) == 1


@pytest.mark.parametrize(("cards", "counts"), [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8])])
def test_ranks_double_up_to_all_gpus_and_training_is_the_tutorials_whatever_the_ranks(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cards: int, counts: list[int]
) -> None:
    made = bench(gpu, monkeypatch, tmp_path, cards)
    assert made.counts() == counts
    assert json.loads((tmp_path / "work" / "home" / "clusters" / "many.yaml").read_text())["nodes"] == cards
    for ranks in (1, 2, 4, 8):
        given = made.cifar(ranks, 100)
        assert (given["batch_size"] * ranks, float(given["learning_rate"]) * ranks, given["epochs"]) == (128, 4e-4, 100)


def test_a_job_gets_a_node_for_each_rank(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = bench(gpu, monkeypatch, tmp_path, 4)
    command = made.command(gpu.prove.CIFAR, 4, {"epochs": 3})
    config = json.loads(command[command.index("--backend-config") + 1])
    assert command[0] == str(tmp_path / "work" / "venv" / "bin" / "python") and "-Pepochs=3" in command
    assert config["cluster"] == "many" and config["properties"]["nodeCount"] == 4
    variables = {entry["name"]: entry["value"] for entry in config["properties"]["environmentVariables"]}
    assert variables["KERAS_BACKEND"] == "torch" and variables["NCCL_NVLS_ENABLE"] == "0"
    shared = made.command(gpu.prove.CIFAR, 2, {}, shared=True)
    config = json.loads(shared[shared.index("--backend-config") + 1])
    assert (config["cluster"], config["properties"]["nodeCount"]) == ("shared", 1)
    assert shared[0] == str(tmp_path / "work" / "venv-gloo" / "bin" / "python")


def test_a_command_that_takes_too_long_is_ended(gpu: Any, tmp_path: Path) -> None:
    with pytest.raises(gpu.machine.Failure, match="did not end in time"):
        gpu.machine.must(["sh", "-c", "sleep 60"], {"PATH": "/usr/bin:/bin"}, tmp_path / "log", 1.0)
    with pytest.raises(gpu.machine.Failure, match=r"(?s)ended with 3 .*why"):
        gpu.machine.must(["sh", "-c", "echo why; exit 3"], {"PATH": "/usr/bin:/bin"}, tmp_path / "log", 9.0)


def test_the_page_has_a_table_for_each_part_and_says_what_was_not_run(gpu: Any) -> None:
    kill = {"ranks": 2, "exchange": "gloo", "all_ranks_gone_after": 1.5, "job_failed_after": 3.0, "exit_code": 1}
    kill |= {"within_limit": True, "memory_before": [4], "memory_during": [900], "memory_after": [900], "nothing_left": False}
    run = {"ranks": 1, "exchange": "none", "batch_size": 128, "epochs": 100, "val_accuracy": 0.7997, "test_accuracy": 0.7997}
    run |= {"seconds": 490.2, "images_per_second": 11732.2, "weights_equal": None}
    speed = {"network": "cifar10", "keras_on": "jax", "way": "exchange", "bare": 50000.0, "backend": 49000.0}
    results = {
        "machine": {"gpus": ["NVIDIA H100"], "cores": 16, "smoke": False, "cpu": False},
        "build": {"seconds": {}, "wheels": {}, "nccl": "22809"},
        "cifar": {"images": "x.npz", "precision": "float32", "runs": [run]},
        "exact": {"runs": [{"ranks": 1, "recordings": 3, "differences": {"Adam": 0.0}}]},
        "speed": {"batch_size": 128, "rows": [speed]},
        "scaling": {"error": "the network was away\nTraceback"},
        "kill": {"runs": [kill]},
    }
    page = gpu.tables.markdown(results)
    assert page.startswith("1 x NVIDIA H100, 16 cores\n")
    assert "NCCL built in: 2.28.9." in page
    assert "| 1 | none | 128 | 100 | 0.800 | 0.800 | 490.2 | 11,732 | - |" in page
    assert "| 1 | 3 | 0.000 |" in page
    assert "| cifar10 | jax | exchange | 50,000 | 49,000 | 0.980 |" in page
    assert "It failed: the network was away\n" in page and "Traceback" not in page
    assert "| 2 | gloo | 1.5 | 3 | 1 | yes | [4] | [900] | [900] | NO |" in page
    assert "Not run, for want of a second GPU: NCCL between ranks" in page
