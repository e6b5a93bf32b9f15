"""A cluster's setup task as the plans of its jobs carry it, and its logs as a client sees them."""

from __future__ import annotations

from collections.abc import Sequence

from mlflow_batchai.agent.layout import undefined
from mlflow_batchai.agent.plan import LogPlace, SetupTask, Variable, Volume
from mlflow_batchai.cluster import setup
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.job.places import locate, mount_points, on_control

# What a setup task is told of the node (``agent/attempt/setup.py``).
VARIABLES = ("AZ_BATCHAI_MOUNT_ROOT", "AZ_BATCHAI_NUM_GPUS")


def choose_setup(cluster: Cluster, volumes: Sequence[Volume]) -> tuple[SetupTask | None, list[str]]:
    """(the setup task as it stands in a plan, None if there is none; warnings).

    ``logs`` says where its output goes: the index of a volume, or null for the control share, and the path there. Secrets stand
    there by name only.

    Args:
        volumes: the plan's.
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
