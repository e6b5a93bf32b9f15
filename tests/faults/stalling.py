"""A share that can be stalled: what a process does there hangs until it goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from waiting import freeze, wait_for


class Stalling(NamedTuple):
    """A share that can be stalled."""

    place: Path
    stall: Callable[[], Any]
    go_on: Callable[[], Any]


def _rclone() -> str | None:
    beside = Path(sys.executable).with_name("rclone")
    return str(beside) if beside.exists() else shutil.which("rclone")


@contextlib.contextmanager
def fuse_server(tmp_path: Path) -> Iterator[Stalling]:
    """A file system in user space whose process is stopped: every operation hangs."""
    program = _rclone()
    if program is None or not os.path.exists("/dev/fuse"):
        pytest.skip("there is no rclone, or no FUSE, here")
    behind, place = tmp_path / "behind", tmp_path / "share"
    behind.mkdir()
    place.mkdir()
    options = ["--vfs-cache-mode=writes", "--vfs-write-back=0s"]
    environment = {**os.environ, "RCLONE_CONFIG": "/dev/null", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    server = subprocess.Popen([program, "mount", str(behind), str(place), *options], env=environment)
    try:
        wait_for(lambda: place.is_mount())
        yield Stalling(place, lambda: freeze(server.pid), lambda: server.send_signal(signal.SIGCONT))
    finally:
        server.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "-l", str(place)], check=False)
        server.terminate()
        server.wait(60)
