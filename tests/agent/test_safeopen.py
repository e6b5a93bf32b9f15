"""The opener: files and folders below a root, whatever lies there, or takes a name between two calls."""

from __future__ import annotations

import os
import platform
import re
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlflow_batchai.agent import safeopen
from mlflow_batchai.agent.safeopen import OddFileError, OddFolderError
from mlflow_batchai.agent.share import mountfiles


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(path.parent)  # its address may have 107 bytes
        made.bind(path.name)


def make_device(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a device")
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero, which never ends


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (lambda path: path.symlink_to("/etc/hostname"), "a link"),
    "relative link": (lambda path: path.symlink_to("../plain"), "a link"),
    "link to nothing": (lambda path: path.symlink_to("nowhere"), "a link"),
    "link to itself": (lambda path: path.symlink_to(path.name), "a link"),
    "link to a descriptor": (lambda path: path.symlink_to("/proc/self/fd/0"), "a link"),
    "FIFO": (os.mkfifo, "a FIFO"),
    "socket": (make_socket, "a socket"),
    "folder": (Path.mkdir, "a folder"),
    "device": (make_device, "a device"),
}


@pytest.fixture(autouse=True, params=["at once", "part by part"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a kernel that opens all of a way at once, and with one that doesn't know that call."""
    if request.param == "part by part":
        monkeypatch.setattr(safeopen, "OPENAT2", 100_000)


def test_the_kernel_opens_a_way_at_once(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    if tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (5, 6):
        pytest.skip("openat2 came with Linux 5.6")
    opened, real = [], os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(path) or real(path, *rest, **more))
    os.close(safeopen.open_folder(str(tmp_path), "a/b"))
    assert opened == [str(tmp_path), *(["a", "b"] if "part by part" in request.node.name else [])]


@pytest.fixture(params=ODD)
def odd(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """(root, what it is): at ``a/odd`` below the root."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "plain").write_bytes(b"plain")
    make, what = ODD[request.param]
    make(tmp_path / "a" / "odd")
    return str(tmp_path), what


def test_it_is_no_file(odd: tuple[str, str]) -> None:
    root, what = odd
    with pytest.raises(OddFileError, match=f"it is {what}, and no file") as error:
        safeopen.open_file(root, "a/odd")
    assert error.value.filename == f"{root}/a/odd"
    assert mountfiles.read_whole(root, "a/odd", 100) == b"", "as a damaged file"


def test_it_is_no_folder_on_the_way(odd: tuple[str, str]) -> None:
    root, what = odd
    if what == "a folder":
        return
    for act in (safeopen.open_file, safeopen.open_folder, safeopen.make_folders, safeopen.claim, safeopen.open_to_write):
        with pytest.raises(OddFolderError, match=f"'odd' is {what}, and no folder"):
            act(root, "a/odd/x/y")
    with pytest.raises(OddFolderError):
        safeopen.open_folder(root, "a/odd")
    with pytest.raises(NotADirectoryError):
        safeopen.remove(root, "a/odd/x")
    assert safeopen.look(root, "a/odd/x") is None
    assert not safeopen.claim(root, "a/odd")


def test_it_keeps_nobody_from_writing(odd: tuple[str, str]) -> None:
    root, _ = odd
    for append in (False, True):
        os.close(safeopen.open_to_write(root, "a/odd", append))
    mountfiles.write_closed(root, "a/odd", [{}])
    assert Path(root, "a", "odd").is_file() and len(os.listdir(f"{root}/a")) == 2
    assert Path(root, "plain").read_bytes() == b"plain"


def test_it_goes_and_nothing_that_it_leads_to(odd: tuple[str, str]) -> None:
    root, _ = odd
    safeopen.remove(root, "a/odd")
    assert os.listdir(f"{root}/a") == [] and Path(root, "plain").exists()


@pytest.mark.parametrize("path", ["..", "../x", "a/../../x", "a\0b", "\ud800", "/../x"])
def test_what_is_no_path(tmp_path: Path, path: str) -> None:
    for act in (safeopen.open_file, safeopen.open_folder, safeopen.claim, safeopen.open_to_write, safeopen.remove):
        with pytest.raises(OSError, match=r"that (is no path below|can't be the name)"):
            act(str(tmp_path), path)


@pytest.mark.parametrize("path", ["x" * 300, "x/" * 2500 + "x"])
def test_what_is_too_long(tmp_path: Path, path: str) -> None:
    with pytest.raises(OSError, match="File name too long"):
        safeopen.open_file(str(tmp_path), path)


def test_the_root_may_be_a_link_and_its_name_absolute_in_a_path(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to("real")
    mountfiles.write_closed(str(tmp_path / "root"), "/a//./b", [{"n": 1}])
    assert mountfiles.read_fresh(str(tmp_path / "root"), "a/b").startswith(b'{"n":1}')


@pytest.mark.parametrize("swapped", ["link", "FIFO", "folder", "socket"])
def test_a_file_that_is_swapped_between_the_look_and_the_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    monkeypatch.chdir(tmp_path)
    victim, real = tmp_path / "a" / "file", os.open
    victim.parent.mkdir()
    victim.write_bytes(b"fine")

    def swap(path: str, flags: int, *more: int, dir_fd: int | None = None) -> int:
        if path == "file" and victim.is_file():
            victim.unlink()
            ODD[swapped][0](victim)
        return real(path, flags, *more, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(OddFileError, match="no file"):
        safeopen.open_file(str(tmp_path), "a/file")


def test_a_folder_that_is_swapped_for_a_link_while_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"x")
    (tmp_path / "share" / "job" / "deep").mkdir(parents=True)
    victim, real = tmp_path / "share" / "job" / "deep", os.open

    def swap(path: str, flags: int, *more: int, dir_fd: int | None = None) -> int:
        if path == "deep" and not victim.is_symlink():
            victim.rmdir()
            victim.symlink_to(tmp_path / "precious")
        return real(path, flags, *more, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", swap)
    safeopen.remove(str(tmp_path / "share"), "job")
    assert (tmp_path / "precious" / "file").exists() and os.listdir(tmp_path / "share") == []


def test_a_folder_of_any_depth_goes(tmp_path: Path) -> None:
    """Deeper than a path, a process' descriptors and its stack."""
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=folder)
        below = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    begun = time.monotonic()
    safeopen.remove(str(tmp_path), "d")
    assert os.listdir(tmp_path) == [] and time.monotonic() - begun < 60


def test_nothing_is_written_through_a_hard_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    os.link(tmp_path / "precious", tmp_path / "verdict.json")
    mountfiles.write_closed(str(tmp_path), "verdict.json", [{}])
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_of_a_file_that_is_too_long_nothing_is_taken(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(6 << 30)
    begun = time.thread_time()
    assert mountfiles.read_whole(str(tmp_path), "file", 1 << 20) == b""
    assert time.thread_time() - begun < 1
    (tmp_path / "file").write_bytes(b"12345")
    assert [mountfiles.read_whole(str(tmp_path), "file", most) for most in (4, 5)] == [b"", b"12345"]


def test_a_folder_that_has_to_be_there_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "link").symlink_to("jobs")
    for act in (safeopen.make_folders, safeopen.claim, safeopen.open_to_write):
        for within, path in (("jobs/one", "jobs/one/a/b"), ("none", "none/b"), ("/jobs//one/", "jobs/one/b")):
            with pytest.raises(FileNotFoundError):
                act(str(tmp_path), path, within=within)
        with pytest.raises(OddFolderError, match="'link' is a link"):
            act(str(tmp_path), "link/a", within="link")
        assert sorted(os.listdir(tmp_path)) == ["jobs", "link"] and os.listdir(tmp_path / "jobs") == []
    with safeopen.make_folders(str(tmp_path), "jobs/a/b", within="jobs"):
        assert (tmp_path / "jobs" / "a" / "b").is_dir()
    assert safeopen.claim(str(tmp_path), "jobs/c", within="jobs")


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    root, before = str(tmp_path), len(os.listdir("/proc/self/fd"))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link").symlink_to("x")
    for path in ("a/b/c", "a/link", "a/link/x", "none/x", ""):
        for act in (safeopen.open_file, safeopen.make_folders if path == "a/link/x" else safeopen.open_file):
            with pytest.raises(OSError, match=r"Errno"):
                act(root, path)
        safeopen.freshen(root, path)
    with safeopen.open_folder(root, "a"), safeopen.make_folders(root, "p/q/r"):
        pass
    safeopen.claim(root, "p/q/s")
    safeopen.look(root, "p/q/s")
    safeopen.remove(root, "p")
    os.close(safeopen.open_to_write(root, "a/link"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_name_that_was_missing_is_looked_for_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a mount may remember that a name was missing, the nearest folder that exists is opened before it is asked again."""
    monkeypatch.setattr(safeopen, "OPENAT2", 100_000)  # what the kernel opens at once is not seen here
    listed = []
    real = os.open

    def spy(path: str, flags: int, *arguments: int, dir_fd: int | None = None) -> int:
        descriptor = real(path, flags, *arguments, dir_fd=dir_fd)
        if not flags & os.O_PATH:
            listed.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
            if listed[-1] == str(tmp_path):
                (tmp_path / "a" / "b").mkdir(parents=True)
                (tmp_path / "a" / "b" / "file").write_bytes(b"there")
        return descriptor

    monkeypatch.setattr(os, "open", spy)
    assert mountfiles.read_fresh(str(tmp_path), "a/b/file", 1, 3) == b"her"
    assert listed == [str(tmp_path / path) for path in ("", "a", "a/b", "a/b/file")]
    with pytest.raises(FileNotFoundError):
        mountfiles.read_fresh(str(tmp_path), "none")
