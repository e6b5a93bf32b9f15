"""At the end of an attempt an agent opens up on the share only what the job's user has made there."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from other_user import STRANGER, needs_root, public_folder

from mlflow_batchai.agent import permissions

OURS = ("outputs", "model")


@pytest.fixture
def place() -> Iterator[Path]:
    """A share's root ``share`` of mode 0777 with an output directory, and ``private``, whose content is nobody's business."""
    for folder in public_folder():
        (folder / "share" / "outputs" / "model").mkdir(parents=True, mode=0o700)
        (folder / "share").chmod(0o777)
        (folder / "private").mkdir(mode=0o700)
        (folder / "private" / "key").write_text("key")
        (folder / "private" / "key").chmod(0o600)
        yield folder


def private_file(path: Path) -> Path:
    path.touch()
    path.chmod(0o600)
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def renamed_parent(model: Path, private: Path) -> None:
    (private / "model").mkdir(mode=0o700)
    model.parent.rename(model.parents[1] / "away")
    model.parent.symlink_to(private)


def named_socket(model: Path, private: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(model / "x"))
    (model / "x").chmod(0o600)


def deep(model: Path, private: Path) -> None:
    """Deeper than a process may have open files, or a path be long; the agent's own files go on to be opened."""
    folder = os.open(model, os.O_RDONLY)
    for level in range(3000):
        os.mkdir("d", 0o700 if level > permissions.MOST_LEVELS else 0o777, dir_fd=folder)
        below = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)


ATTACKS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda model, private: (model / "x").symlink_to(private / "key"),
    "linked folder": lambda model, private: (model / "x").symlink_to(private),
    "hard link": lambda model, private: (model / "x").hardlink_to(private / "key"),
    "two hard links": lambda model, private: [(model / name).hardlink_to(private / "key") for name in ("x", "y")],
    "renamed output": lambda model, private: (model.rename(model.parent / "away"), model.symlink_to(private)),
    "renamed parent": renamed_parent,
    "file for folder": lambda model, private: (model.rmdir(), model.hardlink_to(private / "key")),
    "pipe": lambda model, private: os.mkfifo(model / "x", 0o600),
    "socket": named_socket,
    "setuid": lambda model, private: private_file(model / "x").chmod(0o4700),
    "loop of links": lambda model, private: ((model / "x").symlink_to("y"), (model / "y").symlink_to("x")),
    "deep": deep,
}
if os.geteuid() == 0:
    ATTACKS["device"] = lambda model, private: os.mknod(model / "x", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    ATTACKS["a stranger's file"] = lambda model, private: os.chown(private_file(model / "x"), STRANGER, STRANGER)


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_not_the_job_s_stays_closed(place: Path, attack: str) -> None:
    model, private = place.joinpath("share", *OURS), place / "private"
    ATTACKS[attack](model, private)
    before = {path: mode(path) for path in (private, *private.rglob("*"), model / "x") if os.path.lexists(path)}
    try:
        permissions.open_up_tree(str(place / "share"), OURS)
    except OSError as error:
        assert attack in ("renamed output", "renamed parent", "file for folder"), error
    assert {path: mode(path) for path in before} == before


@needs_root
def test_what_is_the_job_s_is_opened(place: Path) -> None:
    model = place.joinpath("share", *OURS)
    (model / "deep" / "er").mkdir(parents=True, mode=0o700)
    private_file(model / "deep" / "er" / "model.h5").write_text("model")
    (model / "deep" / "latest").hardlink_to(model / "deep" / "er" / "model.h5")
    private_file(model / "run").chmod(0o700)
    permissions.open_up_tree(str(place / "share"), OURS)
    assert mode(model / "deep" / "er" / "model.h5") == mode(model / "deep" / "latest") == 0o666
    assert mode(model / "run") == mode(model / "deep") == 0o777
    # What leads to the output directory was made by others.
    assert mode(model.parent) == 0o755
    assert not [path for path in model.iterdir() if path.name.startswith(".batchai")]


@pytest.mark.parametrize(
    ("root", "file", "folder"), [(0o755, 0o644, 0o755), (0o2770, 0o660, 0o770), (0o1777, 0o666, 0o777), (0o700, 0o600, 0o700)]
)
def test_no_more_than_the_share_s_root_says(place: Path, root: int, file: int, folder: int) -> None:
    model = place.joinpath("share", *OURS)
    (place / "share").chmod(root)
    (model / "below").mkdir(mode=0o700)
    private_file(model / "file")
    permissions.open_up_tree(str(place / "share"), OURS)
    assert (mode(model / "file"), mode(model / "below")) == (file, folder)


def test_a_folder_that_another_user_just_makes_is_waited_for() -> None:
    """Agents of two users begin at once: the one's folder is there a moment before it is open to the other."""
    said: list[type[OSError]] = [PermissionError, PermissionError, FileNotFoundError]

    def step() -> None:
        raise said.pop(0)

    with pytest.raises(FileNotFoundError):
        permissions.patiently(step)
    assert said == []
