"""A node's GPUs are those of a (stand-in) nvidia-smi on PATH, less what its environment and its part of the machine leave out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mlflow_batchai.agent import gpus
from mlflow_batchai.agent.gpus import Gpus
from mlflow_batchai.agent.staging import SetupError

UUIDS = [f"GPU-{digit * 8}-1111-2222-3333-444444444444" for digit in "abcd"]
LISTING = "".join(f"GPU {index}: NVIDIA A100-SXM4-40GB (UUID: {uuid})\n" for index, uuid in enumerate(UUIDS))
MIG = "  MIG 1g.5gb     Device  0: (UUID: MIG-c7384736-a75d-5afc-978f-d2f1294409fd)\n"


class Machine:
    """A machine with its own nvidia-smi, or without one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"PATH": f"{folder}:/usr/bin:/bin"}

    def smi(self, listing: str = LISTING, code: int = 0, program: str | None = None) -> None:
        tool = self.folder / "nvidia-smi"
        tool.write_text(program or f"#!/bin/sh\n[ \"$*\" = -L ] || exit 3\ncat <<'END'\n{listing}END\nexit {code}\n")
        tool.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def four(machine: Machine) -> Machine:
    machine.smi()
    return machine


def test_all_that_nvidia_smi_lists(four: Machine) -> None:
    assert gpus.list_gpus(four.environment) == Gpus(UUIDS, "nvidia-smi -L")


def test_a_gpu_that_is_cut_up_is_its_instances(machine: Machine) -> None:
    first, second = LISTING.splitlines(keepends=True)[:2]
    machine.smi(first + MIG + MIG.replace("MIG-c", "MIG-d").replace("0:", "1:") + second)
    instances = ["MIG-c7384736-a75d-5afc-978f-d2f1294409fd", "MIG-d7384736-a75d-5afc-978f-d2f1294409fd"]
    assert gpus.list_gpus(machine.environment).ids == [*instances, UUIDS[1]]
    assert gpus.list_gpus({**machine.environment, "CUDA_VISIBLE_DEVICES": "0"}).ids == instances[:1]
    assert gpus.list_gpus({**machine.environment, "CUDA_VISIBLE_DEVICES": "MIG-d738"}).ids == instances[1:]


@pytest.mark.parametrize("code", [0, 15])
def test_a_lost_gpu_leaves_the_others(machine: Machine, code: int) -> None:
    lost = "Unable to determine the device handle for GPU1: 0000:1A:00.0: Unknown Error"
    lines = LISTING.splitlines(keepends=True)
    machine.smi("".join([lines[0], lost + "\n", *lines[2:]]), code)
    found = gpus.of_node(machine.environment, (0, 1), None, "node-0")
    assert (found.ids, found.trouble) == ([UUIDS[0], *UUIDS[2:]], "nvidia-smi -L says: " + lost)
    with pytest.raises(SetupError, match=r"gpusPerNode is 4 and node-0 has 3 GPU.s. .nvidia-smi -L says: Unable to determine"):
        gpus.of_node(machine.environment, (0, 1), 4, "node-0")
    # Three of four one-GPU nodes still have one.
    parts = [gpus.of_node(machine.environment, (index, 4), 1, "a node") for index in range(3)]
    assert [part.ids for part in parts] == [[UUIDS[0]], [UUIDS[2]], [UUIDS[3]]]
    with pytest.raises(SetupError, match=r"gpusPerNode is 1 and node-3 has 3 GPU.s. for the 4 nodes of this machine"):
        gpus.of_node(machine.environment, (3, 4), 1, "node-3")


@pytest.mark.parametrize(
    ("chosen", "ids"),
    [
        ("", []),
        ("2", [2]),
        ("3,1", [3, 1]),
        ("1, 1", [1]),
        (UUIDS[2], [2]),
        ("GPU-bbbb,GPU-aaaa", [1, 0]),
        (f"{UUIDS[0]},1", [0]),
        ("1,GPU-aaaa", [1]),
        ("-1", []),
        ("0,9,1", [0]),
        ("1,GPU-", [1]),
        ("MIG-c7384736", []),
    ],
)
def test_the_node_s_own_choice(four: Machine, chosen: str, ids: list[int]) -> None:
    found = gpus.list_gpus({**four.environment, "CUDA_VISIBLE_DEVICES": chosen})
    assert found.ids == [UUIDS[index] for index in ids]
    assert found.note.startswith(f"CUDA_VISIBLE_DEVICES={chosen.replace(' ', '')}")


