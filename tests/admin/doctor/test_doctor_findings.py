"""Findings from nodes' answers: tables of answers and findings."""

from __future__ import annotations

import pytest

from mlflow_batchai.admin.doctor import State, findings

OK, WARNING, FAILED = State.OK, State.WARNING, State.FAILED
WORKS = {"path": "/opt/py", "version": "3.11.2", "horovod": "0.28.1", "works": [], "missing": [], "broken": []}
TENSORFLOW = ["tensorflow", "2.21.0", ["gloo"]]


@pytest.mark.parametrize(
    ("said", "state", "parts"),
    [
        ({"path": None}, FAILED, ["no program trainer", "python: in the cluster document", "--env-manager virtualenv"]),
        ({"path": "/x", "trouble": "it exits with 1"}, FAILED, ["/x can't be asked", "it exits with 1"]),
        ({"works": [TENSORFLOW]}, OK, ["/opt/py (Python 3.11.2): TensorFlow 2.21.0, Horovod 0.28.1 (gloo)"]),
        (
            {"works": [TENSORFLOW, ["torch", "2.5", ["gloo", "nccl"]]]},
            OK,
            ["TensorFlow 2.21.0, PyTorch 2.5, Horovod 0.28.1 (gloo)"],
        ),
        ({"works": [TENSORFLOW], "broken": [["torch", "ImportError: x"]]}, OK, ["(gloo); horovod.torch fails: ImportError: x"]),
        ({"works": [["tensorflow", "2.21.0", ["mpi"]]]}, FAILED, ["Horovod for TensorFlow 2.21.0 has no gloo: build a wheel"]),
        (
            {"broken": [["tensorflow", "ModuleNotFoundError: No module named 'horovod'"]]},
            FAILED,
            ["No module named 'horovod': build a wheel with `batchai horovod build`", "--env-manager virtualenv"],
        ),
        ({"missing": ["tensorflow", "torch"]}, FAILED, ["has neither TensorFlow nor PyTorch", "batchai horovod build"]),
    ],
)
def test_training(said, state, parts):
    found = findings.training(said if "path" in said else {**WORKS, **said}, "trainer")
    assert found.state is state
    for part in parts:
        assert part in found.text


@pytest.mark.parametrize(
    ("said", "counts", "state", "text"),
    [
        ({"note": "no nvidia-smi on PATH"}, [0, 0], OK, "none: trains on CPUs (no nvidia-smi on PATH)"),
        ({"count": 2, "names": ["Tesla K80", "Tesla K80"]}, [2], OK, "2: Tesla K80"),
        ({"count": 2}, [2, 2], OK, "2"),
        ({"count": 1, "names": ["A100"]}, [1, 0], WARNING, "1: A100; nodes of this cluster have from 0 to 1: mend those"),
        ({"driver": "no driver"}, [0], WARNING, "nvidia-smi fails there: no driver; mend the driver, or set gpusPerNode: 0"),
        (
            {"count": 3, "driver": "nvidia-smi -L says: GPU is lost"},
            [3],
            WARNING,
            "3; nvidia-smi -L says: GPU is lost: mend or reset that GPU; jobs go on with the others",
        ),
        ({"trouble": "gpusPerNode is 4 and ..."}, [0], FAILED, "gpusPerNode is 4 and ..."),
    ],
)
def test_accelerators(said, counts, state, text):
    found = findings.accelerators({"count": 0, "names": [], "note": "", "driver": "", "trouble": "", **said}, counts)
    assert found.state is state and found.text.startswith(text)


@pytest.mark.parametrize(
    ("count", "works", "state", "text"),
    [
        (
            1,
            [["torch", "2.11.0+cu130", ["gloo"]]],
            WARNING,
            "1; Horovod for PyTorch 2.11.0+cu130 was built without NCCL: build",
        ),
        (1, [["torch", "2.11.0+cu130", ["gloo", "nccl"]]], OK, "1"),
        (1, [TENSORFLOW], OK, "1"),
        (1, [["torch", "2.11.0+cpu", ["gloo"]]], OK, "1"),
        (0, [["torch", "2.11.0+cpu", ["gloo"]]], OK, "none: trains on CPUs (no nvidia-smi on PATH)"),
    ],
)
def test_gpus_that_horovod_would_leave_idle(count, works, state, text):
    said = {"count": count, "names": [], "note": "no nvidia-smi on PATH", "driver": "", "trouble": ""}
    found = findings.accelerators(said, [count], {**WORKS, "works": works})
    assert found.state is state and found.text.startswith(text)


@pytest.mark.parametrize(
    ("trouble", "why", "state", "part"),
    [
        (None, "", OK, "/mnt/s, the same as here, writable (nfs4)"),
        ("missing", "", FAILED, "there is no folder /mnt/s there; mount the share"),
        ("another", "", FAILED, "its /mnt/s is not the share that this machine has"),
        ("read-only", "", FAILED, "its login may not write in /mnt/s; give it the right to, or mount the share for it"),
        (
            "read-only",
            "Permission denied",
            FAILED,
            "its login may not write in /mnt/s; give it the right to, or mount the share",
        ),
        ("full", "No space left on device", FAILED, "/mnt/s is full"),
        ("failed", "Stale file handle", FAILED, "/mnt/s can't be written: Stale file handle; if the machine is fine, mount"),
    ],
)
def test_share(trouble, why, state, part):
    found = findings.share({"trouble": trouble, "why": why, "filesystem": "nfs4"}, "/mnt/s", "node a")
    assert found.state is state and found.text.startswith(part) and (why in found.text or trouble == "full")
