"""Where things lie on a node: Batch AI's names, one folder a node, outputs on their volumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlflow_batchai.agent.layout import NodeLayout, expand, log_name, undefined


def test_folders_lie_under_the_node(make_layout: Callable[..., NodeLayout], tmp_path: Path) -> None:
    """``AZ_BATCHAI_JOB_MOUNT_ROOT`` is set, of which people asked what it was (azure-docs 15559)."""
    layout = make_layout(1)
    root = f"{tmp_path}/root-1"
    assert layout.code == f"{root}/jobs/abc1234567/temp/code"
    assert layout.roots()["AZ_BATCHAI_JOB_MOUNT_ROOT"] == f"{root}/jobs/abc1234567/mounts"
    assert layout.roots()["AZ_BATCHAI_MOUNT_ROOT"] == f"{root}/mounts"
    assert layout.on_mount("a/b") == f"{root}/mounts/share/a/b"
    assert layout.control.where("a/b") == f"{tmp_path}/share/a/b"


def test_without_a_share_s_path_it_is_the_mount(make_layout: Callable[..., NodeLayout]) -> None:
    plan = make_layout().plan
    assert NodeLayout("/root", plan, 0).share == "/root/mounts/share"


def test_directories(make_layout: Callable[..., NodeLayout]) -> None:
    layout = make_layout(
        inputDirectories=[{"id": "DATA", "path": "$AZ_BATCHAI_JOB_MOUNT_ROOT/nfs/x y"}],
        outputDirectories=[
            {"id": "MODEL", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share", "pathSuffix": "a/b/"},
            {"id": "REST", "pathPrefix": "${AZ_BATCHAI_JOB_MOUNT_ROOT}/nfs", "pathSuffix": None},
        ],
    )
    found = layout.directories()
    assert found["AZ_BATCHAI_INPUT_DATA"] == f"{layout.job_mounts}/nfs/x y"
    segment = layout.plan.segment
    assert found["AZ_BATCHAI_OUTPUT_MODEL"] == f"{layout.cluster_mounts}/share/{segment}/outputs/a/b"
    assert found["AZ_BATCHAI_OUTPUT_REST"] == f"{layout.job_mounts}/nfs/{segment}/outputs"
    assert found["AZ_BATCHAI_STDOUTERR_DIR"].endswith(f"{segment}/stdouterr")


def test_log_names(make_layout: Callable[..., NodeLayout]) -> None:
    assert log_name(make_layout().plan, 0, "execution") == "execution.log"
    assert log_name(make_layout().plan, 0, "stdout-job_prep") == "stdout-job_prep.txt"
    several = make_layout(1, nodeCount=2)
    assert log_name(several.plan, 1, "execution") == "execution-node-1.log"
    assert log_name(several.plan, 1, "stderr-job_prep") == "stderr-job_prep-node-1.txt"


KNOWN = {"AZ_BATCHAI_MOUNT_ROOT": "/mnt/a b", "AZ_BATCHAI_OUTPUT_MODEL": "/out/$HOME", "A": "", "_x1": "y"}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("", ""),
        ("plain", "plain"),
        ("$AZ_BATCHAI_MOUNT_ROOT/x", "/mnt/a b/x"),
        ("${AZ_BATCHAI_MOUNT_ROOT}x", "/mnt/a bx"),
        ("$AZ_BATCHAI_MOUNT_ROOTS", "$AZ_BATCHAI_MOUNT_ROOTS"),
        ("--out=$AZ_BATCHAI_OUTPUT_MODEL,$AZ_BATCHAI_OUTPUT_MODEL", "--out=/out/$HOME,/out/$HOME"),
        ("$A$_x1", "y"),
        ("$HOME ${HOME} $1 $$ $ ${ ${A-b} $(A)", "$HOME ${HOME} $1 $$ $ ${ ${A-b} $(A)"),
        ("$AZ_BATCHAI_MOUNT_ROOTé", "/mnt/a bé"),
    ],
)
def test_expand(text: str, result: str) -> None:
    assert expand(text, KNOWN) == result


def test_undefined_lists_service_variables_once_in_order() -> None:
    text = "$AZ_BATCHAI_INPUT_B ${AZ_BATCHAI_INPUT_A} $AZ_BATCHAI_INPUT_B $AZ_BATCHAI_MOUNT_ROOT $HOME"
    assert undefined(text, KNOWN) == ["AZ_BATCHAI_INPUT_B", "AZ_BATCHAI_INPUT_A"]
    assert undefined("nothing", {}) == []
