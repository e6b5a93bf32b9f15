"""The job document of Batch AI, API 2018-05-01: ``{"$schema": ..., "properties": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, model_validator
from pydantic.alias_generators import to_camel

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
    AnyCase,
    Duration,
    NodeCount,
    NonEmpty,
    PathText,
    Processes,
    SecretText,
    Text,
    distinct,
    fits_a_path,
    matching,
    wrong,
)
from mlflow_batchai.documents.model import SpecModel, key_of, keys_of, parse
from mlflow_batchai.errors import DocumentError
from mlflow_batchai.terminal import Notice


class FrameworkSettings(SpecModel):
    """What to start, how many times, with which arguments.

    Every field is optional, since an MLflow project supplies its own command. ``programs`` are the fields of which a
    block that stands alone has exactly one (`require_complete`). ``counts`` are the fields that say how the program is
    spread; all others say what the program is.
    """

    programs: ClassVar[tuple[str, ...]] = ("python_script_file_path",)
    counts: ClassVar[frozenset[str]] = frozenset(
        {"process_count", "worker_count", "parameter_server_count", "communication_backend"}
    )


class _Script(FrameworkSettings):
    python_script_file_path: NonEmpty | None = None
    python_interpreter_path: NonEmpty | None = None


class ScriptProcesses(_Script):
    """A Python script, started ``process_count`` times."""

    command_line_args: Text | None = None
    process_count: Processes | None = None


class _ScriptOrConfiguration(ScriptProcesses):
    programs: ClassVar[tuple[str, ...]] = ("config_file_path", "python_script_file_path")
    config_file_path: NonEmpty | None = None


class HorovodSettings(ScriptProcesses):
    """A Python script started by mpirun; ``process_count`` is all processes, by default one a node."""


class CustomMpiSettings(FrameworkSettings):
    """A command line, written without mpirun, that mpirun starts ``process_count`` times."""

    programs: ClassVar[tuple[str, ...]] = ("command_line",)
    command_line: NonEmpty | None = None
    process_count: Processes | None = None


class CustomToolkitSettings(FrameworkSettings):
    """A command line that runs once, on one node, and starts whatever else it needs by itself."""

    programs: ClassVar[tuple[str, ...]] = ("command_line",)
    meaningless: ClassVar[frozenset[str]] = frozenset({"processCount"})
    command_line: NonEmpty | None = None


class TensorFlowSettings(_Script):
    """Distributed TensorFlow with parameter servers; ``worker_count`` is by default the number of nodes."""

    master_command_line_args: Text | None = None
    worker_command_line_args: Text | None = None
    parameter_server_command_line_args: Text | None = None
    worker_count: Processes | None = None
    parameter_server_count: Processes | None = None


class PyTorchSettings(ScriptProcesses):
    """torch.distributed processes; the backend is read in any case and kept in lower case. Batch AI knew no nccl."""

    communication_backend: Annotated[Literal["tcp", "gloo", "mpi", "nccl"], AnyCase] | None = None


class CntkSettings(_ScriptOrConfiguration):
    """CNTK: a BrainScript ``config_file_path`` or a Python script, from which ``language_type`` follows."""

    language_type: Annotated[Literal["Python", "BrainScript"], AnyCase] | None = None


class CaffeSettings(_ScriptOrConfiguration):
    """Caffe: a solver's ``config_file_path`` or a Python script."""


class Caffe2Settings(_Script):
    """Caffe2: a Python script, started once a node."""

    command_line_args: Text | None = None


class ChainerSettings(ScriptProcesses):
    """ChainerMN: a Python script started by mpirun."""


class RegistryCredentials(SpecModel):
    """A user of a private registry, with a password or a Key Vault reference to it."""

    alternatives: ClassVar[tuple[str, ...]] = ("password", "password_secret_reference")
    username: NonEmpty
    password: SecretText | None = None
    password_secret_reference: SecretReference | None = None


class ImageSourceRegistry(SpecModel):
    """An image; with a ``server_url`` of its own the image's name must be fully qualified."""

    server_url: NonEmpty | None = None
    image: NonEmpty
    credentials: RegistryCredentials | None = None


class ContainerSettings(SpecModel):
    """The job's container; ``shm_size`` is Docker's form (``16gb``)."""

    image_source_registry: ImageSourceRegistry
    shm_size: Annotated[str, matching(r"\d+(?i:[bkmg]b?)?", "be a size as Docker writes it, such as '16gb'")] | None = None


DirectoryId = Annotated[str, matching(r"[A-Za-z0-9_]+", "have only letters, digits and '_', as it becomes a variable")]


class JobPreparation(SpecModel):
    """A shell command line that runs on every node before the job, in the job's container if there is one."""

    command_line: NonEmpty


class InputDirectory(SpecModel):
    """A path that the job sees as AZ_BATCHAI_INPUT_<id>."""

    id: DirectoryId
    path: PathText


class OutputDirectory(SpecModel):
    """A directory made for the job below ``path_prefix``, which it sees as AZ_BATCHAI_OUTPUT_<id>."""

    meaningless: ClassVar[frozenset[str]] = frozenset({"type", "createNew"})
    id: Annotated[DirectoryId, matching("(?!stdouterr$).*", "not be the id of the job's own log directory")]
    path_prefix: PathText
    path_suffix: Annotated[str, AfterValidator(fits_a_path)] | None = None


class JobConstraints(SpecModel):
    """Limits of a job; Batch AI's own limit was 7 days."""

    max_wall_clock_time: Duration | None = None


