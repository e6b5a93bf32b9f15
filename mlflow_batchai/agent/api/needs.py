"""Check whether a node has the tools that a job's volumes and container need, before the job exists."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Callable

from mlflow_batchai.agent import containers
from mlflow_batchai.agent.mounts import tools
from mlflow_batchai.agent.plan import Container, Tool, Volume, read

Answer = dict[str, Any]


def needs(volumes: Sequence[Any], container: Any, python: str) -> Answer:
    """List what this node lacks for a job.

    Args:
        volumes: those of the plan that have to be mounted, as plain data.
        container: the same of the plan's, or None.
        python: the training interpreter, as the plan names it: rclone may be installed beside it.

    Returns:
        ``trouble``: a sentence, None: nothing is missing; ``lacking``: tools that a client can send; ``machine``: the kind of
        machine that they have to run on (``uname -m``).
    """
    mounts = [read(Volume, volume) for volume in volumes]
    machine = os.uname().machine
    # A tool that is missing may be sent: the client knows whether it has one.
    sent = {"rclone": Tool(machine, "", 0)}
    wrong: str | None = containers.missing(read(Container, container)) if container else None
    for volume in mounts:
        wrong = wrong or tools.missing(volume, python, sent)
    lacking: list[str] = []
    by_rclone = any(volume.by_rclone for volume in mounts)
    if by_rclone and not wrong and tools.installed_rclone(python) is None:
        lacking.append("rclone")
    return {"trouble": wrong, "lacking": lacking, "machine": machine}


VERBS: dict[str, Callable[..., Answer]] = {"needs": needs}
