"""A node's volumes without its agent: plans of volumes, and mounts that are undone with the test."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from azure_server import AzureServer
from plans import toy_plan

from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.mounts import mountpoints
from mlflow_batchai.agent.mounts.mounts import Mounts
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.plan import Plan, read
from mlflow_batchai.agent.runtime import Runtime
from mlflow_batchai.agent.share.mounted import MountedShare
from mlflow_batchai.agent.transport.shipper import Shipper

needs_fuse = pytest.mark.skipif(
    not (os.access("/dev/fuse", os.R_OK | os.W_OK) and shutil.which("fusermount3")), reason="there is no FUSE here"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


def volume(azure: AzureServer, kind: str, what: str, name: str, endpoint: str) -> dict[str, Any]:
    of = {"account": azure.account, "container": name, "folder": "", "endpoint": endpoint, "how": "rclone"}
    return {"scope": "job", "path": name, "kind": kind, "name": f"{what} {azure.account}/{name}", **of}


def files_volume(azure: AzureServer, share: str = "data", **changes: Any) -> dict[str, Any]:
    """A file share as ``planning`` writes it into the plan."""
    modes = {"fileMode": "0777", "directoryMode": "0777"}
    made = volume(azure, "azureFiles", "file share", share, azure.endpoint)
    return {**made, "share": azure.url(share), **modes, **changes}


def blob_volume(azure: AzureServer, container: str = "blobs", **changes: Any) -> dict[str, Any]:
    """A blob container as ``planning`` writes it into the plan."""
    made = volume(azure, "azureBlob", "blob container", container, azure.blob_endpoint)
    return {**made, "share": None, "options": None, **changes}


class Notes(Shipper):
    """A shipper that keeps what it is told, and ships nothing.

    Attributes:
        notes: lines of the execution log.
    """

    def __init__(self, layout: NodeLayout) -> None:
        super().__init__(layout, [])
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        self.notes.append(line)


class Node:
    """One node's mounts.

    Attributes:
        targets: where the plan's volumes are mounted.
    """

    def __init__(
        self,
        root: Path,
        volumes: list[dict[str, Any]],
        credentials: Mapping[str, Mapping[str, str]] | None = None,
        **changes: Any,
    ) -> None:
        share = root.parent / "control"
        share.mkdir(exist_ok=True)
        plan = toy_plan(share, volumes=volumes, **{"job": f"{os.getpid():x}m{root.name}", "python": sys.executable, **changes})
        self.root = root
        self.layout = NodeLayout(str(root), read(Plan, plan), 0, str(share))
        for folder in (self.layout.job_mounts, self.layout.temp):
            os.makedirs(folder, exist_ok=True)
        self.shipper = Notes(self.layout)
        self.runtime = Runtime(self.layout, self.shipper, {})
        told = {
            index: {"endpoint": volumes[int(index)]["endpoint"], **opens}
            for index, opens in (credentials or {}).items()
            if opens
        }
        self.mounts = Mounts(self.layout, self.shipper, self.runtime, told, lambda: None, MountedShare(str(share)))
        self.targets = [Path(self.layout.mount_path(volume)) for volume in self.layout.plan.volumes]

    def failure(self) -> Failure:
        """What ``mount_all`` raises; all is undone after it."""
        with pytest.raises(Failure) as caught:
            self.mounts.mount_all()
        self.close()
        return caught.value

    def close(self) -> None:
        """Undo the mounts; nothing of the node's may be left mounted or running."""
        assert self.mounts.unmount_all() == []
        self.runtime.stop_helpers()
        self.runtime.drain(self.runtime.helpers)
        assert mountpoints.below(str(self.root)) == []
        assert [task.name for task in self.runtime.helpers if task.status is None] == []
