"""Read MLflow's MLproject file with errors as sentences; MLflow's own reader fails with tracebacks.

The meaning is MLflow's (``mlflow/projects/_project_spec.py`` of 3.17): names of entry points, parameter defaults, environment
files, and scripts as entry points.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow_batchai.documents.command import LONGEST_NAME, UNFIT, interpreter_flags, parameters
from mlflow_batchai.documents.fields import unfit
from mlflow_batchai.documents.model import refuse_unfit
from mlflow_batchai.documents.reading import read
from mlflow_batchai.errors import ParameterError, ProjectError
from mlflow_batchai.terminal import printable

SCRIPTS = {".py": "python", ".sh": "bash"}
TYPES = ("string", "float", "int", "bool", "path", "uri")
_WORDS = {"str": "string", "integer": "int", "boolean": "bool", "number": "float", "double": "float"}
BOOLEANS = ("true", "1", "yes", "on", "false", "0", "no", "off")
# Type -> what raises ValueError for a text that is no value of it, and what is wanted; a string or a path is any text.
_READERS: dict[str, tuple[Callable[[str], object], str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (lambda text: BOOLEANS.index(text.lower()), "true or false"),
    "uri": (lambda text: text.index(":"), "a URI"),
}


@dataclass(frozen=True)
class Parameter:
    """One declared parameter; ``type`` is one of TYPES."""

    name: str
    type: str
    default: str | None


@dataclass(frozen=True)
class EntryPoint:
    """A command and its parameters; ``declared`` is False for a script that was named instead.

    ``arguments`` are parameters of the run that already stand in the command.
    """

    name: str
    command: str
    parameters: Mapping[str, Parameter]
    declared: bool = True
    arguments: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MLProject:
    """A project folder and what its MLproject says; ``source`` names the file in messages.

    ``docker_env`` is as it stands there (``image``, ``volumes``, ``environment``), checked for its types as MLflow does.
    """

    directory: Path
    source: str
    name: str
    entry_points: Mapping[str, EntryPoint]
    python_env: Path | None = None
    conda_env: Path | None = None
    docker_env: Mapping[str, Any] | None = None
    batchai: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Value:
    """A parameter's value: ``text`` is what the user gave or the default, as MLflow gets it."""

    parameter: Parameter
    text: str
    given: bool
    extra: bool = False


def _wrong(sentence: str) -> ProjectError:
    """The error of that sentence, whatever names the file has."""
    return ProjectError(printable(sentence))


def load_project(directory: Path) -> MLProject:
    """The project in a folder; one without an MLproject file has no entry points but its scripts.

    Raises:
        ProjectError: a key isn't what it should be, or an environment file that it names is missing.
        DocumentError: the file is no YAML.
    """
    path = next((entry for entry in sorted(directory.iterdir()) if entry.name.lower() == "mlproject"), None)
    data = read(path) if path else {}
    source = str(path or directory)
    refuse_unfit(data, source)
    environments = [key for key in ("python_env", "conda_env", "docker_env") if data.get(key)]
    if len(environments) > 1:
        raise _wrong(f"{source}: {' and '.join(environments)} are given; a project has one environment")
    python_env = _environment_file(directory, source, data, "python_env", None if environments else "python_env.yaml")
    entries = data.get("entry_points") or {}
    if not isinstance(entries, Mapping):
        raise _wrong(f"{source}: entry_points should map names to entry points")
    block = data.get("batchai")
    if block is not None and not isinstance(block, Mapping):
        raise _wrong(f"{source}: batchai should be a mapping, as in batchai.yaml")
    return MLProject(
        directory,
        source,
        str(data.get("name") or "").strip() or directory.resolve().name,
        {str(name): _entry_point(source, str(name), entry) for name, entry in entries.items()},
        python_env,
        None if python_env else _environment_file(directory, source, data, "conda_env", None if environments else "conda.yaml"),
        _docker_env(source, data.get("docker_env")),
        block,
    )


def _docker_env(source: str, value: object) -> Mapping[str, Any] | None:
    """``docker_env``, with MLflow's own rules; one that is empty is none."""
    if not value:
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("image"), str) or not value["image"].strip():
        raise _wrong(f"{source}: docker_env should name an image: docker_env: {{image: user/name:tag}}")
    volumes, environment = value.get("volumes") or [], value.get("environment") or []
    if not isinstance(volumes, list) or not all(isinstance(entry, str) for entry in volumes):
        raise _wrong(f"{source}: docker_env.volumes should be a list of texts such as '/data:/data'")
    if not isinstance(environment, list) or not all(map(_is_variable, environment)):
        raise _wrong(
            f"{source}: docker_env.environment should be a list of names to copy from here, and of pairs [NAME, value]"
        )
    if unknown := sorted(set(map(str, value)) - {"image", "volumes", "environment"}):
        raise _wrong(f"{source}: docker_env has the unknown key '{unknown[0]}'; it takes image, volumes and environment")
    return value


def _is_variable(entry: object) -> bool:
    if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str):
        return isinstance(entry[1], str | int | float)
    return isinstance(entry, str)


