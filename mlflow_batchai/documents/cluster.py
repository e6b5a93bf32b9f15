"""The cluster document: Batch AI's cluster properties, the engine that provides the nodes, and the record beside it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from mlflow_batchai.documents.common import (
    EnvironmentVariable,
    MountVolumes,
    ResourceId,
    Secret,
    SecretReference,
    SlurmSettings,
    check_names,
)
from mlflow_batchai.documents.fields import (
    MOST_NODES,
    AnyCase,
    Count,
    Endpoint,
    NodeCount,
    NonEmpty,
    PathText,
    Seconds,
    SecretText,
    Whole,
    distinct,
    matching,
    wrong,
)
from mlflow_batchai.documents.model import SpecModel, keys_of, parse
from mlflow_batchai.documents.reading import kind, read
from mlflow_batchai.errors import DocumentError

DEFAULT_NODES = 2
NodesOrNone = Annotated[Whole, Field(le=MOST_NODES)]
MOST_GPUS = 1000
Port = Annotated[Count, Field(le=65535)]
NodeFolder = Annotated[str, matching(r"(/|~/)[^\0]*[^/\0]", "be an absolute path, or begin with ~/ (the login's home)")]
ServerFolder = Annotated[str, matching(r"[\w.:\[\]-]+:/\S*", "be host:/folder, as NFS clients write it")]


class Engine(str, Enum):
    """Engine that starts a job's command on the nodes."""

    LOCAL = "local"
    SSH = "ssh"
    SLURM = "slurm"


class ManualScale(SpecModel):
    """A fixed number of nodes."""

    target_node_count: NodesOrNone = 0
    node_deallocation_option: Annotated[
        Literal["requeue", "terminate", "waitforjobcompletion"],
        AnyCase,
    ] = "requeue"


class AutoScale(SpecModel):
    """A number of nodes that follows the queue."""

    minimum_node_count: NodesOrNone
    maximum_node_count: NodesOrNone
    initial_node_count: NodesOrNone = 0


class ScaleSettings(SpecModel):
    """Exactly one of the two ways to scale."""

    alternatives: ClassVar[tuple[str, ...]] = ("manual", "auto_scale")
    manual: ManualScale | None = None
    auto_scale: AutoScale | None = None

    @property
    def nodes(self) -> int:
        """The nodes that take jobs, at most."""
        return self.auto_scale.maximum_node_count if self.auto_scale else self.manual.target_node_count if self.manual else 0


class ImageReference(SpecModel):
    """A marketplace image, or a custom one by its id."""

    publisher: NonEmpty
    offer: NonEmpty
    sku: NonEmpty
    version: str | None = None
    virtual_machine_image_id: str | None = None


class VirtualMachineConfiguration(SpecModel):
    """The image of the nodes."""

    image_reference: ImageReference | None = None


class SetupTask(SpecModel):
    """A command that prepares each node after the mounts; it may run again and must be idempotent."""

    meaningless: ClassVar[frozenset[str]] = frozenset({"runElevated"})
    command_line: NonEmpty
    std_out_err_path_prefix: PathText
    environment_variables: tuple[EnvironmentVariable, ...] = ()
    secrets: tuple[Secret, ...] = ()

    @model_validator(mode="after")
    def _distinct_names(self) -> SetupTask:
        check_names(self.environment_variables, self.secrets)
        return self


class AppInsightsReference(SpecModel):
    """Where performance counters went."""

    component: ResourceId
    instrumentation_key: SecretText | None = None
    instrumentation_key_secret_reference: SecretReference | None = None


class PerformanceCountersSettings(SpecModel):
    """Performance counters of the nodes."""

    app_insights_reference: AppInsightsReference


class NodeSetup(SpecModel):
    """Steps of each node before it takes jobs: mounts, then the setup task."""

    mount_volumes: MountVolumes = MountVolumes()
    setup_task: SetupTask | None = None
    performance_counters_settings: PerformanceCountersSettings | None = None


class UserAccountSettings(SpecModel):
    """The administrator of the nodes."""

    admin_user_name: NonEmpty
    admin_user_ssh_public_key: str | None = None
    admin_user_password: SecretText | None = None


