"""Parts that job and cluster documents share: volumes, environment variables, secrets, Azure's references."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, SecretStr, model_validator

from mlflow_batchai.agent.plan import Notify
from mlflow_batchai.documents.fields import NonEmpty, RelativePath, SecretText, Text, distinct, matching, refuse_repeats, wrong
from mlflow_batchai.documents.model import SpecModel, exactly_one

FileMode = Annotated[str, matching(r"[0-7]{3,4}", "be an octal mode in quotes, such as '0777'")]
VariableName = Annotated[str, matching(r"[^=\s\0]+", "be a variable's name, without spaces or '='")]


class ResourceId(SpecModel):
    """A reference to an Azure resource by its ARM id."""

    id: NonEmpty

    @property
    def name(self) -> str:
        """The last segment of the id: the resource's own name."""
        return self.id.rstrip("/").rsplit("/", 1)[-1]


class SecretReference(SpecModel):
    """A secret in an Azure Key Vault."""

    source_vault: ResourceId
    secret_url: NonEmpty


class EnvironmentVariable(SpecModel):
    """A variable for the job and its preparation; a bare number as value is taken as its text."""

    name: VariableName
    value: Text


class Secret(SpecModel):
    """A variable whose value is never stored or shown: given here, or by a Key Vault reference."""

    alternatives: ClassVar[tuple[str, ...]] = ("value", "value_secret_reference")
    name: VariableName
    value: SecretText | None = None
    value_secret_reference: SecretReference | None = None


def check_names(variables: tuple[EnvironmentVariable, ...], secrets: tuple[Secret, ...]) -> None:
    """Raise if two variables or secrets share a name: which one would win was never documented."""
    names = [variable.name for variable in variables] + [secret.name for secret in secrets]
    refuse_repeats(names, "environment variable or secret")


# Options that make several jobs of one, send it elsewhere, change what sbatch does and says, or have Slurm wait for ever (tasks
# that are no task a node); as beginnings, too, and among short ones that take no value.
_OTHERS = "|".join(
    word[:end]
    for word in ("array", "clusters", "ntasks", "parsable", "quiet", "test-only", "wait", "wrap")
    for end in range(len(word) + 1)
)
SchedulerOption = Annotated[
    str,
    matching(
        rf"-(?!-({_OTHERS})(=|$)|[HIkOsuv]*[aMnQW])[^\0\n]+", "be an option of sbatch for one job, such as --constraint=ib"
    ),
]


