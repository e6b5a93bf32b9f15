"""A small cluster of real agents on a directory that faults are made in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_world import Cluster
from plans import toy_plan
from stalling import Stalling, fuse_server


@pytest.fixture
def agents(tmp_path: Path, agent_pyz: Path) -> Iterator[Callable[..., Cluster]]:
    """Makes two nodes whose share is a folder that the test has made; whatever runs at its end is ended."""
    made: list[Cluster] = []

    def make(share: Path | None = None, nodes: int = 2) -> Cluster:
        folder = tmp_path / f"cluster-{len(made)}"
        folder.mkdir()
        made.append(Cluster(folder, toy_plan, agent_pyz, nodes, share=share))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture
def stopped_server(tmp_path: Path) -> Iterator[Stalling]:
    """A share on a file system in user space, whose process can be stopped."""
    with fuse_server(tmp_path) as share:
        yield share
