"""Nodes with mounts, which are undone with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mount_world import Node


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Makes a node of volumes, and for each of the first of them what opens it."""
    made: list[Node] = []

    def make(volumes: list[dict[str, Any]], *credentials: dict[str, str], **changes: Any) -> Node:
        root = tmp_path / f"it's node {len(made)}"
        root.mkdir()
        made.append(Node(root, volumes, {str(index): given for index, given in enumerate(credentials)}, **changes))
        return made[-1]

    yield make
    for node in made:
        node.close()
