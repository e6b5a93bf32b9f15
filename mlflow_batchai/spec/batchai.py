"""batchai.yaml: what an MLflow project says about its job, and how --backend-config overrides it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from mlflow_batchai.spec.base import Count, Name, NonEmpty, SpecModel, Whole, refuse_repeats, wrong
from mlflow_batchai.spec.durations import Seconds, format_duration
from mlflow_batchai.spec.frameworks import FRAMEWORKS
from mlflow_batchai.spec.job import JobProperties

MOST_RETRIES = 100
LONGEST_GRACE = timedelta(minutes=10)


class MetricRule(SpecModel):
    """A metric read from lines of output.

    The group named ``value`` is the value, else the first group that isn't the step. The step is the group
    that ``step`` names, by default one named ``step``, if the regex has it.
    """

    name: NonEmpty
    regex: NonEmpty
    step: NonEmpty | None = None

    @model_validator(mode="after")
    def _usable(self) -> MetricRule:
        try:
            pattern = re.compile(self.regex)
        except re.error as error:
            raise wrong(f"has a regex that does not compile: {error}") from None
        if self.step and self.step not in pattern.groupindex:
            raise wrong(f"has the step {self.step!r}, but its regex has no group of that name")
        step = pattern.groupindex.get(self.step or "step")
        if not set(range(1, pattern.groups + 1)) - {step}:
            raise wrong("has a regex without a group for the value; put parentheses around the number")
        return self


class ModelSettings(SpecModel):
    """The model that a job leaves: its path, the registered model to make of it, its artifact's name."""

    path: NonEmpty | None = None
    register_as: NonEmpty | None = Field(default=None, alias="register")
    name: NonEmpty = "model"


class BatchaiFile(SpecModel):
    """A whole batchai.yaml, or the ``batchai:`` block of an MLproject; every key is optional.

    ``stage`` lists parameters whose value, if it names an existing file or folder, is staged to the share.
    ``model`` absent means that no model is looked for. ``cache_preparation`` keeps what jobPreparation made on a node for later
    jobs: true while the whole project stays the same, a list while these files of it do (an empty one: while the command does).
    ``retries`` is how often a job that fails starts again by itself, with ``min_nodes`` of its nodes at least (absent: all).
    ``terminate_grace`` is what processes have between SIGTERM and SIGKILL; ``relay_deadline`` is for how long a tracking server
    that is away is waited for once the job has ended.
    """

    cluster: NonEmpty | None = None
    experiment: NonEmpty | None = None
    workspace: Name | None = None
    name: Name | None = None
    properties: JobProperties = JobProperties()
    metrics: tuple[MetricRule, ...] = ()
    model: ModelSettings | None = None
    retries: Annotated[Whole, Field(le=MOST_RETRIES)] = 0
    min_nodes: Count | None = None
    terminate_grace: Seconds = timedelta(seconds=10)
    relay_deadline: Seconds = timedelta(hours=24)
    wait: bool = True
    stage: tuple[NonEmpty, ...] = ()
    cache_preparation: bool | tuple[NonEmpty, ...] = False

    @field_validator("terminate_grace")
    @classmethod
    def _bounded_grace(cls, value: timedelta) -> timedelta:
        if value > LONGEST_GRACE:
            raise wrong(f"must be {format_duration(LONGEST_GRACE)} at most: agents that end a job are waited for that long")
        return value

    @model_validator(mode="after")
    def _fewer_nodes(self) -> BatchaiFile:
        nodes = self.properties.node_count or 1
        if self.min_nodes is not None and self.min_nodes > nodes:
            raise wrong(f"has minNodes {self.min_nodes}, more than properties.nodeCount ({nodes})")
        return self

    @model_validator(mode="after")
    def _distinct_stage(self) -> BatchaiFile:
        refuse_repeats(self.stage, "staged parameter")
        return self

    @field_validator("cache_preparation", mode="before")
    @classmethod
    def _yes_or_files(cls, value: Any) -> Any:
        files = value if isinstance(value, (list, tuple)) else [] if isinstance(value, bool) else [None]
        if not all(isinstance(file, str) and file for file in files):
            raise wrong("must be true, false, or a list of the project's files")
        return value


def merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` overridden key by key, both left as they are.

    Mappings merge, scalars and lists replace, null removes the key. A framework block in the override's
    ``properties`` takes the place of another one in the base's.
    """
    base_properties, new_properties = base.get("properties"), override.get("properties")
    if isinstance(base_properties, Mapping) and isinstance(new_properties, Mapping):
        chosen = {key for key in FRAMEWORKS if new_properties.get(key) is not None}
        if chosen:
            kept = {key: value for key, value in base_properties.items() if key not in FRAMEWORKS or key in chosen}
            base = {**base, "properties": kept}
    return _merged(base, override)


def _merged(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in override.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            below = result.get(key)
            result[key] = _merged(below if isinstance(below, Mapping) else {}, value)
        else:
            result[key] = value
    return result
