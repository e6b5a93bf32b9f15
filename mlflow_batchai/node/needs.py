"""Whether a node has what a job wants of it besides a Python: asked before anything exists."""

import os
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from mlflow_batchai.node import containers
from mlflow_batchai.node.mounts import tools
from mlflow_batchai.node.mounts.trouble import trouble

Answer = Dict[str, Any]


def needs(volumes: Sequence[Mapping[str, Any]], container: Optional[Mapping[str, Any]], python: str) -> Answer:
    """What this node lacks for a job.

    Args:
        volumes: those of the plan that have to be mounted.
        container: the plan's, or None.
        python: the training interpreter, as the plan names it: rclone may be installed beside it.

    Returns:
        ``trouble``: a sentence, None: nothing is missing; ``lacking``: tools that a client can send; ``machine``: the kind of
        machine that they have to run on (``uname -m``).
    """
    machine = os.uname().machine
    # A tool that is missing may be sent: the client knows whether it has one.
    sent = {"rclone": {"machine": machine}}
    wrong: Optional[str] = containers.trouble(container) if container else None
    for volume in volumes:
        wrong = wrong or trouble(volume, python, sent)
    lacking: List[str] = []
    by_rclone = any(volume.get("how") == "rclone" for volume in volumes)
    if by_rclone and not wrong and tools.installed_rclone(python) is None:
        lacking.append("rclone")
    return {"trouble": wrong, "lacking": lacking, "machine": machine}


VERBS: Dict[str, Callable[..., Answer]] = {"needs": needs}
