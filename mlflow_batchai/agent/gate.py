"""Whether a node takes jobs: a mark in its own folder, which an agent whose turn has come looks at.

A cluster that shrinks closes its last nodes. What runs there goes on; what comes next waits until the node is opened again.
"""

import contextlib
import os
from typing import Any, Dict

from mlflow_batchai.agent import place


def _mark(root: str) -> str:
    return os.path.join(root, "closed")


def is_closed(root: str) -> bool:
    """Whether the node takes no jobs."""
    return os.path.exists(_mark(root))


def gate(root: str, closed: bool) -> Dict[str, Any]:
    """Close the node to jobs that have not taken it yet, or open it; its folder is made if it isn't there."""
    root = place.own_folder(root)
    if closed:
        with open(_mark(root), "a"):
            pass
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_mark(root))
    return {}
