"""The setup task of a cluster document: its plan, its secrets, and the place of its logs."""

from __future__ import annotations

import hashlib
import json

from mlflow_batchai.agent.plan import Volume
from mlflow_batchai.documents.cluster import ClusterRecord, NodeSetup, SetupTask
from mlflow_batchai.errors import NotSupportedError
from mlflow_batchai.job.places import CONTROL_MOUNT, locate, mount_points, slug


def check(setup: NodeSetup, where: str) -> None:
    """Refuse a setup task that could not be run, or whose logs could not be written.

    Raises:
        NotSupportedError: a secret of it lies in a Key Vault.
        DocumentError: its logs would lie on no volume of the cluster.
    """
    task = setup.setup_task
    if task is None:
        return
    for secret in task.secrets:
        if secret.value is None:
            raise NotSupportedError(
                f"{where}: nodeSetup.setupTask.secrets '{secret.name}': valueSecretReference (Azure Key Vault) is not supported"
                " yet; give value"
            )
    paths = [CONTROL_MOUNT, *(entry.relative_mount_path.strip("/") for entry in setup.mount_volumes.all)]
    volumes = [Volume("cluster", path, "link") for path in paths]
    locate(task.std_out_err_path_prefix, mount_points(volumes), f"{where}: nodeSetup.setupTask.stdOutErrPathPrefix")


def secrets(task: SetupTask) -> dict[str, str]:
    """Variable -> value, of a task that was checked."""
    return {secret.name: secret.value.get_secret_value() for secret in task.secrets if secret.value}


def identity(task: SetupTask) -> str:
    """Identify a setup task by its content: command line, variables, names of secrets."""
    variables = [[entry.name, entry.value] for entry in task.environment_variables]
    content = json.dumps([task.command_line, variables, sorted(secret.name for secret in task.secrets)])
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:10]


def suffix(name: str, record: ClusterRecord | None, task: SetupTask) -> str:
    """Batch AI's stdOutErrPathSuffix: where below its stdOutErrPathPrefix a cluster's setup task has its logs."""
    workspace = (record or ClusterRecord()).workspace
    return "/".join(("workspaces", slug(workspace), "clusters", slug(name, 64), identity(task)))
