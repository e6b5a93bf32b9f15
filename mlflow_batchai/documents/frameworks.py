"""The nine framework blocks of a job: what starts, how many times, with which arguments.

Every field is optional here, since an MLflow project supplies its own command; `job.require_complete` asks a
document that stands alone for its program.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import model_validator

from mlflow_batchai.documents.base import Count, NonEmpty, SpecModel, Text, any_case, wrong


class FrameworkSettings(SpecModel):
    """Common base. ``programs``: the fields of which a complete block has exactly one."""

    programs: ClassVar[tuple[str, ...]] = ("python_script_file_path",)
    counts: ClassVar[frozenset[str]] = frozenset(
        {"process_count", "worker_count", "parameter_server_count", "communication_backend"}
    )
    """Fields that say how the program is spread; all others say what the program is."""

    @model_validator(mode="after")
    def _one_program(self) -> FrameworkSettings:
        given = [name for name in self.programs if getattr(self, name) is not None]
        if len(given) > 1:
            raise wrong("has both configFilePath and pythonScriptFilePath; keep one")
        return self


class HorovodSettings(FrameworkSettings):
    """A Python script started by mpirun; ``process_count`` is all processes, by default one a node."""

    python_script_file_path: NonEmpty | None = None
    python_interpreter_path: NonEmpty | None = None
    command_line_args: Text | None = None
    process_count: Count | None = None


class CustomMpiSettings(FrameworkSettings):
    """A command line, written without mpirun, that mpirun starts ``process_count`` times."""

    programs: ClassVar[tuple[str, ...]] = ("command_line",)
    command_line: NonEmpty | None = None
    process_count: Count | None = None


class CustomToolkitSettings(FrameworkSettings):
    """A command line that runs once, on one node, and starts whatever else it needs by itself."""

    programs: ClassVar[tuple[str, ...]] = ("command_line",)
    meaningless: ClassVar[frozenset[str]] = frozenset({"processCount"})
    command_line: NonEmpty | None = None


class TensorFlowSettings(FrameworkSettings):
    """Distributed TensorFlow with parameter servers; ``worker_count`` is by default the number of nodes."""

    python_script_file_path: NonEmpty | None = None
    python_interpreter_path: NonEmpty | None = None
    master_command_line_args: Text | None = None
    worker_command_line_args: Text | None = None
    parameter_server_command_line_args: Text | None = None
    worker_count: Count | None = None
    parameter_server_count: Count | None = None


class PyTorchSettings(FrameworkSettings):
    """torch.distributed processes; the backend is read in any case and kept in lower case."""

    python_script_file_path: NonEmpty | None = None
    python_interpreter_path: NonEmpty | None = None
    command_line_args: Text | None = None
    process_count: Count | None = None
    communication_backend: Annotated[Literal["tcp", "gloo", "mpi"], any_case("tcp", "gloo", "mpi")] | None = None


class CntkSettings(FrameworkSettings):
    """CNTK: a BrainScript ``config_file_path`` or a Python script, from which ``language_type`` follows."""

    programs: ClassVar[tuple[str, ...]] = ("config_file_path", "python_script_file_path")
    language_type: Annotated[Literal["Python", "BrainScript"], any_case("Python", "BrainScript")] | None = None
    config_file_path: NonEmpty | None = None
    python_script_file_path: NonEmpty | None = None
    python_interpreter_path: NonEmpty | None = None
    command_line_args: Text | None = None
    process_count: Count | None = None

    @model_validator(mode="after")
    def _language_fits(self) -> CntkSettings:
        if self.language_type == "Python" and self.config_file_path:
            raise wrong("has a configFilePath, which languageType 'Python' doesn't read")
        if self.language_type == "BrainScript" and self.python_script_file_path:
            raise wrong("has a pythonScriptFilePath, which languageType 'BrainScript' doesn't read")
        return self


class CaffeSettings(FrameworkSettings):
    """Caffe: a solver's ``config_file_path`` or a Python script."""

    programs: ClassVar[tuple[str, ...]] = ("config_file_path", "python_script_file_path")
    config_file_path: NonEmpty | None = None
    python_script_file_path: NonEmpty | None = None
    python_interpreter_path: NonEmpty | None = None
    command_line_args: Text | None = None
    process_count: Count | None = None


class Caffe2Settings(FrameworkSettings):
    """Caffe2: a Python script, started once a node."""

    python_script_file_path: NonEmpty | None = None
    python_interpreter_path: NonEmpty | None = None
    command_line_args: Text | None = None


class ChainerSettings(FrameworkSettings):
    """ChainerMN: a Python script started by mpirun."""

    python_script_file_path: NonEmpty | None = None
    python_interpreter_path: NonEmpty | None = None
    command_line_args: Text | None = None
    process_count: Count | None = None


FRAMEWORKS: dict[str, str] = {
    "horovodSettings": "horovod_settings",
    "customMpiSettings": "custom_mpi_settings",
    "customToolkitSettings": "custom_toolkit_settings",
    "tensorFlowSettings": "tensor_flow_settings",
    "pyTorchSettings": "py_torch_settings",
    "cntkSettings": "cntk_settings",
    "caffeSettings": "caffe_settings",
    "caffe2Settings": "caffe2_settings",
    "chainerSettings": "chainer_settings",
}
"""Key of each framework block -> the attribute of `JobProperties` that holds it."""
