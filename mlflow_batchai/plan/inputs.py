"""How parameters reach the nodes: which of them name files of this machine that travel with the job, and which go as text."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlflow_batchai.agent.plan import InputFile, StagedInput
from mlflow_batchai.documents.mlproject import Value
from mlflow_batchai.errors import DocumentError, NotSupportedError, ParameterError
from mlflow_batchai.storage.objects import StagedFile, scan_input

# Linux: the longest single string that a new process can be given (MAX_ARG_STRLEN).
LONGEST_VARIABLE = 131071


def choose_inputs(
    values: Sequence[Value], variables: Mapping[str, str], stage: Collection[str], cwd: Path
) -> tuple[list[StagedFile], list[StagedInput], dict[str, str]]:
    """Tell the parameters that have to be sent as files from the others.

    Args:
        variables: parameter -> variable that ranks find it in.
        stage: parameters that are sent if they name a file, and passed on as they are if not.
        cwd: where relative paths start from.

    Returns:
        (files to send, staged entries of the plan, variable -> value for the others).

    Raises:
        BatchAIError: a file isn't there or can't be sent, a value is too long, or ``stage`` names no parameter.
    """
    unknown = [name for name in stage if name not in {value.parameter.name for value in values}]
    if unknown:
        raise DocumentError(f"batchai.yaml: stage names '{unknown[0]}', which is no parameter of this entry point")
    files: list[StagedFile] = []
    staged: list[StagedInput] = []
    given: dict[str, str] = {}
    for value in values:
        name, variable = value.parameter.name, variables[value.parameter.name]
        path = _local_path(value, stage, cwd)
        if path is None:
            given[variable] = value.text
            continue
        found = scan_input(path)
        if not found:
            raise ParameterError(f"parameter '{name}': the folder {path} holds no file")
        files += found
        entries = tuple(InputFile(file.path, file.sha256, file.size) for file in found)
        staged.append(StagedInput(name, variable, path.name, entries))
    _check_lengths({variables[value.parameter.name]: value for value in values})
    return files, staged, given


def _local_path(value: Value, stage: Collection[str], cwd: Path) -> Path | None:
    """The local file or folder that a value names and that has to travel with the job, or None."""
    text, name, kind = value.text, value.parameter.name, value.parameter.type
    is_path = kind == "path" or name in stage
    if text.startswith("file:/") or (text.startswith("file:") and (is_path or kind == "uri")):
        path, is_path = Path(unquote(urlsplit(text).path)), True
    elif kind == "path" and "://" in text:
        raise NotSupportedError(
            f"parameter '{name}': {text.split('://')[0]}:// can't be fetched yet; download it and give the local path"
        )
    elif is_path and text:
        path = Path(os.path.expanduser(text))  # noqa: PTH111 (Path's own raises for a ~name that is no user)
        is_path = kind == "path"
    else:
        return None
    # Without "..": the last part is the name that it gets on the node.
    path = Path(os.path.abspath(cwd / path))  # noqa: PTH100
    if not os.path.exists(path):  # noqa: PTH110 (Path's own raises for a text that is too long to be a name)
        if is_path:
            raise ParameterError(f"parameter '{name}': there is no file or folder {path}")
        return None
    if not path.name:
        raise ParameterError(f"parameter '{name}': {path} can't be sent to the nodes as a whole")
    return path


def _check_lengths(values: Mapping[str, Value]) -> None:
    for variable, value in values.items():
        length = len(f"{variable}={value.text}".encode(errors="surrogateescape"))
        if length > LONGEST_VARIABLE:
            raise ParameterError(
                f"parameter '{value.parameter.name}' is {length} bytes long, and no program can be given more than"
                f" {LONGEST_VARIABLE}: put it in a file and declare the parameter as type path"
            )
