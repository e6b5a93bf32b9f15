"""A job that is ready to be submitted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlflow_batchai.agent.plan import Plan
from mlflow_batchai.engines.base import Needs
from mlflow_batchai.plan import tools
from mlflow_batchai.storage.objects import StagedFile


def needs_of(plan: Plan) -> Needs | None:
    """What a plan wants of its nodes that not every node has, or None."""
    volumes = tuple(volume for volume in plan.volumes if volume.kind != "link")
    if not volumes and not plan.container:
        return None
    return Needs(volumes, plan.container, plan.python)


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to be submitted, and nothing of it exists yet.

    Attributes:
        plan: the plan without what is only known at submit (run id, segment).
        document: the job document as submitted, secrets masked.
        parameters: parameter -> value as the user typed it, for MLflow.
        secrets: variable -> value; never written.
        credentials: ``volumes`` (index -> what opens it), ``setup`` (variable -> value, of the cluster's setup task) and
            ``registry`` (who pulls the image, or None); never written.
        seconds: how long the job may take, with its waiting.
        tools: programs that its nodes lack.
        changes: what the code differs in from its git commit (``plan.changes``), or None.
        warnings: sentences to print.
    """

    name: str
    job_id: str
    project: str
    plan: Plan
    document: dict[str, Any]
    parameters: dict[str, str]
    secrets: dict[str, str] = field(repr=False)
    credentials: dict[str, Any] = field(repr=False)
    seconds: float
    code: Sequence[StagedFile]
    inputs: Sequence[StagedFile]
    warnings: list[str]
    tools: Sequence[StagedFile] = ()
    changes: dict[str, Any] | None = None

    @property
    def needs(self) -> Needs | None:
        """What it wants of its nodes that not every node has, or None."""
        return needs_of(self.plan)

    def with_tools(self, missing: Mapping[str, Collection[str]]) -> Prepared:
        """The same job, sending its nodes what they lack (tool -> kinds of machine).

        Raises:
            ClusterError: it isn't here to be sent.
        """
        if "rclone" not in missing:
            return self
        tool = tools.rclone(missing["rclone"])
        return replace(self, plan=replace(self.plan, tools={"rclone": tool.entry()}), tools=[tool.file])
