"""Mounts on a node are listed, undone when nobody holds them, and never removed through."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from mount_world import needs_root

from mlflow_batchai.agent import azure_errors, staging
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.mounts import mountpoints
from mlflow_batchai.agent.mounts.mount import Mask
from mlflow_batchai.agent.reservation import locks

MOUNTINFO = (
    r"42 27 0:39 / /tmp/a\040b rw,nosuid - fuse.rclone file\040share\040dev/data rw,user_id=0" + "\n"
    r"43 27 0:40 /sub /tmp/tab\011\134back rw shared:7 master:1 - cifs //host/share rw,vers=3.1.1" + "\n"
    "44 27 0:41 / /tmp/é rw - tmpfs none rw\n"
    "damaged line\n"
)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A node's folder with an odd name; whatever is mounted in it is undone."""
    folder = tmp_path / "no de\\é"
    folder.mkdir()
    yield folder
    for mounted in mountpoints.below(str(folder)):
        mountpoints.unmount(mounted.point)


def tmpfs(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(path)], check=True)


def test_mountinfo_is_read() -> None:
    assert mountpoints.parse(MOUNTINFO) == [
        ("/tmp/a b", "fuse.rclone", "file share dev/data", False),
        ("/tmp/tab\t\\back", "cifs", "//host/share", True),
        ("/tmp/é", "tmpfs", "none", False),
    ]
    assert "/" in {mounted.point for mounted in mountpoints.mounts()}


@needs_root
def test_mounts_are_found_by_any_spelling_of_their_path(root: Path, tmp_path: Path) -> None:
    tmpfs(root / "a" / "b\n")
    (tmp_path / "link").symlink_to(root)
    found = mountpoints.at(f"{tmp_path}/link/../link/a/b\n")
    assert found is not None
    assert found.kind == "tmpfs"
    assert mountpoints.at(str(root / "a")) is None
    assert [mounted.point for mounted in mountpoints.below(str(tmp_path / "link" / "a"))] == [found.point]
    assert mountpoints.below(str(root / "a" / "b")) == []
    assert mountpoints.unmount(found.point) == ""
    assert mountpoints.unmount(found.point) == ""


@needs_root
def test_sweep_undoes_what_is_ours(root: Path) -> None:
    """Below the jobs' folder everything is; in the cluster's mounts what was noted, also behind a line that a full disk cut."""
    tmpfs(root / "jobs" / "j1" / "mounts" / "data")
    tmpfs(root / "jobs" / "j1" / "mounts" / "data" / "inner")
    tmpfs(root / "mounts" / "ours")
    tmpfs(root / "mounts" / "theirs")
    (root / "mounted").write_text('"mounts/ha\n')
    mountpoints.note_mount(str(root), str(root / "mounts" / "ours"))
    lock = locks.open_agent_lock(str(root))
    assert locks.try_lock(lock)
    try:
        assert mountpoints.sweep(str(root)) == []
        assert len(mountpoints.below(str(root))) == 4, "a living agent has the node"
    finally:
        os.close(lock)
    assert mountpoints.sweep(str(root)) == []
    assert [mounted.point for mounted in mountpoints.below(str(root))] == [str(root / "mounts" / "theirs")]
    assert mountpoints.sweep(str(root / "none")) == []


@needs_root
def test_a_job_folder_is_not_removed_through_a_mount(
    make_layout: Callable[..., NodeLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "file").write_text("precious")
    old = make_layout(job="old")
    staging.prepare_folders(old)
    target = Path(old.job_mounts, "data")
    target.mkdir()
    Path(old.job_mounts, "link").symlink_to(data)
    Path(old.temp, "big").write_text("x")
    subprocess.run(["mount", "--bind", str(data), str(target)], check=True)
    # Bound from the same disk, and it will not go.
    with monkeypatch.context() as patch:
        patch.setattr(mountpoints, "_run", lambda argv: "busy")
        patch.setattr(mountpoints, "BUSY_SECONDS", 0.0)
        assert staging.prepare_folders(make_layout(job="new")) == [f"{old.job} can't be removed ({target}: it is mounted)"]
        assert (data / "file").read_text() == "precious"
        assert (target / "file").exists()
        assert not os.path.exists(old.temp)
    assert staging.prepare_folders(make_layout(job="new")) == []
    assert (data / "file").read_text() == "precious"
    assert os.listdir(os.path.dirname(old.job)) == ["new"]


def test_secrets_are_masked() -> None:
    mask = Mask(["a+key/of==", "sv=2024&sp=rl&sig=ab%2Bcd%3D"])
    said = mask(
        "key a+key/of== a%2Bkey%2Fof%3D%3D ab%2Bcd%3D ab+cd= GET https://x/?sv=2024&sp=rl&sig=ab%2Bcd%3D&se=1 and sig=other"
    )
    assert said == "key *** *** *** *** GET https://x/?***&se=1 and sig=***"
    assert Mask(["", "no"])("nothing") == "nothing"


@pytest.mark.parametrize("point", ["", ".5", ".123", ".1234567"])
@pytest.mark.parametrize(
    ("start", "end", "sentence"),
    [
        ("2026-01-02T00:00:00{}Z", "2026-01-03", "is not valid before 2026-01-02T00:00:00{}Z"),
        ("2025-12-31", "2026-01-01T00:00:00{}Z", ""),
        ("", "2025-12-31T23:59:58{}Z", "has expired (it ended at 2025-12-31T23:59:58{}Z)"),
    ],
)
def test_when_a_sas_is_valid(start: str, end: str, sentence: str, point: str) -> None:
    """Python 3.9 and 3.10 read fractions of three or six digits only."""
    sas = urlencode({"st": start.format(point), "se": end.format(point)})
    assert azure_errors.time_trouble(sas, "Wed, 31 Dec 2025 23:59:59 GMT") == sentence.format(point)


def test_a_table_that_can_not_be_read_is_not_an_empty_one() -> None:
    """Else a folder would be removed through what is mounted in it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            mountpoints.mounts()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("name", "levels"), [("a", 1200), ("é" * 120, 30)])
def test_a_folder_deeper_than_a_path_may_be_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, levels: int
) -> None:
    """What a job has made must not keep the next ones from the node, which needs no program for that."""
    monkeypatch.setenv("PATH", "")
    top = tmp_path / "job"
    top.mkdir()
    monkeypatch.chdir(top)
    for _ in range(levels):
        os.mkdir(name)
        os.chdir(name)
        Path("file").touch()
    os.chdir(tmp_path)
    assert mountpoints.remove_tree(str(top)) == ""
    assert not top.exists()
    assert mountpoints.remove_tree(str(top)) == ""


@needs_root
def test_what_was_mounted_since_the_table_was_read_stays(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (root / "a").mkdir()
    (root / "a" / "link").symlink_to(tmp_path)
    tmpfs(root / "a" / "b")
    (root / "a" / "b" / "precious").touch()
    with monkeypatch.context() as patch:
        patch.setattr(mountpoints, "mounts", list)
        assert mountpoints.remove_tree(str(root)) == f"{root}/a/b: it is mounted"
    assert os.listdir(root / "a") == ["b"]
    assert (root / "a" / "b" / "precious").exists()
    assert (tmp_path / "file").exists()