def test_no_tool_no_gpus(machine: Machine) -> None:
    machine.environment["PATH"] = str(machine.folder)
    assert gpus.list_gpus(machine.environment) == Gpus([], "no nvidia-smi on PATH")


def test_a_tool_that_fails_says_why(machine: Machine) -> None:
    machine.smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", code=9)
    assert gpus.list_gpus(machine.environment) == Gpus(
        [], "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    )
    machine.smi(program="no program")
    found = gpus.list_gpus(machine.environment)
    assert found.ids == [] and found.note == f"{machine.folder}/nvidia-smi can't be run: Exec format error"


def test_a_tool_that_hangs_is_given_up(machine: Machine) -> None:
    machine.smi(program="#!/bin/sh\nsleep 600 & wait\n")
    begun = time.monotonic()
    found = gpus.list_gpus(machine.environment, lambda argv, environment: gpus.ask(argv, environment, 0.2))
    said = "nvidia-smi -L did not answer within 0 s"
    assert found == Gpus([], said, "no GPU is used: " + said)
    assert time.monotonic() - begun < 40.0


@pytest.mark.parametrize(
    ("count", "parts", "expected"),
    [
        (4, 1, [UUIDS]),
        (4, 2, [UUIDS[:2], UUIDS[2:]]),
        (3, 2, [UUIDS[:2], UUIDS[2:3]]),
        (2, 3, [[], [], []]),
        (0, 2, [[], []]),
    ],
)
def test_parts_of_a_machine(machine: Machine, count: int, parts: int, expected: list[list[str]]) -> None:
    machine.smi("".join(LISTING.splitlines(keepends=True)[:count]))
    found = [gpus.of_node(machine.environment, (index, parts), None, "node-0") for index in range(parts)]
    assert [part.ids for part in found] == expected
    assert bool(found[0].trouble) == (0 < count < parts)
    # One that the cluster was given since: running jobs keep theirs.
    later = gpus.of_node(machine.environment, (parts, parts), None, "node-0")
    assert (later.ids, later.hidden) == ([], bool(count))
    # A part that has none must not take what is another's.
    assert [part.hidden for part in found] == [bool(count) and not ids for ids in expected]


def test_the_cluster_document_s_word(four: Machine) -> None:
    assert [gpus.of_node(four.environment, (index, 3), 1, "a node").ids for index in range(3)] == [[uuid] for uuid in UUIDS[:3]]
    assert gpus.of_node(four.environment, (1, 3), 2, "node-1").ids == UUIDS[2:]
    assert gpus.of_node(four.environment, (0, 1), 0, "node-0") == Gpus([], "gpusPerNode is 0", hidden=True)
    with pytest.raises(
        SetupError, match=r"gpusPerNode is 5 and node-0 has 4 GPU\(s\) \(nvidia-smi -L\): mend its driver, or lower"
    ):
        gpus.of_node(four.environment, (0, 1), 5, "node-0")
    four.smi("no devices\n", code=6)
    with pytest.raises(SetupError, match=r"gpusPerNode is 1 and node-0 has 0 GPU\(s\) \(no devices\)"):
        gpus.of_node(four.environment, (0, 1), 1, "node-0")


def test_the_cluster_document_is_believed_where_nobody_can_be_asked(machine: Machine) -> None:
    machine.environment["PATH"] = str(machine.folder)
    assert gpus.of_node(machine.environment, (1, 2), 2, "node-1") == Gpus(["2", "3"], "gpusPerNode")
    machine.environment["CUDA_VISIBLE_DEVICES"] = "5,6"
    assert gpus.of_node(machine.environment, (0, 1), 2, "node-0").ids == ["5", "6"]


def test_variables() -> None:
    two = Gpus(["3", "1"], "")
    rest = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "BATCHAI_NODE_GPUS": "3,1"}
    assert gpus.visibility_variables(two) == {"CUDA_VISIBLE_DEVICES": "3,1", **rest}
    assert [gpus.visibility_variables(two, rank) for rank in (0, 1, 2)] == [
        {"CUDA_VISIBLE_DEVICES": device, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **rest} for device in ("3", "1", "3")
    ]
    assert gpus.visibility_variables(Gpus([], ""), 0) == {}
    assert gpus.visibility_variables(Gpus([], "", hidden=True), 0) == {"CUDA_VISIBLE_DEVICES": ""}
