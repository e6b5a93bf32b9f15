"""Checkpoints of a training script on an Azure file share that each node mounts by a real rclone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from azure_server import AzureServer
from mount_world import Node, files_volume, needs_fuse
from waiting import wait_for

from mlflow_batchai.training.checkpoints import Checkpoints, Found

pytestmark = needs_fuse


@pytest.fixture
def nodes(azure: AzureServer, tmp_path: Path) -> Iterator[list[Node]]:
    """Two nodes with the share ``kept``."""
    azure.share("kept")
    made = []
    try:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            made.append(Node(tmp_path / name, [files_volume(azure, "kept")], {"0": {"key": azure.key}}))
            made[-1].mounts.mount_all()
        yield made
    finally:
        for node in made:
            node.close()


def random_weights(path: str) -> None:
    Path(path).write_bytes(os.urandom(6 << 20))


def test_another_node_goes_on_from_a_checkpoint_also_when_one_was_cut_off(nodes: list[Node]) -> None:
    said: list[str] = []
    first, second = (Checkpoints(node.targets[0] / "models" / "checkpoints", say=said.append) for node in nodes)
    for epoch in (1, 2):
        first.save(epoch, random_weights)
    wait_for(lambda: found(second) == 2)
    second.save(3, random_weights)
    wait_for(lambda: found(first) == 3)
    second.save(4, random_weights)
    (task,) = nodes[1].runtime.helpers
    os.kill(task.pid, signal.SIGKILL)  # it sends a file a second after its last write
    nodes[1].runtime.run_to_end(task)
    time.sleep(1.1)  # a mount lists a folder anew after a second
    assert found(first) in (3, 4), said


def found(checkpoints: Checkpoints) -> int:
    newest: Found | None = checkpoints.newest()
    return newest.epochs_done if newest else 0
