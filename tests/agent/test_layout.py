"""Where things lie on a node: Batch AI's names, one folder a node, outputs on their volumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlflow_batchai.agent.layout import NodeLayout, archive_path, log_name
from mlflow_batchai.agent.plan import Volume


def test_folders_lie_under_the_node(make_layout: Callable[..., NodeLayout], tmp_path: Path) -> None:
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


def test_mount_points(make_layout: Callable[..., NodeLayout]) -> None:
    layout = make_layout()
    assert layout.mount_path(Volume("job", "nfs/a", "nfs")) == f"{layout.job_mounts}/nfs/a"
    assert layout.mount_path(Volume("cluster", "nfs", "nfs")) == f"{layout.cluster_mounts}/nfs"


def test_ranks_import_our_helpers_from_where_we_are() -> None:
    assert Path(archive_path(), "mlflow_batchai", "agent", "layout.py").exists()
