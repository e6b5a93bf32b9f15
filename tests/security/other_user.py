"""A second real user of this machine, by number: what he may do is done by a process of his."""

from __future__ import annotations

import os
import pickle
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NODE, CLIENT, STRANGER = 41001, 41002, 41003
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="to be another user needs root")


def as_user(uid: int, act: Callable[[], Any]) -> Any:
    """What a function returns, or the exception that it raises, in a process of another user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            try:
                said = act()
            except Exception as error:
                said = error
            with open(writing, "wb") as pipe:
                pickle.dump(said, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(data)


def public_folder() -> Iterator[Path]:
    """A folder that every user can reach, as a test's own are not; for a fixture."""
    folder = Path(tempfile.mkdtemp(prefix="batchai-rights-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)  # however deep it is