class ShareCredentials(SpecModel):
    """Credentials of an Azure control share: the account's key, or a SAS that may read, create, write, delete and list."""

    alternatives: ClassVar[tuple[str, ...]] = ("account_key", "sas_token")
    account_key: SecretText | None = None
    sas_token: SecretText | None = None


class HostEntry(SpecModel):
    """One node that is reached over SSH.

    ``host`` is ``[user@]name[:port]``, where the name may be one of ``~/.ssh/config``; what stands here wins over what the
    document says for all.
    """

    host: NonEmpty
    user: NonEmpty | None = None
    port: Port | None = None
    key_file: NonEmpty | None = None
    root: NodeFolder | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        return {"host": data} if isinstance(data, str) else data


def _nodes(earlier: dict[str, Any]) -> int:
    """Nodes where the document doesn't say: its manual target, its automatic maximum, else two."""
    if earlier.get("engine") is Engine.SLURM:
        return MOST_NODES  # Slurm knows
    scale: ScaleSettings | None = None if earlier.get("hosts") else earlier.get("scale_settings")
    if scale:
        return scale.nodes or DEFAULT_NODES
    return len(earlier.get("hosts") or ()) or DEFAULT_NODES


class RemoteKeys(SpecModel):
    """Keys of clusters whose nodes are other machines."""

    key_file: NonEmpty | None = None
    known_hosts: NonEmpty | None = None
    jump_host: NonEmpty | None = None
    root: NodeFolder | None = None
    agent_python: NonEmpty = "python3"
    share_on_nodes: Annotated[str, matching(r"/[^\0]*", "be an absolute path")] | None = None


class SshKeys(RemoteKeys):
    """Keys that a cluster document has only with ``engine: ssh``."""

    hosts: Annotated[tuple[HostEntry, ...], Field(max_length=MOST_NODES), distinct("host", lambda entry: entry.host)] = ()
    user: NonEmpty | None = None
    port: Port | None = None


class SlurmKeys(SlurmSettings, RemoteKeys):
    """Keys that a cluster document has only with ``engine: slurm``; ``SlurmSettings`` has those that a job may have, too."""

    login: NonEmpty | None = None
    exclusive: bool = False
    time_margin: Seconds = timedelta(minutes=10)


# The keys that only some engines have.
KEYS_OF: Mapping[Engine, type[SpecModel]] = {Engine.SSH: SshKeys, Engine.SLURM: SlurmKeys}