class SlurmSettings(SpecModel):
    """What Slurm is asked for besides nodes: of a cluster, or (``slurm`` in a job's documents) over that for one job."""

    partition: NonEmpty | None = None
    account: NonEmpty | None = None
    qos: NonEmpty | None = None
    gres: NonEmpty | None = None
    options: tuple[SchedulerOption, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """Options of sbatch."""
        names = [name for name in SlurmSettings.model_fields if name != "options"]
        return (*(f"--{name}={value}" for name in names if (value := getattr(self, name))), *self.options)


NAMED_SECRET = re.compile(r"\$\{(\w+)\}")
# An address that is no secret itself: it names some, and has a host besides.
PUBLIC_URL = re.compile(r"(?:https?://[^\s/?#@$]+/)?(?:\$\{\w+\}/?)+")
# The name of a URL that is written out.
NOTIFY_URL = "NOTIFY_URL"


def _secret_unless_named(value: Any) -> Any:
    if not isinstance(value, str) or not re.match(r"https?://\S|\$\{\w+\}|\*{10}$", value):
        raise wrong("must be an address (https://...), or name a secret that has it: ${NAME}")
    if PUBLIC_URL.fullmatch(value):
        return value
    if NAMED_SECRET.search(value):
        raise wrong("has a part of the address beside ${NAME}, which may be a secret; put all behind the host into the secrets")
    return SecretStr(value)


def _words(value: Any) -> Any:
    try:
        return shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise wrong(f"can't be split into words: {error}") from None


class NotifySettings(SpecModel):
    """News of a job's end: to ``url`` by a JSON POST, ``command`` by being run where the job was submitted.

    A URL that is written out is a secret. One that names secrets (``${NAME}``) is none itself.
    """

    url: Annotated[str | SecretStr, BeforeValidator(_secret_unless_named)] | None = None
    on: Annotated[tuple[Literal["failed", "succeeded", "terminated"], ...], distinct("end")] = ("failed", "succeeded")
    command: Annotated[tuple[NonEmpty, ...], BeforeValidator(_words)] = ()

    @model_validator(mode="after")
    def _tells_somebody(self) -> NotifySettings:
        if self.on and not (self.url or self.command):
            raise wrong("needs url or command (or on: [], which tells nobody)")
        return self

    @property
    def planned(self) -> Notify:
        """The part of the plan that it is; it holds no secret."""
        url = f"${{{NOTIFY_URL}}}" if isinstance(self.url, SecretStr) else self.url or ""
        return Notify(url, self.on, self.command)

    @property
    def written_out(self) -> dict[str, str]:
        """The URL by its name, if it is written out."""
        return {NOTIFY_URL: self.url.get_secret_value()} if isinstance(self.url, SecretStr) else {}


class StorageCredentials(SpecModel):
    """The key of a storage account, or a Key Vault reference to it."""

    account_key: SecretText | None = None
    account_key_secret_reference: SecretReference | None = None

    @model_validator(mode="after")
    def _one_source(self) -> StorageCredentials:
        if not self.model_fields_set:
            raise wrong("is empty; give accountKey, or leave it out for the environment's")
        exactly_one(self, "account_key", "account_key_secret_reference")
        return self


# As Azure's own samples have it.
_OLDER = {"credentialsInfo": "credentials"}


class AzureFileShare(SpecModel):
    """An Azure file share, or a folder of one, mounted over SMB.

    ``account_name`` and ``credentials`` may be absent: `az batchai` filled them in, and its placeholders
    ``<AZURE_BATCHAI_STORAGE_ACCOUNT>`` (also inside the URL) and ``<AZURE_BATCHAI_STORAGE_KEY>``.
    """

    older: ClassVar[Mapping[str, str]] = _OLDER
    account_name: NonEmpty | None = None
    azure_file_url: NonEmpty
    credentials: StorageCredentials | None = None
    relative_mount_path: RelativePath
    file_mode: FileMode = "0777"
    directory_mode: FileMode = "0777"


class AzureBlobFileSystem(SpecModel):
    """A blob container; account and credentials may be absent as for file shares.

    ``mount_options`` were blobfuse's: rclone mounts it, and a line in the job's log says that they have no effect.
    """

    older: ClassVar[Mapping[str, str]] = _OLDER
    account_name: NonEmpty | None = None
    container_name: NonEmpty
    credentials: StorageCredentials | None = None
    relative_mount_path: RelativePath
    mount_options: str | None = None


class FileServer(SpecModel):
    """An NFS server; without a ``source_directory`` all of it is mounted."""

    file_server: ResourceId
    relative_mount_path: RelativePath
    source_directory: str | None = None
    mount_options: str | None = None


class UnmanagedFileSystem(SpecModel):
    """Anything else: a mount command to which the mount path is appended."""

    mount_command: NonEmpty
    relative_mount_path: RelativePath


class MountVolumes(SpecModel):
    """File systems to mount below one root, each at a path of its own."""

    azure_file_shares: tuple[AzureFileShare, ...] = ()
    azure_blob_file_systems: tuple[AzureBlobFileSystem, ...] = ()
    file_servers: tuple[FileServer, ...] = ()
    unmanaged_file_systems: tuple[UnmanagedFileSystem, ...] = ()

    @model_validator(mode="after")
    def _distinct_paths(self) -> MountVolumes:
        refuse_repeats((volume.relative_mount_path.strip("/") for volume in self.all), "relativeMountPath")
        return self

    @property
    def all(self) -> tuple[AzureFileShare | AzureBlobFileSystem | FileServer | UnmanagedFileSystem, ...]:
        """Every volume: file shares, blob containers, file servers, then unmanaged ones."""
        return (*self.azure_file_shares, *self.azure_blob_file_systems, *self.file_servers, *self.unmanaged_file_systems)
