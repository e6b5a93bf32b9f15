"""batchai.yaml: settings of an MLflow project's job, and how --backend-config overrides them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_serializer,
    model_validator,
)

from mlflow_batchai.documents import metric_rules
from mlflow_batchai.documents.common import NotifySettings, SlurmSettings
from mlflow_batchai.documents.fields import (
    Count,
    Name,
    NonEmpty,
    RelativePath,
    Seconds,
    Whole,
    distinct,
    format_duration,
    lasting,
    matching,
    wrong,
)
from mlflow_batchai.documents.job import FRAMEWORKS, JobProperties, shared_outputs
from mlflow_batchai.documents.model import SpecModel, parse
from mlflow_batchai.documents.reading import kind, load_text, read
from mlflow_batchai.errors import DocumentError, UsageError
from mlflow_batchai.terminal import Notice

MOST_RETRIES = 100
CODE_BYTES, MOST_CODE_BYTES = 1000**2, 100 * 1000**2
SAMPLE_INTERVAL = timedelta(seconds=10)
# In the name of a metric: a smaller value is a better one.
LESS_IS_BETTER = ("loss", "error", "mse", "mae", "perplexity")
Alias = Annotated[
    str,
    matching(
        r"(?!(?i:latest|v\d+)$)[\w-]{1,200}", "have 1 to 200 letters, digits, '-' or '_', and not be latest or v and a number"
    ),
]


def _mlflow_name(forbidden: str) -> AfterValidator:
    """A name that MLflow takes: it would refuse another one only when the job has ended."""

    def check(value: str) -> str:
        if not value.strip() or set(value) & set(forbidden):
            raise wrong(f"is {value!r}, but MLflow takes no name without letters, or with one of {' '.join(forbidden)}")
        if set(value) >= set("'\""):
            raise wrong(f"is {value!r}, but MLflow finds no name with both kinds of quotes")
        return value

    return AfterValidator(check)


class MetricRule(SpecModel):
    """A metric read from lines of output, by RE2.

    The group named ``value`` is the value, else the first group that isn't the step. The step is the group
    that ``step`` names, by default one named ``step``, if the regex has it.
    """

    name: NonEmpty
    regex: NonEmpty
    step: NonEmpty | None = None

    @model_validator(mode="after")
    def _usable(self) -> MetricRule:
        try:
            metric_rules.compiled(self.regex, self.step)
        except metric_rules.RuleError as error:
            raise wrong(f"('{self.name}') {error}") from None
        return self


class Promotion(SpecModel):
    """Metric in which a new version must be better than the holder of an alias, by its last value.

    Without ``mode`` less is better of a metric whose name holds one of ``LESS_IS_BETTER``, and more of any other.
    """

    metric: NonEmpty
    mode: Literal["min", "max"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        return {"metric": data} if isinstance(data, str) else data

    @property
    def better(self) -> str:
        """``min`` or ``max``."""
        return self.mode or ("min" if any(word in self.metric.lower() for word in LESS_IS_BETTER) else "max")


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class ModelSettings(SpecModel):
    """The model that a job leaves (docs/reference.md, "Models", has each key)."""

    path: RelativePath | None = None
    register_as: Annotated[str, _mlflow_name("/:")] | None = Field(default=None, alias="register")
    name: Annotated[str, _mlflow_name("/:.%\"'")] = "model"
    alias: Annotated[tuple[Alias, ...], BeforeValidator(_one_or_more), distinct("alias")] = ()
    promote_if: Promotion | None = None
    check: bool = True
    check_timeout: Annotated[Seconds, lasting(timedelta(seconds=1), timedelta(hours=1))] = timedelta(minutes=5)

    @model_validator(mode="after")
    def _complete(self) -> ModelSettings:
        if self.promote_if and not self.alias:
            raise wrong("has promoteIf without alias: say which alias a better model gets, such as alias: champion")
        if self.alias and not self.register_as:
            raise wrong("has alias without register: say which registered model has the alias")
        return self


def _fits_a_file(pattern: str) -> str:
    if not pattern.strip(" /!") or pattern.startswith("#") or ".." in pattern.split("/"):
        raise wrong(f"is {pattern!r}, which fits no file; write a pattern such as *.tmp, cache/ or models/old-*.h5")
    return pattern


def _bytes(value: Any) -> Any:
    if isinstance(value, bool):
        return CODE_BYTES if value else 0
    size = re.fullmatch(r"(\d{1,12}) ?([kMG]?)B?", str(value), re.IGNORECASE)
    if size is None:
        raise wrong(f"is {value!r}; write a size such as 1MB, or false")
    return int(size[1]) * {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3}[size[2].lower()]


class ArtifactSettings(SpecModel):
    """Selection of files that go into the run's artifacts.

    ``exclude`` has patterns as in a ``.gitignore`` in the output directory. ``code`` is the most bytes of code that are kept.
    """

    checkpoints: bool = False
    code: Annotated[int, BeforeValidator(_bytes), Field(le=MOST_CODE_BYTES)] = CODE_BYTES
    exclude: tuple[Annotated[NonEmpty, AfterValidator(_fits_a_file)], ...] = ()


def _umask_text(value: Any) -> Any:
    # From Python it may come as the number; documents keep leading zeros.
    return f"{value:03o}" if isinstance(value, int) and value in (0o077, 0o022) else value


def _yes_or_interval(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return SAMPLE_INTERVAL if value is True else timedelta() if value is False else check(value)


def _yes_or_files(value: Any) -> Any:
    files = value if isinstance(value, (list, tuple)) else [] if isinstance(value, bool) else [None]
    if not all(isinstance(file, str) and file for file in files):
        raise wrong("must be true, false, or a list of the project's files")
    return value


class BatchaiFile(SpecModel):
    """A whole batchai.yaml, or the ``batchai:`` block of an MLproject; every key is optional (docs/project.md).

    ``system_metrics`` is how often nodes are sampled: a duration, true (every 10 s) or false (0); None: as MLflow's own switch
    says. ``notify`` None: as config.yaml has it.
    """

    cluster: NonEmpty | None = None
    experiment: NonEmpty | None = None
    workspace: Name | None = None
    name: Name | None = None
    properties: JobProperties = JobProperties()
    metrics: tuple[MetricRule, ...] = ()
    model: ModelSettings | None = None
    artifacts: ArtifactSettings = ArtifactSettings()
    retries: Annotated[Whole, Field(le=MOST_RETRIES)] = 0
    min_nodes: Count | None = None
    terminate_grace: Annotated[Seconds, lasting(most=timedelta(minutes=10))] = timedelta(seconds=10)
    umask: Annotated[Literal["077", "022"], BeforeValidator(_umask_text)] = "077"
    relay_deadline: Seconds = timedelta(hours=24)
    ranks: Literal["first", "all"] = "first"
    system_metrics: Annotated[Annotated[Seconds, lasting(timedelta(seconds=1))] | None, WrapValidator(_yes_or_interval)] = None
    notify: NotifySettings | None = None
    wait: bool = True
    stage: Annotated[tuple[NonEmpty, ...], distinct("staged parameter")] = ()
    slurm: SlurmSettings = SlurmSettings()
    cache_preparation: Annotated[bool | tuple[NonEmpty, ...], BeforeValidator(_yes_or_files)] = False

    @field_serializer("system_metrics", when_used="json")
    def _as_written(self, value: timedelta | None) -> str | bool | None:
        return format_duration(value) if value else None if value is None else False

    @model_validator(mode="after")
    def _fewer_nodes(self) -> BatchaiFile:
        nodes = self.properties.node_count or 1
        if self.min_nodes is not None and self.min_nodes > nodes:
            raise wrong(f"has minNodes {self.min_nodes}, more than properties.nodeCount ({nodes})")
        return self


def read_batchai(path: str | Path) -> dict[str, Any]:
    """The plain data of a batchai.yaml, or of the ``batchai:`` block of a file named MLproject.

    An MLproject without the block gives {}. Raises DocumentError.
    """
    data = read(path)
    if Path(path).name != "MLproject":
        return data
    block = {} if data.get("batchai") is None else data["batchai"]
    if not isinstance(block, dict):
        raise DocumentError(f"{path}: batchai must be a mapping, not {kind(block)}")
    return block


def parse_batchai(data: object, source: str) -> tuple[BatchaiFile, list[str]]:
    """A batchai.yaml from plain data, such as what `merge` returns."""
    document, warnings = parse(BatchaiFile, data, source)
    return document, warnings + [Notice(f"{source}: {note}") for note in shared_outputs(document.properties)]


def settings_from(given: str | None) -> dict[str, Any]:
    """Settings over batchai.yaml as a command line gives them, the same from any folder: JSON, or a file by its name.

    Raises:
        UsageError: they are neither.
    """
    settings: dict[str, Any] = {}
    if given is not None:
        is_json = given.lstrip().startswith("{")
        if not is_json and not Path(given).expanduser().is_file():
            raise UsageError(f"--backend-config {given}: is neither a file nor JSON")
        settings = load_text(given, "--backend-config") if is_json else {"config": given}
    if "config" in settings:
        settings["config"] = str(Path(str(settings["config"])).expanduser().absolute())
    return settings


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
