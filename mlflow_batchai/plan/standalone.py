"""Prepare a job from a Batch AI job document that names its own program, without an MLproject."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlflow_batchai.agent.layout import expand
from mlflow_batchai.agent.plan import Container
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.documents.command import LONGEST_VALUE, parameters
from mlflow_batchai.documents.job import CustomToolkitSettings, JobDocument, JobProperties, ScriptProcesses, require_complete
from mlflow_batchai.documents.model import masked
from mlflow_batchai.errors import DocumentError
from mlflow_batchai.job.places import locate, mount_points
from mlflow_batchai.plan.images import choose_container
from mlflow_batchai.plan.planning import Program, plan_job
from mlflow_batchai.plan.prepared import Prepared
from mlflow_batchai.plan.secrecy import refuse_secrets
from mlflow_batchai.storage import open_share

_REFERENCE = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_]\w*)\}|(?P<plain>[A-Za-z_]\w*))", re.ASCII)
_IN_DOUBLE_QUOTES = re.compile(r'([\\"`$])')
# Folders of the job itself, which nothing but its preparation can have put a file into.
_OWN_FOLDERS = ("AZ_BATCHAI_JOB_TEMP", "AZ_BATCHAI_JOB_TEMP_DIR", "AZ_BATCHAI_SHARED_JOB_TEMP")


def prepare(
    document: JobDocument,
    name: str,
    cluster: Cluster,
    source: str,
    *,
    retries: int = 0,
    min_nodes: int | None = None,
    umask: str = "077",
) -> Prepared:
    """Work out the whole job.

    Args:
        retries, min_nodes, umask: as in the plan; a document has no keys for them.

    Raises:
        BatchAIError: anything that would keep the job from running and can be seen without asking a share or a node.
    """
    properties = document.properties
    require_complete(properties, source)
    container, registry, notices = choose_container(None, properties, cluster.document, source)
    if properties.scheduling_priority != "normal":
        notices = [
            *notices,
            f"{source}: properties.schedulingPriority plays no part: jobs start in the order in which they came",
        ]
    if min_nodes and min_nodes > (properties.node_count or 1):
        raise DocumentError(
            f"{source}: --min-nodes {min_nodes} is more than properties.nodeCount ({properties.node_count or 1})"
        )
    program = dataclasses.replace(_program(properties, container), registry=registry)
    prepared, secret_texts = plan_job(program, properties, document, cluster, source)
    plan = dataclasses.replace(
        prepared.plan, name=name, retries=retries, min_nodes=min_nodes, umask=umask, scheduler_options=document.slurm.words
    )
    arguments = _parameters(properties)
    # Without its quotes an argument may say what the command line, as it is written, doesn't.
    spoken = {**plan.record(), "command": [plan.command, *arguments.values()]}
    refuse_secrets(spoken, secret_texts, source, program.where)
    warnings = [*notices, *prepared.warnings]
    return dataclasses.replace(prepared, plan=plan, document=masked(document), parameters=arguments, warnings=warnings)


def _program(properties: JobProperties, container: Container | None) -> Program:
    """The program of the framework block; the plan refuses a block that can't run, or none."""
    key, settings = properties.framework or ("", None)
    if not isinstance(settings, ScriptProcesses):
        command = getattr(settings, "command_line", None) or ""
        return Program(command, f"properties.{key}.commandLine", container=container)
    return Program(
        _script_command(settings, properties),
        f"properties.{key}",
        container=container,
        python=_training_python(settings, properties) if container is None else None,
    )


def _script_command(settings: ScriptProcesses, properties: JobProperties) -> str:
    """Interpreter and script as one word each, then the arguments, which are shell text."""
    interpreter = settings.python_interpreter_path or "python"
    words = [_word(interpreter, properties), _word(settings.python_script_file_path or "", properties)]
    return " ".join([*words, *filter(None, [(settings.command_line_args or "").strip()])])


def _word(path: str, properties: JobProperties) -> str:
    """A path as one word of a shell line, the variables in it still variables: those of the service and of the document."""
    if re.fullmatch(r"(~/)?[\w./+-]+", path, re.ASCII):
        return path
    known = {entry.name for entry in properties.environment_variables} | {secret.name for secret in properties.secrets}
    parts, end = [], 0
    for match in _REFERENCE.finditer(path):
        name = match["braced"] or match["plain"]
        if name.startswith("AZ_BATCHAI_") or name in known:
            parts += [_IN_DOUBLE_QUOTES.sub(r"\\\1", path[end : match.start()]), f"${{{name}}}"]
            end = match.end()
    return '"' + "".join([*parts, _IN_DOUBLE_QUOTES.sub(r"\\\1", path[end:])]) + '"'


def _training_python(settings: ScriptProcesses, properties: JobProperties) -> str | None:
    """The interpreter that nodes start their helpers with: the script's own, unless that is yet to be made."""
    python = settings.python_interpreter_path
    return python if python and "$" not in python and not properties.job_preparation else None


def _parameters(properties: JobProperties) -> dict[str, str]:
    settings = properties.framework[1] if properties.framework else None
    if isinstance(settings, ScriptProcesses):
        return parameters(settings.command_line_args or "")
    if isinstance(settings, CustomToolkitSettings) and settings.command_line:
        return {"commandLine": settings.command_line[:LONGEST_VALUE]}
    return {}


def check_script(prepared: Prepared, properties: JobProperties, source: str) -> None:
    """Look for the script, unless a jobPreparation may yet make it, or it lies where this machine can't look.

    Raises:
        DocumentError: it isn't there; the sentence says where it was looked for.
        ShareError: its share can't be asked.
    """
    key, settings = properties.framework or ("", None)
    if properties.job_preparation or not isinstance(settings, ScriptProcesses) or settings.python_script_file_path is None:
        return
    text, volumes = settings.python_script_file_path, prepared.plan.volumes
    where = f"{source}: properties.{key}.pythonScriptFilePath"
    what = f"{where} is '{text}'"
    path = expand(text, {f"AZ_BATCHAI_INPUT_{entry.id}": entry.path for entry in properties.input_directories})
    path = expand(path, {name: f"\0/{name}" for name in _OWN_FOLDERS})
    if path.startswith("\0") or not path.startswith(("/", "$", "~")):
        raise DocumentError(
            f"{what}, and a job begins in an empty folder: put the script on a share, or have jobPreparation fetch it"
        )
    if not expand(path, {"AZ_BATCHAI_MOUNT_ROOT": "\0", "AZ_BATCHAI_JOB_MOUNT_ROOT": "\0"}).startswith("\0"):
        return
    index, inside = locate(path, mount_points(volumes), where)
    volume = volumes[index]
    if volume.share is None:
        return
    found = _kind(volume.share, inside)
    if found != "a file":
        reason = f"that is {found}" if found else "there is no such file"
        raise DocumentError(f"{what}, and {reason}: looked for '{inside}' on the {volume.name} ({_shown(volume.share)})")


def _kind(share: str, path: str) -> str:
    """What lies at a path, for a sentence; empty for nothing."""
    if share.startswith("file:"):
        file = Path(_shown(share), path)
        return "a folder" if file.is_dir() else "a file" if file.exists() else ""
    folder, _, name = path.rpartition("/")
    for entry in open_share(share).list(folder):
        if entry.name == name:
            return "a folder" if entry.is_directory else "a file"
    return ""


def _shown(share: str) -> str:
    """A share's address as a person knows it."""
    return unquote(urlsplit(share).path) if share.startswith("file:") else share