def _environment_file(directory: Path, source: str, data: Mapping[str, Any], key: str, default: str | None) -> Path | None:
    named = data.get(key)
    if named:
        path = directory / str(named)
        if not path.is_file():
            raise _wrong(f"{source}: {key} names '{named}', which is not in the project")
        return path
    if default and (directory / default).is_file():
        return directory / default
    return None


def _entry_point(source: str, name: str, entry: object) -> EntryPoint:
    where = f"{source}: entry_points.{name}"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("command"), str) or not entry["command"].strip():
        raise _wrong(f"{where} has no command")
    declared = entry.get("parameters") or {}
    if not isinstance(declared, Mapping):
        raise _wrong(f"{where}.parameters should map names to types")
    parameters = {str(key): _parameter(f"{where}.parameters", str(key), value) for key, value in declared.items()}
    return EntryPoint(name, entry["command"], parameters)


def _parameter(where: str, name: str, value: object) -> Parameter:
    if isinstance(value, str):
        kind, default = value, None
    elif isinstance(value, Mapping):
        kind, default = str(value.get("type", "string")), value.get("default")
    else:
        raise _wrong(f"{where}.{name} should be a type, or a mapping of type and default")
    kind = _WORDS.get(kind.lower(), kind.lower())
    if kind not in TYPES:
        raise _wrong(f"{where}.{name} has the unknown type '{kind}'; the types are {', '.join(TYPES)}")
    return Parameter(name, kind, None if default is None else str(default))


def find_entry_point(project: MLProject, name: str) -> EntryPoint:
    """The entry point of that name, or the script of that name, as MLflow has it. Raises ProjectError: there is neither."""
    if name in project.entry_points:
        return project.entry_points[name]
    program = SCRIPTS.get(Path(name).suffix)
    inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    if program and inside and (project.directory / name).is_file():
        return EntryPoint(name, _template([program, name]), {}, declared=False)
    if program:
        raise _wrong(f"{project.source}: there is no entry point '{name}', and no script of that name in the project")
    if not project.entry_points:
        lack = "no MLproject file" if project.source == str(project.directory) else "no entry_points"
        raise _wrong(f"{project.source} has {lack}, so there is no entry point '{name}'; a script can be one: -e train.py")
    known = ", ".join(sorted(project.entry_points))
    raise _wrong(f"{project.source}: there is no entry point '{name}'; the project has: {known}")


def command_entry_point(words: Sequence[str]) -> EntryPoint:
    """A command that was typed, every word of it as it is; the arguments of its program or script are the run's parameters."""
    flags = interpreter_flags(Path(words[0]).name)
    program = 1
    while flags and program < len(words) and flags.fullmatch(words[program]):
        program += 1
    if flags and words[program : program + 1] in (["-m"], ["-c"]):
        program += 2
    elif program < len(words) and Path(words[program]).suffix in SCRIPTS:
        program += 1
    return EntryPoint("main", _template(words), {}, arguments=parameters(shlex.join(words[program:])))


def _template(words: Sequence[str]) -> str:
    """A command of an MLproject that runs these words."""
    return shlex.join(words).replace("{", "{{").replace("}", "}}")


def bind(entry: EntryPoint, given: Mapping[str, object], source: str) -> list[Value]:
    """The value of every parameter, checked against its type, declared ones first.

    What isn't declared is passed on as ``--name value``, as MLflow's own backend does.

    Raises:
        ParameterError: missing, ill-typed or ill-named; all of them in one message, a line each.
    """
    faults: list[str] = []
    values: list[Value] = []
    for parameter in entry.parameters.values():
        if parameter.name in given:
            values.append(Value(parameter, str(given[parameter.name]), True))
        elif parameter.default is not None:
            values.append(Value(parameter, parameter.default, False))
        else:
            faults.append(
                f"parameter '{parameter.name}' ({parameter.type}) has no default and was not given; add -P {parameter.name}=..."
            )
    for name in [name for name in given if name not in entry.parameters]:
        if UNFIT.search(name) or not 0 < len(name) <= LONGEST_NAME:
            faults.append(f"parameter '{name}' has a name that MLflow doesn't take: letters, digits and _ - . / : and blanks")
        values.append(Value(Parameter(name, "string", None), str(given[name]), True, extra=True))
    faults += [fault for value in values if (fault := _fault(value))]
    if faults:
        raise ParameterError("\n".join(f"{source}: {printable(fault)}" for fault in faults))
    return values


def undeclared(entry: EntryPoint, values: Iterable[Value]) -> list[str]:
    """A sentence on each parameter that the entry point of an MLproject doesn't declare."""
    found = []
    for name in [value.parameter.name for value in values if value.extra and entry.declared]:
        near = difflib.get_close_matches(name, entry.parameters, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"it declares: {', '.join(entry.parameters) or 'none'}"
        found.append(f"entry point '{entry.name}' declares no parameter '{name}', so its command gets --{name}; {hint}")
    return found


def _fault(value: Value) -> str | None:
    """Why no program can be given a value, or what type it should have; None: nothing is wrong."""
    shown = f"parameter '{value.parameter.name}'"
    if why := unfit(value.text):
        return f"{shown} {why}"
    reader, wanted = _READERS.get(value.parameter.type, (str, "text"))
    try:
        reader(value.text)
    except ValueError:
        return f"{shown} should be {wanted}, not '{value.text}'"
    return None