class JobProperties(SpecModel):
    """All of a job. Nothing is required here: see `require_complete` and `forbid_program`."""

    meaningless: ClassVar[frozenset[str]] = frozenset(
        {"location", "type", "toolType", "experimentName", "name", "id", "priority", "tags"}
    )

    cluster: ResourceId | None = None
    node_count: NodeCount | None = None
    std_out_err_path_prefix: PathText | None = None
    scheduling_priority: Annotated[Literal["low", "normal", "high"], AnyCase] = "normal"
    mount_volumes: MountVolumes = MountVolumes()
    container_settings: ContainerSettings | None = None
    horovod_settings: HorovodSettings | None = None
    custom_mpi_settings: CustomMpiSettings | None = None
    custom_toolkit_settings: CustomToolkitSettings | None = None
    tensor_flow_settings: TensorFlowSettings | None = None
    py_torch_settings: PyTorchSettings | None = None
    cntk_settings: CntkSettings | None = None
    caffe_settings: CaffeSettings | None = None
    caffe2_settings: Caffe2Settings | None = None
    chainer_settings: ChainerSettings | None = None
    job_preparation: JobPreparation | None = None
    input_directories: Annotated[tuple[InputDirectory, ...], distinct("id", lambda entry: entry.id)] = ()
    output_directories: Annotated[tuple[OutputDirectory, ...], distinct("id", lambda entry: entry.id)] = ()
    environment_variables: tuple[EnvironmentVariable, ...] = ()
    secrets: tuple[Secret, ...] = ()
    constraints: JobConstraints = JobConstraints()

    @model_validator(mode="before")
    @classmethod
    def _no_empty_block(cls, data: Any) -> Any:
        """A lone ``horovodSettings:`` in YAML is meant as a block; a null beside a block is an absent one."""
        if isinstance(data, Mapping):
            blocks = [key for key in FRAMEWORKS if key in data]
            if len(blocks) == 1 and data[blocks[0]] is None:
                raise wrong(f"has an empty {blocks[0]}; write '{blocks[0]}: {{}}' for a block without settings")
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> JobProperties:
        blocks = [key for key, name in FRAMEWORKS.items() if getattr(self, name) is not None]
        if len(blocks) > 1:
            raise wrong(f"has {' and '.join(blocks)}; a job has one framework block")
        check_names(self.environment_variables, self.secrets)
        return self

    @property
    def framework(self) -> tuple[str, FrameworkSettings] | None:
        """The framework block as (key, settings), the key as in `FRAMEWORKS`; None if there is none."""
        for key, name in FRAMEWORKS.items():
            settings: FrameworkSettings | None = getattr(self, name)
            if settings is not None:
                return key, settings
        return None


FRAMEWORKS = {
    to_camel(name): name for name in JobProperties.model_fields if name.endswith("_settings") and name != "container_settings"
}
"""Key of each framework block -> the attribute of `JobProperties` that holds it."""


class JobDocument(SpecModel):
    """A whole job file; ``slurm`` is ours: what a cluster of that engine is asked for besides."""

    meaningless: ClassVar[frozenset[str]] = JobProperties.meaningless
    properties: JobProperties
    slurm: SlurmSettings = SlurmSettings()


def parse_job(data: object, source: str) -> tuple[JobDocument, list[str]]:
    """A job document from plain data, and warnings, which also tell of output directories that are one folder.

    Does not ask for completeness: `require_complete` and `forbid_program` do. Job properties outside
    ``properties`` are refused: Batch AI ignored such a document without a word.
    """
    if isinstance(data, Mapping) and "properties" not in data and keys_of(JobProperties).keys() & data.keys():
        raise DocumentError(f"{source}: the job's keys must stand under 'properties': {{\"properties\": {{...}}}}")
    document, warnings = parse(JobDocument, data, source)
    return document, warnings + [Notice(f"{source}: {note}") for note in shared_outputs(document.properties)]


def require_complete(properties: JobProperties, source: str) -> None:
    """Raise DocumentError unless the job can run as it stands: nodeCount, log prefix, and one framework block
    with its program. ``source`` names the file in the message."""
    lacking = [
        key_of(JobProperties, name) for name in ("node_count", "std_out_err_path_prefix") if getattr(properties, name) is None
    ]
    if properties.framework is None:
        lacking.append(f"a framework block ({', '.join(FRAMEWORKS)})")
    else:
        key, settings = properties.framework
        if not any(getattr(settings, name) for name in settings.programs):
            lacking.append(f"{key}.{' or '.join(key_of(type(settings), name) for name in settings.programs)}")
    if lacking:
        raise DocumentError(f"{source}: properties lacks {_listed(lacking)}; a job that stands alone needs it")


def forbid_program(properties: JobProperties, source: str) -> None:
    """Raise DocumentError if the framework block names a program, arguments or an interpreter of its own.

    For runs of an MLflow project, where the entry point's command is the program. Numbers of processes, the
    communication backend and jobPreparation are fine.
    """
    if properties.framework is None:
        return
    key, settings = properties.framework
    model = type(settings)
    given = [
        key_of(model, name) for name in model.model_fields if name not in model.counts and getattr(settings, name) is not None
    ]
    if given:
        raise DocumentError(
            f"{source}: properties.{key} names {_listed(given)}, but the program of this run is the "
            f"MLproject's command; drop {'it' if len(given) == 1 else 'them'} from {key}"
        )


def shared_outputs(properties: JobProperties) -> list[str]:
    """One sentence for each output directory that is the same folder as an earlier one.

    The path holds prefix and suffix but not the id, so equal ones meet.
    """
    first: dict[tuple[str, str], str] = {}
    notes = []
    for entry in properties.output_directories:
        place = (entry.path_prefix.rstrip("/"), (entry.path_suffix or "").strip("/"))
        if place in first:
            notes.append(
                f"outputDirectories {first[place]} and {entry.id} are the same folder; give them different values of pathSuffix"
            )
        first.setdefault(place, entry.id)
    return notes


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
