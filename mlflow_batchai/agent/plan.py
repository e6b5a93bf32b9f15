"""A job's plan: everything that agents and clients need to know of the job, as one frozen tree.

The client makes it from documents (the package ``plan``) and writes it to ``batchai/plan.json``, which nodes and clients read.
In the file a field has its name in camel case, parts lack fields that have their default, and unknown keys are ignored.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional, TypeVar, Union

from mlflow_batchai.agent import records
from mlflow_batchai.agent.protocol import PROTOCOL_VERSION, Record

Part = TypeVar("Part")

# Fields that may be missing are ``Optional``: they are evaluated, and Python 3.9 knows no ``str | None``.
MOST_RANKS = 1_000_000
_UMASK = re.compile(r"[0-7]{1,4}")
FRAMEWORKS = HOROVOD, PYTORCH, CUSTOM = "horovod", "pytorch", "custom"

# How volumes are mounted: by one of these, or as their kind says.
MOUNTED_BY = ("link", "rclone", "cifs", "bind", "nfs", "command")
# Kinds of volumes that know no owners: Azure's have those that their mount gives to all files.
AZURE_KINDS = ("azureFiles", "azureBlob")


class PlanError(ValueError):
    """A record is no plan: its sentence names the key."""


@dataclass(frozen=True)
class Variable:
    name: str
    value: str


@dataclass(frozen=True)
class CodeFile:
    """A file of the project: its path there, and its content's SHA-256 and mode, or what it links to."""

    path: str
    sha256: str = ""
    mode: int = 0o600
    link: Optional[str] = None


@dataclass(frozen=True)
class InputFile:
    """A file of a parameter that names a file or folder; ``size`` in bytes."""

    path: str
    sha256: str
    size: int = 0


@dataclass(frozen=True)
class StagedInput:
    """A parameter whose file or folder travels with the job: ranks find it by ``variable``, under its own ``name``."""

    parameter: str
    variable: str
    name: str
    files: tuple[InputFile, ...] = ()


@dataclass(frozen=True)
class InputDirectory:
    """Batch AI's ``inputDirectories``."""

    id: str
    path: str


@dataclass(frozen=True)
class OutputDirectory:
    """Batch AI's ``outputDirectories``."""

    id: str
    path_prefix: str
    path_suffix: Optional[str] = None


@dataclass(frozen=True)
class Volume:
    """A file system that the job or its cluster mounts.

    Attributes:
        scope: ``cluster`` or ``job``: below which of the two roots.
        path: the mount point below that root.
        kind: ``link`` (a folder of the node), ``azureFiles``, ``azureBlob``, ``nfs`` or ``command``.
        share: the address by which a client reads it; None: it can't.
        name: the volume in sentences.
        where: the document and key that ask for it.
        how: of Azure's kinds, what mounts it: ``rclone``, ``cifs`` or ``bind``.
        source: of ``link`` and ``bind`` the folder of the node, of ``nfs`` ``host:/folder``.
        endpoint, account, container, folder: where Azure has it.
        file_mode, directory_mode: octal text.
    """

    scope: str
    path: str
    kind: str
    share: Optional[str] = None
    name: str = ""
    where: str = ""
    how: str = ""
    source: str = ""
    endpoint: str = ""
    account: str = ""
    container: str = ""
    folder: str = ""
    file_mode: str = ""
    directory_mode: str = ""
    options: str = ""
    command: str = ""

    @property
    def title(self) -> str:
        return f"volume '{self.path}'{(f' ({self.name})' if self.name else '')}"

    @property
    def mounted_by(self) -> str:
        """The tool that mounts it, one of ``MOUNTED_BY``."""
        return self.how or self.kind

    @property
    def by_rclone(self) -> bool:
        """Whether rclone mounts it: then the share has names in rclone's spelling, and writes go there in the background."""
        return self.how == "rclone"


@dataclass(frozen=True)
class LogPlace:
    """A folder for logs: the index of a volume of the plan (None: the control share) and the path there."""

    volume: Optional[int]
    path: str


@dataclass(frozen=True)
class SetupTask:
    """The setup task of the job's cluster; its secrets are here by name only."""

    id: str
    command: str
    logs: LogPlace
    environment_variables: tuple[Variable, ...] = ()
    secret_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Container:
    """The container that the job runs in.

    Attributes:
        server: the registry's host; None: Docker Hub.
        shm_size: as Docker writes it.
        credentials: whether the registry asks for some, which are never here.
        volumes: ``host:container[:mode]``, hosts being the nodes.
        environment: constants that its processes find.
        engine: ``apptainer``; empty: docker or podman, as the node has them.
    """

    image: str
    server: Optional[str] = None
    shm_size: Optional[str] = None
    credentials: bool = False
    volumes: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    engine: str = ""


@dataclass(frozen=True)
class PythonEnvironment:
    """``python_env.yaml`` as nodes build it, in a folder that is named after ``hash``, below ``folder``."""

    manager: str
    hash: str
    python: Optional[str] = None
    build_dependencies: tuple[str, ...] = ()
    dependencies: tuple[str, ...] = ()
    folder: Optional[str] = None


