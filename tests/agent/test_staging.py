"""A node is made ready from the share's objects, each checked, and taken down without touching what is mounted."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai.agent import protocol, staging
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.mounts.mounts import Mounts
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.runtime import Runtime
from mlflow_batchai.agent.safeopen import OddFileError
from mlflow_batchai.agent.share.base import ControlError
from mlflow_batchai.agent.share.mounted import MountedShare
from mlflow_batchai.agent.staging import SetupError
from mlflow_batchai.agent.transport.shipper import Shipper


def stored(share: Path, data: bytes, path: str, mode: int = 0o644) -> dict[str, Any]:
    sha256 = hashlib.sha256(data).hexdigest()
    target = share / protocol.object_path(sha256)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return {"path": path, "sha256": sha256, "size": len(data), "mode": mode}


def mount(layout: NodeLayout) -> Mounts:
    shipper = Shipper(layout, [])
    mounts = Mounts(layout, shipper, Runtime(layout, shipper, {}), {}, lambda: None, MountedShare(layout.share))
    mounts.mount_all()
    return mounts


@pytest.fixture
def share(tmp_path: Path) -> Path:
    folder = tmp_path / "share"
    folder.mkdir()
    return folder


def test_code(make_layout: Callable[..., NodeLayout], share: Path) -> None:
    names = ["train.py", "a b/für\n.py", "bin/run"]
    code = [stored(share, name.encode(), name, 0o755 if name.startswith("bin") else 0o644) for name in names]
    layout = make_layout(code=[*code, {"path": "link", "link": "a b"}])
    staging.prepare_folders(layout)
    staging.fetch_code(layout)
    for name in names:
        assert Path(layout.code, name).read_text() == name
    assert os.access(Path(layout.code, "bin/run"), os.X_OK)
    assert os.readlink(Path(layout.code, "link")) == "a b"


@pytest.mark.parametrize(
    ("at_once", "data", "sentence"),
    [
        (1, b"wrong", r"is damaged on the share .*delete the object"),
        # There the client believes a list of all objects: deleting one alone would not have it sent again.
        (2, b"wrong", r"is damaged on the share .*delete the object and the folder .batchai/objects/trees there"),
        (2, None, r"is missing on the share .*: delete the folder .batchai/objects/trees there"),
        (1, None, r"is missing on the share \(.batchai/objects\): submit again"),
    ],
)
def test_missing_and_damaged_objects_are_told(
    make_layout: Callable[..., NodeLayout], share: Path, at_once: int, data: bytes | None, sentence: str
) -> None:
    entry = stored(share, b"right", "train.py")
    layout = make_layout(code=[entry])
    staging.prepare_folders(layout)
    stands = share / protocol.object_path(entry["sha256"])
    stands.unlink()
    if data:
        stands.write_bytes(data)
    layout.control.at_once = at_once
    with pytest.raises(SetupError, match=f"'train.py' of the project {sentence}"):
        staging.fetch_code(layout)


def test_inputs_are_links(make_layout: Callable[..., NodeLayout], share: Path) -> None:
    entry = stored(share, b"1,2\n", "my data/a.csv")
    layout = make_layout(inputs=[{"parameter": "data", "variable": "BATCHAI_PARAM_data", "name": "my data", "files": [entry]}])
    staging.prepare_folders(layout)
    mount(layout)
    staging.link_inputs(layout)
    path = Path(layout.input_path(layout.plan.inputs[0]), "a.csv")
    assert path.is_symlink()
    assert path.read_text() == "1,2\n"
    staging.prepare_folders(layout)
    (share / protocol.object_path(entry["sha256"])).write_bytes(b"1,")
    damage = r"'my data/a.csv' of parameter 'data' is damaged .* has 2 bytes instead of 4\): delete the object and submit again"
    with pytest.raises(SetupError, match=damage):
        staging.link_inputs(layout)
    (share / protocol.object_path(entry["sha256"])).unlink()
    with pytest.raises(SetupError, match=r"'my data/a.csv' of parameter 'data' is missing on the share"):
        staging.link_inputs(layout)


def test_links(make_layout: Callable[..., NodeLayout], share: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "file").write_text("precious")
    volumes = [
        {"scope": "cluster", "path": "share", "source": str(share), "kind": "link"},
        {"scope": "job", "path": "deep/data", "source": str(data), "kind": "link"},
    ]
    layout = make_layout(volumes=volumes)
    for _ in range(2):
        mounts = mount(layout)
    mounted = Path(layout.job_mounts, "deep", "data")
    assert (mounted / "file").read_text() == "precious"
    assert mounts.unmount_all() == []
    assert not mounted.is_symlink()
    assert Path(layout.cluster_mounts, "share").is_symlink()
    # A job folder with its mounts still there is removed without what is behind them.
    mount(layout)
    staging.remove_job_folder(layout.job)
    assert not os.path.exists(layout.job)
    assert (data / "file").read_text() == "precious"


def test_link_errors(make_layout: Callable[..., NodeLayout], tmp_path: Path) -> None:
    missing = make_layout(volumes=[{"scope": "job", "path": "data", "source": str(tmp_path / "none"), "kind": "link"}])
    with pytest.raises(
        Failure, match=r"volume 'data' can't be mounted on node-0 .*: .*/none is not a directory there; create it"
    ):
        mount(missing)
    layout = make_layout(volumes=[{"scope": "job", "path": "data", "source": str(tmp_path), "kind": "link"}])
    target = layout.mount_path(layout.plan.volumes[0])
    os.makedirs(os.path.join(target, "something"))
    with pytest.raises(Failure, match="is taken by something that is not a mount of ours") as caught:
        mount(layout)
    assert caught.value.code == "NodeSetupFailed"


def test_directories_are_made_on_mounts_only(make_layout: Callable[..., NodeLayout], tmp_path: Path) -> None:
    outputs = [
        {"id": "MODEL", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share", "pathSuffix": None},
        {"id": "ODD", "pathPrefix": str(tmp_path / "elsewhere"), "pathSuffix": None},
    ]
    layout = make_layout(outputDirectories=outputs)
    staging.prepare_folders(layout)
    mount(layout)
    for _ in range(2):
        staging.make_directories(layout)
    found = layout.directories()
    assert os.path.isdir(found["AZ_BATCHAI_OUTPUT_MODEL"])
    assert os.path.isdir(found["AZ_BATCHAI_STDOUTERR_DIR"])
    assert os.path.isdir(layout.mounted_stdouterr)
    assert not (tmp_path / "elsewhere").exists()


def test_directories_are_not_made_below_an_empty_mount_point(make_layout: Callable[..., NodeLayout], share: Path) -> None:
    layout = make_layout(outputDirectories=[{"id": "O", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share/other"}])
    staging.prepare_folders(layout)
    mount(layout)
    share.rename(share.with_name("elsewhere"))
    share.mkdir()
    with pytest.raises(ControlError, match=f"the control share is not mounted at {share}"):
        staging.make_directories(layout)
    assert os.listdir(share) == []


def test_logs_are_copied_where_the_document_wants_them(
    make_layout: Callable[..., NodeLayout], share: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    volumes = [
        {"scope": "cluster", "path": "share", "source": str(share), "kind": "link"},
        {"scope": "job", "path": "other", "source": str(other), "kind": "link"},
    ]
    layout = make_layout(volumes=volumes, logCopyPrefix={"volume": 1, "path": "logs"})
    mount(layout)
    logs = Path(layout.control.where(layout.paths.stdouterr))
    (logs / "sub").mkdir(parents=True)
    (logs / "stdout.txt").write_text("hello")
    (logs / "sub" / "mine.txt").write_text("world")
    for _ in range(2):
        staging.copy_logs(layout)
    assert (other / "logs" / layout.plan.segment / "stdouterr" / "stdout.txt").read_text() == "hello"
    assert (other / "logs" / layout.plan.segment / "stdouterr" / "sub" / "mine.txt").read_text() == "world"
    # One that can't be read costs no other.
    (logs / "a").symlink_to("nowhere")
    (logs / "z").write_text("late")
    with pytest.raises(OddFileError):
        staging.copy_logs(layout)
    (logs / "a").unlink()
    there = other / "logs" / layout.plan.segment / "stdouterr"
    assert (there / "z").read_text() == "late"
    # A later attempt's come beside them.
    second = make_layout(volumes=volumes, logCopyPrefix={"volume": 1, "path": "logs"}, attempt=2)
    (logs / "attempt-2").mkdir()
    (logs / "attempt-2" / "stdout.txt").write_text("again")
    staging.copy_logs(second)
    assert ((there / "stdout.txt").read_text(), (there / "attempt-2" / "stdout.txt").read_text()) == ("hello", "again")
    assert second.directories()["AZ_BATCHAI_STDOUTERR_DIR"] == f"{layout.mounted_stdouterr}/attempt-2"
    staging.copy_logs(make_layout())


def test_a_job_has_a_python(make_layout: Callable[..., NodeLayout], tmp_path: Path) -> None:
    """Debian has python3 only; what lies beside an interpreter by that name is left alone."""
    layout = make_layout()
    staging.prepare_folders(layout)
    (tmp_path / "odd name").mkdir()
    interpreter = tmp_path / "odd name" / "python3"
    interpreter.write_text('#!/bin/sh\necho "$0 says $@"\n')
    interpreter.chmod(0o755)
    staging.write_python(layout, str(interpreter))
    said = subprocess.run([os.path.join(layout.bin, "python"), "a b", "$x"], capture_output=True, text=True, check=True).stdout
    assert said == f"{interpreter} says a b $x\n"
    os.unlink(os.path.join(layout.bin, "python"))
    (tmp_path / "odd name" / "python").touch()
    staging.write_python(layout, str(interpreter))
    assert os.listdir(layout.bin) == []
