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


def open_to_all(place: Path) -> Path:
    return ours(place / "open", 0o777) / "root"


def open_to_a_group(place: Path) -> Path:
    os.chown(ours(place / "team", 0o775), 0, STRANGER)
    return place / "team" / "root"


def a_stranger_s(place: Path) -> Path:
    return of_a_stranger(place / "theirs") / "root"


def far_above(place: Path) -> Path:
    ours(place / "open", 0o777)
    return ours(place / "open" / "a" / "b" / "c") / "root"


def there_already(place: Path) -> Path:
    ours(place / "open", 0o777)
    return ours(place / "open" / "root", 0o700)


def sticky_with_a_stranger_s_folder(place: Path) -> Path:
    ours(place / "tmp", 0o1777)
    return of_a_stranger(place / "tmp" / "root", 0o777)


def sticky_above_a_stranger_s_folder(place: Path) -> Path:
    ours(place / "tmp", 0o1777)
    return of_a_stranger(place / "tmp" / "a", 0o777) / "root"


def sticky_of_a_stranger(place: Path) -> Path:
    """Who owns a sticky folder may rename all in it."""
    return of_a_stranger(place / "tmp", 0o1777) / "root"


def stranger_s_link(place: Path) -> Path:
    ours(place / "tmp", 0o1777)
    ours(place / "fine", 0o700)
    (place / "tmp" / "root").symlink_to(place / "fine")
    os.chown(place / "tmp" / "root", STRANGER, STRANGER, follow_symlinks=False)
    return place / "tmp" / "root"


def stranger_s_link_above(place: Path) -> Path:
    return stranger_s_link(place) / "below"


def link_to_an_open_folder(place: Path) -> Path:
    ours(place / "open", 0o777)
    (place / "link").symlink_to(place / "open")
    return place / "link" / "root"


def link_by_way_of_an_open_folder(place: Path) -> Path:
    """What it leads to is fine, and so is where it lies; another link on the way is anybody's."""
    ours(place / "open", 0o777)
    ours(place / "fine")
    (place / "open" / "second").symlink_to(place / "fine")
    (place / "first").symlink_to(place / "open" / "second")
    return place / "first" / "root"


def relative_link_with_dots(place: Path) -> Path:
    ours(place / "open" / "in", 0o755)
    (place / "open").chmod(0o777)
    (ours(place / "a") / "link").symlink_to("../open/in/../in")
    return place / "a" / "link" / "root"


def loop(place: Path) -> Path:
    (place / "one").symlink_to(place / "two")
    (place / "two").symlink_to(place / "one")
    return place / "one" / "root"


def file(place: Path) -> Path:
    (place / "file").touch()
    return place / "file" / "root"


def pipe(place: Path) -> Path:
    os.mkfifo(place / "root")
    return place / "root"


REFUSED = {
    open_to_all: "open, which other users can write",
    open_to_a_group: "team, which other users can write",
    a_stranger_s: "theirs, which belongs to another user",
    far_above: "open, which other users can write",
    there_already: "open, which other users can write",
    sticky_with_a_stranger_s_folder: "root belongs to another user",
    sticky_above_a_stranger_s_folder: "a belongs to another user",
    sticky_of_a_stranger: "tmp, which belongs to another user",
    stranger_s_link: "root belongs to another user",
    stranger_s_link_above: "root belongs to another user",
    link_to_an_open_folder: "open, which other users can write",
    link_by_way_of_an_open_folder: "open, which other users can write",
    relative_link_with_dots: "open, which other users can write",
    loop: "Too many levels of symbolic links",
    file: "Not a directory",
    pipe: "is not a folder",
}


def started(root: Path) -> str:
    """What a node says over SSH when it is to answer for this root."""
    argv = [sys.executable, "-I", "-S", "-c", archive.boot(), str(root), "agent.pyz", "0" * 64, "serve"]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False).stderr


@needs_root
@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_a_root_that_others_could_exchange_is_refused(place: Path, make: Callable[[Path], Path]) -> None:
    root = make(place)
    before = sorted(place.rglob("*"))
    with pytest.raises(host.HostError, match=REFUSED[make]) as error:
        host.answer("place", {"root": str(root)})
    assert "name another folder (root in the cluster document)" in str(error.value)
    said = started(root)
    assert REFUSED[make] in said and "Traceback" not in said
    assert sorted(place.rglob("*")) == before


def private_group(place: Path) -> Path:
    """As on Debian and Red Hat: a umask of 002, since the user's group has nobody else."""
    return ours(place / "home", 0o775) / "root"


def sticky(place: Path) -> Path:
    return ours(place / "tmp", 0o1777) / "root"


def own_link(place: Path) -> Path:
    ours(place / "disk")
    (place / "link").symlink_to("disk")
    return place / "link" / "root"


def own_root_that_was_open(place: Path) -> Path:
    """It is closed; others could not have taken its place."""
    return ours(place / "root", 0o777)


def umask_of_nothing(place: Path) -> Path:
    before = os.umask(0)
    try:
        return Path(boot.own_folder(str(place / "a" / "b" / "root")))
    finally:
        os.umask(before)


@needs_root
@pytest.mark.parametrize(
    "make", [private_group, sticky, own_link, own_root_that_was_open, umask_of_nothing], ids=lambda make: make.__name__
)
def test_ordinary_roots_are_taken(place: Path, make: Callable[[Path], Path]) -> None:
    root = make(place)
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


@needs_root
@pytest.mark.parametrize(
    "make", [open_to_all, open_to_a_group, a_stranger_s, there_already, stranger_s_link, sticky_of_a_stranger]
)
def test_a_client_s_folder_that_others_could_exchange_is_refused(place: Path, cli: Cli, make: Callable[[Path], Path]) -> None:
    said = cli("cluster", "list", BATCHAI_HOME=str(make(place)))
    assert said.code == 2 and "BATCHAI_HOME" in said.err and REFUSED[make] in said.err


@needs_root
def test_a_client_s_folder_that_others_can_write_is_refused(place: Path, cli: Cli) -> None:
    said = cli("cluster", "list", BATCHAI_HOME=str(ours(place / "home", 0o777)))
    assert said.code == 2 and f"other users can write {place}/home" in said.err and "chmod go-w" in said.err