@dataclass(frozen=True)
class Tool:
    """A program that the client sends: for which kind of machine (``uname -m``), its SHA-256, its size in bytes."""

    machine: str
    sha256: str
    size: int


@dataclass(frozen=True)
class MetricRule:
    """A regular expression that finds a metric, and its step, in the output."""

    name: str
    regex: str
    step: Optional[str] = None


@dataclass(frozen=True)
class Condition:
    """A model's version is promoted if ``metric`` is better than before; ``mode``: ``min`` or ``max``."""

    metric: str
    mode: str


@dataclass(frozen=True)
class Model:
    """The model of the run, as ``batchai.yaml`` asks for it.

    Attributes:
        path: the saved model in the output directories; None: the one that is found.
        name: what the run calls it.
        alias: of the version that is registered.
        check_seconds: for how long it may be tried on node 0; None: it is not tried.
    """

    path: Optional[str] = None
    register: Optional[str] = None
    name: Optional[str] = None
    alias: tuple[str, ...] = ()
    promote_if: Optional[Condition] = None
    check_seconds: Optional[float] = None


@dataclass(frozen=True)
class Artifacts:
    """Selection of output files for the run's artifacts: ``exclude`` has patterns of those to leave out."""

    checkpoints: bool = False
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class Notify:
    """Where news of the job's end go: ``url`` names secrets as ``${NAME}``, ``on`` has ends, ``command`` is an argv."""

    url: str = ""
    on: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rerun:
    """How a job of a project can be run again, from the code and the document that are kept with its run.

    Attributes:
        document: the digest of the document as submitted.
        command: its command, as MLproject has it or a person typed it.
        arguments: parameters of the run that stand in the command.
        env_manager: MLflow's ``--env-manager``, or None.
        size: bytes of the code.
        lacks: why the code is not kept, a sentence; empty: it is.
    """

    document: str
    project: str
    entry: str
    command: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    env_manager: Optional[str] = None
    size: int = 0
    lacks: str = ""


@dataclass(frozen=True)
class Plan:
    """The whole plan.

    Attributes:
        ranks: as many as ``process_count``; one where the framework starts no ranks.
        communication_backend: what ranks of PyTorch are told to use; empty: the framework chooses.
        control_mount: where the control share is mounted, below the cluster's mount root.
        folder_prefix: where job folders lie on the control share.
        log_copy_prefix: where else logs go at the end.
        preparation_cache: the name of what job preparation leaves for later jobs; None: it runs for each.
        board: whether there is an index of what is new (``agent/share/index.py``).
        max_wall_clock_seconds: the time limit of an attempt; 0: none.
        terminate_seconds: between SIGTERM and SIGKILL.
        relay_seconds: how long a tracking server that is away is waited for once the job has ended.
        loss_seconds: a node that is silent for so long is lost.
        umask: of ranks, octal.
        min_nodes: how many nodes are enough for a later attempt; None: all.
        system_metrics: seconds between two samples of a node's meters; None: no samples.
        all_ranks: whether what every rank says by ``mlflow.*`` is kept, not only what rank 0 says.
        secret_names: variables of the document's secrets.
        secret_variables: all variables that agents are told and that stand nowhere.
        wheels: path on the share -> SHA-256 of the Horovod wheels that nodes may install.
        scheduler_options: of a cluster with a scheduler, in its words.
        segment: Batch AI's ``jobOutputDirectoryPathSegment``.
        attempt, retries_left: of the attempt, not in the file.
    """

    protocol: int
    job: str
    framework: str
    node_count: int
    process_count: int
    ranks: int
    command: str
    communication_backend: str = ""
    python: str = ""
    preparation: str = ""
    preparation_cache: Optional[str] = None
    setup_task: Optional[SetupTask] = None
    container: Optional[Container] = None
    environment: Optional[PythonEnvironment] = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[StagedInput, ...] = ()
    code: tuple[CodeFile, ...] = ()
    environment_variables: tuple[Variable, ...] = ()
    secret_names: tuple[str, ...] = ()
    secret_variables: tuple[str, ...] = ()
    input_directories: tuple[InputDirectory, ...] = ()
    output_directories: tuple[OutputDirectory, ...] = ()
    volumes: tuple[Volume, ...] = ()
    control_mount: str = "share"
    folder_prefix: str = ""
    log_copy_prefix: Optional[LogPlace] = None
    board: bool = False
    tools: Mapping[str, Tool] = field(default_factory=dict)
    wheels: Mapping[str, str] = field(default_factory=dict)
    max_wall_clock_seconds: float = 0.0
    terminate_seconds: float = 10.0
    relay_seconds: float = 86400.0
    loss_seconds: float = 60.0
    umask: str = "077"
    retries: int = 0
    min_nodes: Optional[int] = None
    low_priority: bool = False
    gpus_per_node: Optional[int] = None
    oversubscribe: bool = False
    network_interface: Optional[str] = None
    metrics: tuple[MetricRule, ...] = ()
    system_metrics: Optional[float] = None
    all_ranks: bool = False
    artifacts: Artifacts = Artifacts()
    model: Optional[Model] = None
    notify: Optional[Notify] = None
    rerun: Optional[Rerun] = None
    scheduler_options: tuple[str, ...] = ()
    name: str = ""
    cluster: str = ""
    workspace: str = "default"
    experiment: str = "Default"
    experiment_id: str = "0"
    run_id: str = ""
    run_name: str = ""
    run_parameters: Mapping[str, str] = field(default_factory=dict)
    segment: str = ""
    folder: str = ""
    attempt: int = 1
    retries_left: int = 0

    @property
    def is_distributed(self) -> bool:
        """Whether the command runs as ``process_count`` ranks, and not once."""
        return self.framework != CUSTOM

    @property
    def least_nodes(self) -> int:
        return self.min_nodes or self.node_count

    @property
    def may_go_on(self) -> bool:
        """Whether the job may ever start again by itself."""
        return bool(self.retries or self.low_priority)

    def record(self) -> Record:
        whole: Any = Plan
        return {key: plain(getattr(self, name)) for name, key, _, _ in _fields(whole) if name not in _OF_ATTEMPT}


