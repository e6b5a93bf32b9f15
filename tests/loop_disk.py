"""A small file system of its own, mounted from a file: one that gets full, is frozen, or fails."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def loop_disk(folder: Path, megabytes: int, name: str = "share") -> Iterator[Path]:
    """An ext4 file system; no room is kept for root, as agents of others have none. Skips where it can't be mounted."""
    image, place = folder / "disk", folder / name
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    place.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)], check=True, capture_output=True)
    options = "loop,errors=remount-ro"
    done = subprocess.run(["mount", "-o", options, str(image), str(place)], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


def fill(place: Path) -> Path:
    """Write until not a byte more is taken; the file that did it."""
    path = place / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return path


def fail(place: Path) -> None:
    """As after an error of the disk: it becomes read-only, also to who has files open."""
    device = subprocess.run(["findmnt", "-no", "SOURCE", str(place)], check=True, capture_output=True, text=True).stdout.strip()
    Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("a test")
