"""Show what a job would run, by the functions with which nodes start its ranks.

What is only known on nodes, or once there is a run, stands in angle brackets.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlflow_batchai import terminal
from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.attempt import ranks
from mlflow_batchai.agent.environment import ALLOCATOR, thread_variables
from mlflow_batchai.agent.environments import trainenv
from mlflow_batchai.agent.gpus import Gpus, of_node
from mlflow_batchai.agent.layout import NodeLayout, node_id
from mlflow_batchai.agent.network import LOOPBACK
from mlflow_batchai.agent.plan import PYTORCH, Plan, Volume, plain
from mlflow_batchai.agent.staging import SetupError
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.documents.model import MASK
from mlflow_batchai.engines.base import NodeCommand, StartRequest
from mlflow_batchai.job.places import segment as place_of
from mlflow_batchai.plan.prepared import Prepared, terms_of

JOB, RUN = "<job id>", "<run id>"


def describe(prepared: Prepared, cluster: Cluster, workspace: str, experiment: str) -> dict[str, Any]:
    """The job as plain data: what each node and each rank would run, with which environment, mounts and files.

    Nothing is made, no node is asked, and secrets are asterisks.
    """
    segment = place_of(workspace, experiment, prepared.plan.name, JOB)
    folder = "/".join(part for part in (prepared.plan.folder_prefix, segment) if part)
    plan = replace(prepared.plan, job=JOB, run_id=RUN, segment=segment, folder=folder)
    request = StartRequest(JOB, protocol.job_mark(JOB, 1), folder, 1, plan.node_count, {}, terms_of(plan))
    commands = cluster.engine.render(request)
    files = [*prepared.code, *prepared.inputs, *prepared.tools]
    return {
        "name": prepared.plan.name,
        "cluster": cluster.name,
        "workspace": workspace,
        "experimentName": experiment,
        "folder": f"{cluster.share.url}/{folder}",
        "container": plan.container and plan.container.image,
        "nodes": [{"node": node_id(command.node), "command": list(command.argv)} for command in commands],
        "mounts": [_mount(volume) for volume in plan.volumes],
        "setupTask": plain(plan.setup_task),
        "preparation": plan.preparation or None,
        "ranks": _ranks(plan, prepared, cluster, commands),
        "files": {"count": len({file.sha256 for file in files}), "bytes": sum(file.size for file in files)},
        "parameters": dict(prepared.parameters),
        "secrets": sorted(prepared.secrets),
    }


def _mount(volume: Volume) -> dict[str, Any]:
    root = "$AZ_BATCHAI_JOB_MOUNT_ROOT" if volume.scope == "job" else "$AZ_BATCHAI_MOUNT_ROOT"
    how = "directory" if volume.kind == "link" else volume.how
    if volume.kind == "azureBlob":
        source = f"{volume.endpoint}/{volume.container}"
    elif volume.kind == "azureFiles":
        source = volume.share or ""
    else:
        source = volume.source or volume.command
    return {"path": f"{root}/{volume.path}", "name": volume.name, "how": how or volume.kind, "source": source}


def _ranks(plan: Plan, prepared: Prepared, cluster: Cluster, commands: Sequence[NodeCommand]) -> list[dict[str, Any]]:
    here = cluster.on_this_machine
    # Nodes of one machine meet on loopback.
    loopback = here and not plan.network_interface
    counted = [_gpus(plan, cluster, command.node) for command in commands]
    addresses = [LOOPBACK["address"] if loopback else f"<address of {node_id(command.node)}>" for command in commands]
    interface = str(LOOPBACK["name"]) if loopback else plan.network_interface or "<network interface>"
    rendezvous = {"address": addresses[0], "port": "<port>" if plan.is_distributed else 0}
    own = {name: terminal.shown(value) if name.lower().endswith("_proxy") else value for name, value in os.environ.items()}
    document = {entry.name for entry in plan.environment_variables} | set(prepared.secrets)
    python = _python(plan.python, here)
    found = []
    for slot in ranks.slots_of(plan, [len(gpus.ids) for gpus in counted]):
        command = commands[slot.node]
        layout = NodeLayout(command.root, plan, slot.node)
        known = ranks.Known(
            own if here else {name: f"<{name} of the node>" for name in ("PATH", "HOME")},
            addresses,
            counted[slot.node],
            dict.fromkeys(prepared.secrets, MASK),
            f"{layout.venv}/bin/python" if layout.venv else python,
            {"PATH": "<PATH of the image>"} if plan.container else None,
            python.rpartition("/")[0] if layout.venv else "",
        )
        cores = max(1, len(os.sched_getaffinity(0)) // cluster.engine.node_limit) if here else 0
        environment = ranks.rank_environment(layout, known, slot, rendezvous, interface, cores, command.archive)
        if not here:
            threads = f"<cores of {node_id(slot.node)} / {slot.local_size}>"
            environment.update(dict.fromkeys(thread_variables(1).keys() - document, threads))
            if plan.framework == PYTORCH and plan.gpus_per_node is None and not plan.communication_backend:
                environment["AZ_BATCHAI_PYTORCH_BACKEND"] = f"<nccl where {node_id(slot.node)} has GPUs, else gloo>"
            if plan.gpus_per_node is None and environment.get("GLIBC_TUNABLES") == ALLOCATOR:
                environment["GLIBC_TUNABLES"] = f"<{ALLOCATOR} where {node_id(slot.node)} has no GPU>"
        found.append(
            {
                "rank": slot.rank,
                "node": node_id(slot.node),
                "argv": ranks.argv(plan),
                "directory": layout.code,
                "environment": environment,
            }
        )
    return found


def _python(named: str, here: bool) -> str:
    """The training interpreter's path: where nodes are this machine, as they find it."""
    found = trainenv.find(named, os.environ) if here else None
    return found or (named if "/" in named else f"<folder of {named}>/{named}")


def _gpus(plan: Plan, cluster: Cluster, node: int) -> Gpus:
    """A node's GPUs: what this machine has of them, else as many as the cluster document says."""
    wanted = plan.gpus_per_node
    if cluster.on_this_machine:
        try:
            return of_node(os.environ, (node, cluster.document.nodes), wanted, node_id(node))
        except SetupError:
            pass
    return Gpus([str(number) for number in range(wanted or 0)], "gpusPerNode", hidden=wanted == 0)