_OF_ATTEMPT = ("attempt", "retries_left")


def read_plan(record: object) -> Plan:
    """The plan that a record is. Raises PlanError: it is none, or one of another protocol that can't be read."""
    try:
        plan = read(Plan, record)
        counts = {"nodeCount": plan.node_count, "processCount": plan.process_count, "ranks": plan.ranks}
        for key, count in counts.items():
            if not 0 < count <= (records.MOST_NODES if key == "nodeCount" else MOST_RANKS):
                raise PlanError(f"{key} is {count}")
        if plan.framework not in FRAMEWORKS:
            raise PlanError(f"framework is '{plan.framework}'")
        if not plan.volumes:
            raise PlanError("volumes is empty")
        if not _UMASK.fullmatch(plan.umask):
            raise PlanError(f"umask is '{plan.umask}'")
        places = {"logCopyPrefix": plan.log_copy_prefix, "setupTask.logs": plan.setup_task and plan.setup_task.logs}
        for key, place in places.items():
            if place and not 0 <= (place.volume or 0) < len(plan.volumes):
                raise PlanError(f"{key}.volume is {place.volume or 0}")
        for index, volume in enumerate(plan.volumes):
            if volume.mounted_by not in MOUNTED_BY:
                raise PlanError(f"volumes[{index}].how is '{volume.mounted_by}'")
    except PlanError as error:
        version = record.get("protocol") if isinstance(record, dict) else None
        if version in (None, PROTOCOL_VERSION):
            raise
        raise PlanError(f"it is of protocol {version}, and this version reads {PROTOCOL_VERSION}") from error
    return plan


def read(part: type[Part], record: object, where: str = "") -> Part:
    """A part of a plan from plain data. Raises PlanError: a key is missing, or has a value of another kind."""
    if not isinstance(record, collections.abc.Mapping):
        raise PlanError("%s is no object" % (where or "the plan"))
    values = {}
    hashable: Any = part  # to mypy a type variable is not
    for name, key, kind, default in _fields(hashable):
        place = f"{where}.{key}" if where else key
        if record.get(key) is not None or (key in record and default is dataclasses.MISSING):
            values[name] = _value(kind, record[key], place)
        elif default is dataclasses.MISSING:
            raise PlanError(f"{place} is missing")
    return part(**values)


@functools.cache
def _fields(part: type[Any]) -> list[tuple[str, str, Any, Any]]:
    """(name, key in the record, type, default or MISSING) of each field."""
    kinds, found = typing.get_type_hints(part), []
    for entry in dataclasses.fields(part):
        factory: Any = entry.default_factory
        default = entry.default if factory is dataclasses.MISSING else factory()
        found.append((entry.name, _key(entry.name), kinds[entry.name], default))
    return found


def _value(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin is Union:  # Optional
        return None if value is None else _value(typing.get_args(kind)[0], value, where)
    if dataclasses.is_dataclass(kind):
        return read(typing.cast("type[Any]", kind), value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise PlanError(f"{where} is no list")
        inner = typing.get_args(kind)[0]
        return tuple(_value(inner, one, f"{where}[{index}]") for index, one in enumerate(value))
    if origin is collections.abc.Mapping:
        if not isinstance(value, collections.abc.Mapping):
            raise PlanError(f"{where} is no object")
        inner = typing.get_args(kind)[1]
        return {_value(str, name, where): _value(inner, one, f"{where}.{name}") for name, one in value.items()}
    if kind in (int, float) and records.is_number(value) and isinstance(value, (int, kind)):
        return kind(value)
    if kind in (int, float) or not isinstance(value, kind):
        raise PlanError(f"{where} has a value of another kind")
    return value


def plain(value: Any) -> Any:
    """A value of a plan as plain data: a part without what is as by default."""
    if dataclasses.is_dataclass(value):
        part: Any = type(value)
        pairs = [(key, getattr(value, name), default) for name, key, _, default in _fields(part)]
        return {key: plain(own) for key, own, default in pairs if default is dataclasses.MISSING or own != default}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, collections.abc.Mapping):
        return {name: plain(one) for name, one in value.items()}
    return value


def _key(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)
