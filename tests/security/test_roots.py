"""Where nodes and clients keep what they run and trust: nowhere that another user could put something else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import Cli
from other_user import STRANGER, needs_root, public_folder

from mlflow_batchai.agent import boot
from mlflow_batchai.agent.api import host
from mlflow_batchai.engines import archive


@pytest.fixture
def place() -> Iterator[Path]:
    yield from public_folder()


def of_a_stranger(path: Path, mode: int = 0o755) -> Path:
    path.mkdir(parents=True)
    path.chmod(mode)
    os.chown(path, STRANGER, STRANGER)
    return path


def ours(path: Path, mode: int = 0o755) -> Path:
    path.mkdir(parents=True)
    path.chmod(mode)
    return path


def linked(path: Path, target: Path | str, owner: int = 0) -> Path:
    path.symlink_to(target)
    os.chown(path, owner, owner, follow_symlinks=False)
    return path


def sticky(place: Path) -> Path:
    return ours(place / "tmp", 0o1777)


def in_a_team(place: Path) -> Path:
    os.chown(ours(place / "team", 0o775), 0, STRANGER)
    return place / "team" / "root"


OPEN, THEIRS = "open, which other users can write", "root belongs to another user"
# What makes a root, and what is said of it.
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "open to all": (lambda at: ours(at / "open", 0o777) / "root", OPEN),
    "open to a group": (in_a_team, "team, which other users can write"),
    "a stranger's": (lambda at: of_a_stranger(at / "theirs") / "root", "theirs, which belongs to another user"),
    "far above": (lambda at: (ours(at / "open", 0o777), ours(at / "open" / "a" / "b"))[1] / "root", OPEN),
    "there already": (lambda at: (ours(at / "open", 0o777), ours(at / "open" / "root", 0o700))[1], OPEN),
    "sticky with a stranger's folder": (lambda at: of_a_stranger(sticky(at) / "root", 0o777), THEIRS),
    "sticky above a stranger's": (lambda at: of_a_stranger(sticky(at) / "a", 0o777) / "root", "a belongs to another user"),
    # Who owns a sticky folder may rename all in it.
    "sticky of a stranger": (
        lambda at: of_a_stranger(at / "tmp", 0o1777) / "root",
        "tmp, which belongs to another user",
    ),
    "stranger's link": (lambda at: linked(sticky(at) / "root", ours(at / "fine", 0o700), STRANGER), THEIRS),
    "stranger's link above": (lambda at: linked(sticky(at) / "root", ours(at / "fine"), STRANGER) / "below", THEIRS),
    "link to an open folder": (lambda at: linked(at / "link", ours(at / "open", 0o777)) / "root", OPEN),
    # What it leads to is fine, and so is where it lies; another link on the way is anybody's.
    "link by way of an open folder": (
        lambda at: linked(at / "first", linked(ours(at / "open", 0o777) / "second", ours(at / "fine"))) / "root",
        OPEN,
    ),
    "relative link with dots": (
        lambda at: (
            (ours(at / "open", 0o777), ours(at / "open" / "in"), linked(ours(at / "a") / "link", "../open/in/../in"))[2]
            / "root"
        ),
        OPEN,
    ),
    "loop": (
        lambda at: (linked(at / "one", at / "two"), linked(at / "two", at / "one"))[0] / "root",
        "Too many levels of symbolic links",
    ),
    "file": (lambda at: ((at / "file").touch(), at / "file" / "root")[1], "Not a directory"),
    "pipe": (lambda at: (os.mkfifo(at / "root"), at / "root")[1], "is not a folder"),
}


def started(root: Path) -> str:
    """What a node says over SSH when it is to answer for this root."""
    argv = [sys.executable, "-I", "-S", "-c", archive.boot(), str(root), "agent.pyz", "0" * 64, "serve"]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False).stderr


@needs_root
@pytest.mark.parametrize("kind", REFUSED)
def test_a_root_that_others_could_exchange_is_refused(place: Path, kind: str) -> None:
    make, words = REFUSED[kind]
    root = make(place)
    before = sorted(place.rglob("*"))
    with pytest.raises(host.HostError, match=words) as error:
        host.answer("place", {"root": str(root)})
    assert "name another folder (root in the cluster document)" in str(error.value)
    said = started(root)
    assert words in said and "Traceback" not in said
    assert sorted(place.rglob("*")) == before


def umask_of_nothing(place: Path) -> Path:
    before = os.umask(0)
    try:
        return Path(boot.own_folder(str(place / "a" / "b" / "root")))
    finally:
        os.umask(before)


TAKEN: dict[str, Callable[[Path], Path]] = {
    # As on Debian and Red Hat: a umask of 002, since the user's group has nobody else.
    "private group": lambda at: ours(at / "home", 0o775) / "root",
    "sticky": lambda at: sticky(at) / "root",
    "own link": lambda at: linked(at / "link", ours(at / "disk").name) / "root",
    # It is closed; others could not have taken its place.
    "own root that was open": lambda at: ours(at / "root", 0o777),
    "umask of nothing": umask_of_nothing,
}


@needs_root
@pytest.mark.parametrize("kind", TAKEN)
def test_ordinary_roots_are_taken(place: Path, kind: str) -> None:
    root = TAKEN[kind](place)
    assert host.answer("place", {"root": str(root)})["root"] == str(root)
    assert root.stat().st_mode & 0o022 == 0
    assert "the archive is to be sent to" in started(root)


@needs_root
@pytest.mark.parametrize("members", [["ann"], ["root", "ann"]])
def test_a_group_with_others_in_it_is_not_private(place: Path, monkeypatch: pytest.MonkeyPatch, members: list[str]) -> None:
    real = boot.grp.getgrgid
    monkeypatch.setattr(boot.grp, "getgrgid", lambda gid: type(real(gid))(("root", "x", 0, members)))
    with pytest.raises(boot.FolderError, match="home, which other users can write"):
        boot.own_folder(str(ours(place / "home", 0o775) / "root"))


CLIENTS = ["open to all", "open to a group", "a stranger's", "there already", "stranger's link", "sticky of a stranger"]


@needs_root
@pytest.mark.parametrize("kind", CLIENTS)
def test_a_client_s_folder_that_others_could_exchange_is_refused(place: Path, cli: Cli, kind: str) -> None:
    make, words = REFUSED[kind]
    said = cli("cluster", "list", BATCHAI_HOME=str(make(place)))
    assert said.code == 2 and "BATCHAI_HOME" in said.err and words in said.err


@needs_root
def test_a_client_s_folder_that_others_can_write_is_refused(place: Path, cli: Cli) -> None:
    said = cli("cluster", "list", BATCHAI_HOME=str(ours(place / "home", 0o777)))
    assert said.code == 2 and f"other users can write {place}/home" in said.err and "chmod go-w" in said.err
