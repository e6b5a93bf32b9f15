"""Make the plan of a job from a program and a document's properties; ``client.submitting.create`` writes it (``plan.json``)."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlflow_batchai.agent.attempt import frameworks
from mlflow_batchai.agent.environment import SYSTEM_METRICS_SWITCH
from mlflow_batchai.agent.layout import undefined
from mlflow_batchai.agent.plan import (
    CUSTOM,
    Container,
    InputDirectory,
    LogPlace,
    OutputDirectory,
    Plan,
    PythonEnvironment,
    SetupTask,
    StagedInput,
    Variable,
    Volume,
)
from mlflow_batchai.agent.protocol import PROTOCOL_VERSION
from mlflow_batchai.cluster import setup
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.cluster.scaling import larger, too_few
from mlflow_batchai.documents.fields import unfit
from mlflow_batchai.documents.job import JobProperties
from mlflow_batchai.documents.model import SpecModel, secret_values
from mlflow_batchai.errors import ClusterError, DocumentError, NotSupportedError
from mlflow_batchai.job.places import CONTROL_MOUNT, locate, mount_points, on_control, place_logs
from mlflow_batchai.plan.prepared import Prepared
from mlflow_batchai.plan.volumes import choose_volumes

# What a setup task is told of the node (``agent/attempt/setup.py``).
VARIABLES = ("AZ_BATCHAI_MOUNT_ROOT", "AZ_BATCHAI_NUM_GPUS")


# A node that is silent for so long is given up, by its peers (``Peers._listen``) and the follower (``Watch.check``).
LOSS_SECONDS = 60.0
# Where looking costs requests agents speak, and are looked at, less often.
INDEX_LOSS_SECONDS = 90.0
# How long a job may wait for nodes with what opens its volumes still good after its time limit.
WAITING_SECONDS = 7 * 86400.0
# Linux gives a process 2 MiB of arguments and variables with the usual limit of its stack; the node and we need some of that.
MOST_TEXT = 1_500_000
SAMPLE_SECONDS = 10.0
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


def choose_setup(cluster: Cluster, volumes: Sequence[Volume]) -> tuple[SetupTask | None, list[str]]:
    """(the setup task as it stands in a plan, None if there is none; warnings).

    ``logs`` says where its output goes: the index of a volume, or null for the control share, and the path there. Secrets stand
    there by name only.
    """
    task = cluster.document.node_setup.setup_task
    if task is None:
        return None, []
    where = f"cluster '{cluster.name}': nodeSetup.setupTask"
    own = [volume for volume in volumes if volume.scope == "cluster"]
    index, path = locate(task.std_out_err_path_prefix, mount_points(own), f"{where}.stdOutErrPathPrefix")
    below = on_control(volumes, index)
    parts = [below, path, setup.suffix(cluster.name, cluster.record, task)]
    texts = [task.command_line, *(entry.value for entry in task.environment_variables)]
    unknown = dict.fromkeys(name for text in texts for name in undefined(text, dict.fromkeys(VARIABLES, "")))
    planned = SetupTask(
        setup.identity(task),
        task.command_line,
        LogPlace(index if below is None else None, "/".join(part for part in parts if part)),
        tuple(Variable(entry.name, entry.value) for entry in task.environment_variables),
        tuple(secret.name for secret in task.secrets),
    )
    return planned, [f"{where}: ${name} is used and nothing defines it" for name in unknown]


@dataclass(frozen=True)
class Program:
    """The program of a job, whatever document describes it.

    Attributes:
        where: what messages call it.
        parameters: variable -> value, of parameters that ranks are given as text.
        inputs: those that they are given as files, as in the plan.
        registry: who pulls the container's image, or None.
        environment: ``python_env.yaml`` as nodes build it, or None.
        python: the training interpreter, None: the cluster's.
        system_seconds: how often nodes are sampled for their system metrics, at first; 0: never; None: as MLflow's switch says.
    """

    command: str
    where: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    inputs: Sequence[StagedInput] = ()
    container: Container | None = None
    registry: Mapping[str, str] | None = field(default=None, repr=False)
    environment: PythonEnvironment | None = None
    python: str | None = None
    system_seconds: float | None = None


def plan_job(
    program: Program, properties: JobProperties, document: SpecModel, cluster: Cluster, source: str
) -> tuple[Prepared, frozenset[str]]:
    """(the job, without its files and what Batch AI's documents have no key for; every text that must stand nowhere).

    Args:
        document: all that was written, for the secrets in it.

    Raises:
        BatchAIError: anything that would keep the job from running and can be seen from here.
    """
    framework, process_count, node_count = _framework(properties, source)
    if node_count > cluster.engine.node_limit:
        raise ClusterError(
            f"{source}: properties.nodeCount is {node_count} and cluster '{cluster.name}' has"
            f" {cluster.engine.node_limit} node(s){larger(cluster, node_count)}"
        )
    if framework != CUSTOM:
        _check_gpus(cluster, process_count, node_count, f"{source}: properties.{frameworks.of(framework).block}")
    limit = _seconds(properties)
    chosen = choose_volumes(properties, cluster, source, limit + WAITING_SECONDS)
    warnings = list(chosen.warnings)
    if node_count > cluster.open_nodes:
        warnings.append(too_few(cluster, node_count))
    if properties.framework is None and node_count > 1:
        raise DocumentError(
            f"{source}: properties.nodeCount is {node_count}, and without a framework block the command would run on one node"
            " and hold the others for nothing: add 'horovodSettings: {}' for a rank on each, or 'customToolkitSettings: {}' for"
            " a command that starts them itself"
        )
    if framework == CUSTOM and node_count > 1:
        warnings.append(f"{source}: without horovodSettings the command runs once, on node-0; the other nodes only stay taken")
    backend = _backend(properties)
    if backend == "mpi":
        warnings.append(
            f"{source}: communicationBackend is mpi, and ranks are not started by mpirun: a PyTorch with MPI would take each"
            " for the only one; use gloo or nccl, or call mpirun in customToolkitSettings.commandLine"
        )
    folder_prefix, log_copy, notices = place_logs(properties, chosen.volumes, source)
    warnings += notices
    setup_task, notices = choose_setup(cluster, chosen.volumes)
    warnings += notices
    plan = Plan(
        protocol=PROTOCOL_VERSION,
        job=uuid.uuid4().hex[:10],
        framework=framework,
        node_count=node_count,
        process_count=process_count,
        ranks=process_count,
        communication_backend=backend,
        command=program.command,
        setup_task=setup_task,
        preparation=properties.job_preparation.command_line if properties.job_preparation else "",
        parameters=dict(program.parameters),
        inputs=tuple(program.inputs),
        environment_variables=tuple(Variable(entry.name, entry.value) for entry in properties.environment_variables),
        secret_names=tuple(secret.name for secret in properties.secrets),
        input_directories=tuple(InputDirectory(entry.id, entry.path) for entry in properties.input_directories),
        output_directories=tuple(
            OutputDirectory(entry.id, entry.path_prefix, entry.path_suffix) for entry in properties.output_directories
        ),
        volumes=tuple(chosen.volumes),
        board=cluster.location is not None,
        container=program.container,
        control_mount=CONTROL_MOUNT,
        folder_prefix=folder_prefix,
        log_copy_prefix=log_copy,
        max_wall_clock_seconds=limit,
        low_priority=cluster.document.vm_priority == "lowpriority",
        loss_seconds=LOSS_SECONDS if cluster.location is None else INDEX_LOSS_SECONDS,
        python=program.python or cluster.python,
        environment=program.environment,
        gpus_per_node=cluster.document.gpus_per_node,
        oversubscribe=cluster.document.oversubscribe,
        network_interface=cluster.document.network_interface,
        system_metrics=_system_seconds(program.system_seconds, properties),
    )
    warnings += _undefined(properties, frameworks.of(framework), program.command, source)
    secrets = {entry.name: _secret(entry, source) for entry in properties.secrets}
    task = cluster.document.node_setup.setup_task
    opening = (text for opens in chosen.credentials.values() for name, text in opens.items() if name != "endpoint")
    secret_texts = frozenset((*secret_values(document), *secret_values(task), *opening))
    _check_sizes(plan, secrets, source, program.where)
    told = {"volumes": chosen.credentials, "setup": setup.secrets(task) if task else {}, "registry": program.registry}
    return Prepared(plan, secrets, told, limit + WAITING_SECONDS, warnings), secret_texts


def _framework(properties: JobProperties, source: str) -> tuple[str, int, int]:
    """(framework as in a plan, processCount, nodeCount) of the properties."""
    key, settings = properties.framework or (frameworks.Framework.block, None)
    nodes = properties.node_count or 1
    framework = frameworks.BLOCKS.get(key)
    if framework is None:
        raise NotSupportedError(f"{source}: properties.{key} is not supported yet; {' and '.join(frameworks.BLOCKS)} are")
    if framework == CUSTOM:
        return CUSTOM, 1, nodes
    processes = getattr(settings, "process_count", None) or nodes
    if processes < nodes:
        raise DocumentError(
            f"{source}: properties.{key}.processCount is {processes}, less than nodeCount ({nodes});"
            " give at least one process a node, or fewer nodes"
        )
    return framework, processes, nodes


def _backend(properties: JobProperties) -> str:
    """The backend that ranks of PyTorch are told; empty: none is asked for."""
    settings = properties.py_torch_settings
    asked = (settings.communication_backend if settings else None) or ""
    return "gloo" if asked == "tcp" else asked


def _check_sizes(plan: Plan, secrets: Mapping[str, str], source: str, where: str) -> None:
    """Refuse what each key may have by itself, and a process of the job can't be given together."""
    variables = {**plan.parameters, **{entry.name: entry.value for entry in plan.environment_variables}, **secrets}
    texts = [f"{name}={value}" for name, value in variables.items()]
    total = sum(len(text.encode(errors="surrogateescape")) for text in [plan.command, *texts])
    faults = [f"the variable {name} {why}" for name, text in zip(variables, texts, strict=True) if (why := unfit(text))]
    if why := unfit(plan.command):
        faults.append(f"{where} {why}")
    if total > MOST_TEXT:
        faults.append(f"the command and its variables have {total} bytes, and no program can be given more than {MOST_TEXT}")
    if faults:
        raise DocumentError("\n".join(f"{source}: {fault}" for fault in faults))


def _check_gpus(cluster: Cluster, processes: int, nodes: int, where: str) -> None:
    """Where the cluster document says how many GPUs there are, too many ranks fail here; else the nodes tell."""
    there = (cluster.document.gpus_per_node or 0) * nodes
    if 0 < there < processes and not cluster.document.oversubscribe:
        raise ClusterError(
            f"{where}.processCount is {processes} and {nodes} node(s) of cluster '{cluster.name}'"
            f" have {there} GPUs (gpusPerNode): lower processCount, or set oversubscribe: true in the cluster document"
        )


def _seconds(properties: JobProperties) -> float:
    limit = properties.constraints.max_wall_clock_time
    # Batch AI's default, and its hard limit, was a week.
    return limit.total_seconds() if limit else 7 * 86400.0


def _system_seconds(asked: float | None, properties: JobProperties) -> float | None:
    """How often nodes are sampled; None: never. MLflow's switch is the document's variable, else the submitter's."""
    if asked is None:
        variables = {**os.environ, **{entry.name: entry.value for entry in properties.environment_variables}}
        asked = SAMPLE_SECONDS if variables.get(SYSTEM_METRICS_SWITCH, "").lower() in ("true", "1") else 0
    return asked or None


def _secret(secret: Any, source: str) -> str:
    if secret.value is None:
        raise NotSupportedError(
            f"{source}: secrets '{secret.name}': valueSecretReference (Azure Key Vault) is not supported yet; give value"
        )
    return str(secret.value.get_secret_value())


def _undefined(properties: JobProperties, framework: frameworks.Framework, command: str, source: str) -> list[str]:
    known = {f"AZ_BATCHAI_INPUT_{entry.id}" for entry in properties.input_directories}
    known |= {f"AZ_BATCHAI_OUTPUT_{entry.id}" for entry in properties.output_directories}
    known |= {f"AZ_BATCHAI_{name}" for name in (*SERVICE_NAMES, *framework.service_names)}
    table = dict.fromkeys(known, "")
    texts = [command, *(entry.value for entry in properties.environment_variables)]
    if properties.job_preparation:
        texts.append(properties.job_preparation.command_line)
    found = dict.fromkeys(name for text in texts for name in undefined(text, table))
    return [f"{source}: ${name} is used and nothing defines it" for name in found]
