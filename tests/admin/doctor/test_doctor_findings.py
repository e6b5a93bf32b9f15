"""Findings from nodes' answers: tables of answers and findings."""

from __future__ import annotations

import pytest

from mlflow_batchai.admin.doctor import State, findings

OK, WARNING, FAILED = State.OK, State.WARNING, State.FAILED
WORKS = {"path": "/opt/py", "version": "3.11.2", "horovod": "0.28.1", "works": [], "missing": [], "broken": []}
TENSORFLOW = ["tensorflow", "2.21.0", ["gloo"]]


@pytest.mark.parametrize(
    ("said", "state", "part"),
    [
        ({"path": None}, FAILED, "trainer"),
        ({"path": "/x", "trouble": "it exits with 1"}, FAILED, "it exits with 1"),
        ({"works": [TENSORFLOW]}, OK, "TensorFlow 2.21.0, Horovod 0.28.1 (gloo)"),
        ({"works": [TENSORFLOW], "broken": [["torch", "ImportError: x"]]}, OK, "horovod.torch fails: ImportError: x"),
        ({"works": [["tensorflow", "2.21.0", ["mpi"]]]}, FAILED, "no gloo"),
        ({"broken": [["tensorflow", "No module named 'horovod'"]]}, FAILED, "No module named 'horovod'"),
        ({"missing": ["tensorflow", "torch"]}, FAILED, "neither TensorFlow nor PyTorch"),
    ],
)
def test_training(said, state, part):
    found = findings.training(said if "path" in said else {**WORKS, **said}, "trainer")
    assert found.state is state and part in found.text


@pytest.mark.parametrize(
    ("said", "counts", "state"),
    [
        ({"note": "no nvidia-smi on PATH"}, [0, 0], OK),
        ({"count": 2, "names": ["Tesla K80", "Tesla K80"]}, [2], OK),
        ({"count": 1, "names": ["A100"]}, [1, 0], WARNING),
        ({"driver": "no driver"}, [0], WARNING),
        ({"count": 3, "driver": "nvidia-smi -L says: GPU is lost"}, [3], WARNING),
        ({"trouble": "gpusPerNode is 4 and ..."}, [0], FAILED),
    ],
)
def test_accelerators(said, counts, state):
    found = findings.accelerators({"count": 0, "names": [], "note": "", "driver": "", "trouble": "", **said}, counts)
    assert found.state is state
    assert all(word in found.text for word in (said.get("note"), said.get("driver"), said.get("trouble")) if word)


@pytest.mark.parametrize(
    ("count", "works", "state"),
    [
        (1, ["torch", "2.11.0+cu130", ["gloo"]], WARNING),
        (1, ["torch", "2.11.0+cu130", ["gloo", "nccl"]], OK),
        (1, TENSORFLOW, OK),
        (0, ["torch", "2.11.0+cpu", ["gloo"]], OK),
    ],
)
def test_gpus_that_horovod_would_leave_idle(count, works, state):
    said = {"count": count, "names": [], "note": "no nvidia-smi on PATH", "driver": "", "trouble": ""}
    assert findings.accelerators(said, [count], {**WORKS, "works": [works]}).state is state


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        *(("missing", ""), ("another", ""), ("read-only", ""), ("read-only", "Permission denied")),
        *(("full", "No space left on device"), ("failed", "Stale file handle")),
    ],
)
def test_share(trouble, why):
    said = {"trouble": None, "why": "", "filesystem": "nfs4"}
    assert findings.share(said, "/mnt/s", "node a").state is OK
    found = findings.share({**said, "trouble": trouble, "why": why}, "/mnt/s", "node a")
    assert found.state is FAILED and "/mnt/s" in found.text and (why in found.text or trouble == "full")
