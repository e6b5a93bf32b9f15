"""From documents to a plan: what ``batchai/plan.json`` will say, worked out before anything exists."""

from __future__ import annotations

import re
import shlex
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mlflow_batchai.clusters import Cluster, home
from mlflow_batchai.environments import preparation_cache, training_environment
from mlflow_batchai.errors import ClusterError, DocumentError, NotSupportedError, ProjectError
from mlflow_batchai.images import choose_container, copied_variables
from mlflow_batchai.inputs import choose_inputs
from mlflow_batchai.node.layout import undefined
from mlflow_batchai.node.protocol import PROTOCOL_VERSION
from mlflow_batchai.places import CONTROL_MOUNT, place_logs
from mlflow_batchai.prepared import Prepared
from mlflow_batchai.secrecy import refuse_spoken, without_secrets
from mlflow_batchai.shares.objects import scan
from mlflow_batchai.spec.batchai import BatchaiFile
from mlflow_batchai.spec.command import translate, variable_names
from mlflow_batchai.spec.job import JobProperties, forbid_program
from mlflow_batchai.spec.masking import masked, secret_values
from mlflow_batchai.spec.mlproject import EntryPoint, MLProject, Value
from mlflow_batchai.volumes import choose_volumes

LOSS_SECONDS = 60.0
# Where looking costs requests agents speak, and are looked at, less often.
BOARD_LOSS_SECONDS = 90.0
# How long a job may wait for nodes with what opens its volumes still good after its time limit.
WAITING_SECONDS = 7 * 86400.0


def slug(text: str, longest: int = 40) -> str:
    """A name that Batch AI would take (``[-\\w_]``), short enough for paths."""
    return (re.sub(r"[^-A-Za-z0-9_]+", "-", text).strip("-") or "job")[:longest]


def prepare(
    project: MLProject,
    entry: EntryPoint,
    values: Sequence[Value],
    config: BatchaiFile,
    cluster: Cluster,
    cwd: Path,
    env_manager: str | None,
    source: str,
    documents: Collection[Path] = (),
) -> Prepared:
    """Work out the whole job.

    Args:
        config: batchai.yaml with ``--backend-config`` merged over it.
        cwd: where relative ``path`` parameters start from.
        env_manager: MLflow's ``--env-manager``.
        source: the document's name in messages.
        documents: files that the configuration was read from.

    Raises:
        BatchAIError: anything that would keep the job from running and can be seen from here.
    """
    properties = config.properties
    forbid_program(properties, source)
    if config.retries:
        raise NotSupportedError(f"{source}: retries is not supported yet; remove it")
    framework, process_count, node_count = _framework(properties, source)
    if node_count > cluster.engine.node_limit:
        raise ClusterError(
            f"{source}: properties.nodeCount is {node_count} and cluster '{cluster.name}' has"
            f" {cluster.engine.node_limit} node(s)"
        )
    if framework == "horovod":
        _check_gpus(cluster, process_count, node_count, source)
    job_id = uuid.uuid4().hex[:10]
    variables = variable_names(value.parameter.name for value in values)
    placeholders = {value.parameter.name: variables[value.parameter.name] for value in values if not value.extra}
    numbers = {value.parameter.name for value in values if value.parameter.type == "int"}
    command = translate(entry.command, placeholders, source, numbers)
    command += "".join(f' --{shlex.quote(v.parameter.name)} "${{{variables[v.parameter.name]}}}"' for v in values if v.extra)
    if not properties.job_preparation:
        _check_script(project, entry.command)
    inputs, staged, given = choose_inputs(values, variables, config.stage, cwd)
    limit = _seconds(properties)
    chosen = choose_volumes(properties, cluster, source, limit + WAITING_SECONDS)
    warnings = chosen.warnings
    container, registry, notices = choose_container(project, properties, cluster.document, source)
    warnings += notices
    if container and env_manager not in (None, "local"):
        raise NotSupportedError(
            f"--env-manager {env_manager}: the job trains in the image {container['image']}, with what that has; drop the"
            " option, or the container"
        )
    if framework == "custom" and node_count > 1:
        warnings.append(f"{source}: without horovodSettings the command runs once, on node-0; the other nodes only stay taken")
    folder_prefix, log_copy, notices = place_logs(properties, chosen.volumes, source)
    warnings += notices
    plan = {
        "protocol": PROTOCOL_VERSION,
        "job": job_id,
        "framework": framework,
        "nodeCount": node_count,
        "processCount": process_count,
        "ranks": process_count if framework == "horovod" else 1,
        "command": command,
        "preparation": properties.job_preparation.command_line if properties.job_preparation else None,
        "parameters": given,
        "inputs": staged,
        "environmentVariables": [{"name": entry.name, "value": entry.value} for entry in properties.environment_variables],
        "secretNames": [secret.name for secret in properties.secrets],
        "inputDirectories": [{"id": entry.id, "path": entry.path} for entry in properties.input_directories],
        "outputDirectories": [
            {"id": entry.id, "pathPrefix": entry.path_prefix, "pathSuffix": entry.path_suffix}
            for entry in properties.output_directories
        ],
        "volumes": chosen.volumes,
        "board": cluster.location is not None,
        "container": container,
        "tools": {},
        "controlMount": CONTROL_MOUNT,
        "folderPrefix": folder_prefix,
        "logCopyPrefix": log_copy,
        "maxWallClockSeconds": limit,
        "lossSeconds": LOSS_SECONDS if cluster.location is None else BOARD_LOSS_SECONDS,
        "python": cluster.python,
        "environment": training_environment(project, env_manager, cluster),
        "gpusPerNode": cluster.document.gpus_per_node,
        "oversubscribe": cluster.document.oversubscribe,
        "networkInterface": cluster.document.network_interface,
        "metrics": [{"name": rule.name, "regex": rule.regex, "step": rule.step} for rule in config.metrics],
        "model": {"path": config.model.path, "register": config.model.register_as, "name": config.model.name}
        if config.model
        else None,
    }
    warnings += _undefined(properties, command, source)
    secrets = copied_variables(project, cluster.document)
    secrets.update({entry.name: _secret(entry, source) for entry in properties.secrets})
    spoken = {*secret_values(config), *(text for opens in chosen.credentials.values() for text in opens.values())}
    refuse_spoken(plan, spoken, source)
    code, withheld = without_secrets(scan(project.directory, _ours(cluster)), spoken, documents)
    warnings += [f"'{path}' is not sent to the nodes: it holds a secret" for path in withheld]
    if (script := _script(entry.command)) in withheld:
        raise ProjectError(
            f"{project.source}: the command runs '{script}', which holds the text of a secret and can't be sent to the nodes;"
            " take it out of there"
        )
    plan["code"] = [file.entry() for file in code]
    plan["preparationCache"] = preparation_cache(plan, config.cache_preparation, source)
    if config.cache_preparation is not False and not plan["preparation"]:
        warnings.append(f"{source}: cachePreparation plays no part without properties.jobPreparation")
    return Prepared(
        config.name or f"{slug(project.name)}-{job_id[:6]}",
        job_id,
        project.name,
        plan,
        masked(config),
        {value.parameter.name: value.text for value in values},
        secrets,
        {"volumes": chosen.credentials, "registry": registry},
        limit + WAITING_SECONDS,
        code,
        inputs,
        warnings,
    )