class ClusterDocument(SshKeys, SlurmKeys):
    """A named set of nodes. Nothing is required: an empty document is a local cluster of two nodes.

    Batch AI's keys may stand under ``properties`` or beside our own; both read the same (`parse_cluster`). docs/clusters.md has
    ours. ``nodes`` follows scaleSettings if absent, where a target of 0 is taken as not given.
    """

    # blobMount of earlier documents: rclone mounts blob containers, whatever it says.
    meaningless: ClassVar[frozenset[str]] = frozenset({"type", "name", "id", "tags", "blobMount"})

    location: NonEmpty | None = None
    vm_size: str | None = None
    vm_priority: Annotated[Literal["dedicated", "lowpriority"], AnyCase] = "dedicated"
    scale_settings: ScaleSettings | None = None
    virtual_machine_configuration: VirtualMachineConfiguration | None = None
    node_setup: NodeSetup = NodeSetup()
    user_account_settings: UserAccountSettings | None = None
    subnet: ResourceId | None = None

    engine: Annotated[Engine, AnyCase] = Engine.LOCAL
    nodes: NodeCount = Field(default_factory=_nodes)
    python: NonEmpty | None = None
    share: NonEmpty | None = None
    credentials: ShareCredentials | None = None
    mount: Annotated[Literal["folder", "rclone", "cifs", "bind"], AnyCase] | None = None
    mounted_at: dict[NonEmpty, NodeFolder] = Field(default_factory=dict)
    file_endpoint: Endpoint | None = None
    blob_endpoint: Endpoint | None = None
    file_servers: dict[NonEmpty, ServerFolder] = Field(default_factory=dict)
    containers: Annotated[Literal["run", "apptainer", "ignore"], AnyCase] = "run"
    gpus_per_node: Annotated[Whole, Field(le=MOST_GPUS)] | None = None
    oversubscribe: bool = False
    network_interface: NonEmpty | None = None

    @model_validator(mode="after")
    def _fits_its_engine(self) -> ClusterDocument:
        if self.mounted_at and self.mount != "bind":
            raise wrong("has mountedAt, which needs mount: bind")
        if self.credentials and not (self.share or "").startswith(("https://", "http://")):
            raise wrong("has credentials, which belong to an Azure share (share: https://ACCOUNT.file.core.windows.net/SHARE)")
        owners: dict[str, list[Engine]] = {}
        for engine, keys in KEYS_OF.items():
            for key, name in keys_of(keys).items():
                if name in self.model_fields_set:
                    owners.setdefault(key, []).append(engine)
        for key, engines in owners.items():
            if self.engine not in engines:
                raise wrong(f"has {key}, which needs engine: {' or '.join(engine.value for engine in engines)}")
        if self.engine is Engine.SSH:
            self._check_ssh()
        if self.engine is Engine.SLURM and (self.share or "http").startswith("http"):
            raise wrong("has engine: slurm, which needs share: a folder that Slurm's nodes and this machine see")
        return self

    def _check_ssh(self) -> None:
        if not self.hosts:
            raise wrong("has engine: ssh and no hosts; name the nodes: hosts: [10.0.0.4, 10.0.0.5]")
        if not self.share:
            raise wrong(
                "has engine: ssh and no share; name the folder that this machine and the nodes share, or an Azure file share"
            )
        if self.share_on_nodes and self.share.startswith(("https://", "http://")):
            raise wrong("has shareOnNodes, which an Azure share has no use for; drop it")
        if "nodes" in self.model_fields_set and self.nodes != len(self.hosts):
            raise wrong(f"says nodes: {self.nodes} and names {len(self.hosts)} hosts; drop nodes")

    @classmethod
    def local(cls, nodes: int = DEFAULT_NODES) -> ClusterDocument:
        """The cluster that is used when nobody described one: this machine, as ``nodes`` nodes."""
        return cls(engine=Engine.LOCAL, nodes=nodes)


def load_cluster(path: str | Path) -> tuple[ClusterDocument, list[str]]:
    """A cluster document from a JSON or YAML file, and warnings. Raises DocumentError."""
    return parse_cluster(read(path), str(path))


def parse_cluster(data: object, source: str) -> tuple[ClusterDocument, list[str]]:
    """A cluster document from plain data, with Batch AI's keys under ``properties`` or at the top."""
    if not isinstance(data, Mapping) or "properties" not in data:
        return parse(ClusterDocument, data, source)
    inner = {} if data["properties"] is None else data["properties"]
    if not isinstance(inner, Mapping):
        raise DocumentError(f"{source}: properties must be a mapping, not {kind(inner)}")
    outer = {key: value for key, value in data.items() if key != "properties"}
    twice = [key for key in keys_of(ClusterDocument) if key in inner and key in outer]
    if twice:
        raise DocumentError(f"{source}: {twice[0]} is given both under properties and beside it; keep one")
    under = {str(key): "properties" for key in inner}
    return parse(ClusterDocument, {**inner, **outer}, source, under)


class ClusterRecord(SpecModel):
    """Changing facts of a cluster: its workspace, creation time and number of nodes.

    It lies beside the document, and only ``batchai`` writes it; a hand-written document has none. ``nodes`` is what a
    local cluster has been made larger to than its document says; ``allocation_time`` is when the number of its nodes was
    last changed (both times ISO 8601, UTC).
    """

    workspace: NonEmpty = "default"
    resource_group: NonEmpty = "batchai"
    location: NonEmpty = "local"
    creation_time: str | None = None
    scale_settings: ScaleSettings | None = None
    nodes: NodeCount | None = None
    allocation_time: str | None = None