def _framework(properties: JobProperties, source: str) -> tuple[str, int, int]:
    """(launcher, processCount, nodeCount) of the properties."""
    block = properties.framework
    nodes = properties.node_count or 1
    if block is None or block[0] == "customToolkitSettings":
        return "custom", 1, nodes
    if block[0] != "horovodSettings":
        raise NotSupportedError(
            f"{source}: properties.{block[0]} is not supported yet; horovodSettings and customToolkitSettings are, and so is a"
            " project without a framework block"
        )
    processes = getattr(block[1], "process_count", None) or nodes
    if processes < nodes:
        raise DocumentError(
            f"{source}: properties.horovodSettings.processCount is {processes}, less than nodeCount ({nodes});"
            " give at least one process a node, or fewer nodes"
        )
    return "horovod", processes, nodes


def _check_gpus(cluster: Cluster, processes: int, nodes: int, source: str) -> None:
    """Where the cluster document says how many GPUs there are, too many ranks fail here; else the nodes tell."""
    gpus = (cluster.document.gpus_per_node or 0) * nodes
    if 0 < gpus < processes and not cluster.document.oversubscribe:
        raise ClusterError(
            f"{source}: properties.horovodSettings.processCount is {processes} and {nodes} node(s) of cluster '{cluster.name}'"
            f" have {gpus} GPUs (gpusPerNode): lower processCount, or set oversubscribe: true in the cluster document"
        )


_SCRIPT = re.compile(r"\s*(?:python[\d.]*|bash|sh)\s+(?:-u\s+)?(?P<script>[\w.-][\w./-]*\.(?:py|sh))(?=\s|$)")


def _script(command: str) -> str | None:
    """The project's file that a command begins with, if it is plain to see."""
    match = _SCRIPT.match(command)
    return match["script"] if match else None


def _check_script(project: MLProject, command: str) -> None:
    """A script that the command begins with and that isn't in the project fails here, not minutes later on a node.

    Later ones, and all if there is a job preparation, may have been made by what ran before.
    """
    script = _script(command)
    if script and not (project.directory / script).exists():
        raise ProjectError(f"{project.source}: the command runs '{script}', which is not in the project ({project.directory})")


def _ours(cluster: Cluster) -> list[Path]:
    """Folders of ours that a user may have put into his project."""
    share = cluster.share.url
    return [home(), *([Path(unquote(urlsplit(share).path))] if share.startswith("file:") else [])]


def _seconds(properties: JobProperties) -> float:
    limit = properties.constraints.max_wall_clock_time
    # Batch AI's default, and its hard limit, was a week.
    return limit.total_seconds() if limit else 7 * 86400.0


def _secret(secret: Any, source: str) -> str:
    if secret.value is None:
        raise NotSupportedError(
            f"{source}: secrets '{secret.name}': valueSecretReference (Azure Key Vault) is not supported yet; give value"
        )
    return str(secret.value.get_secret_value())


def _undefined(properties: JobProperties, command: str, source: str) -> list[str]:
    known = {f"AZ_BATCHAI_INPUT_{entry.id}" for entry in properties.input_directories}
    known |= {f"AZ_BATCHAI_OUTPUT_{entry.id}" for entry in properties.output_directories}
    known |= {f"AZ_BATCHAI_{name}" for name in SERVICE_NAMES}
    table = dict.fromkeys(known, "")
    texts = [command, *(entry.value for entry in properties.environment_variables)]
    if properties.job_preparation:
        texts.append(properties.job_preparation.command_line)
    found = dict.fromkeys(name for text in texts for name in undefined(text, table))
    return [f"{source}: ${name} is used and nothing defines it" for name in found]


SERVICE_NAMES = (
    "MOUNT_ROOT",
    "JOB_MOUNT_ROOT",
    "JOB_TEMP",
    "JOB_TEMP_DIR",
    "SHARED_JOB_TEMP",
    "STDOUTERR_DIR",
    "NUM_GPUS",
    "MPI_HOST_FILE",
)
