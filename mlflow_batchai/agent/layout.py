"""Paths on a node and the variables that name them: pure functions of the plan.

The names are Batch AI's (reference: its documentation "using-batchai-environment-variables"). Only the roots differ: Batch AI
had ``/mnt/batch/tasks/shared/LS_root``, we have one folder per node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from mlflow_batchai.agent.plan import AZURE_KINDS, Plan, StagedInput, Volume
from mlflow_batchai.agent.protocol import JobPaths, job_mark
from mlflow_batchai.agent.share import open_control

_REFERENCE = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)\}|(?P<plain>[A-Za-z_][A-Za-z0-9_]*))")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """``$NAME`` and ``${NAME}`` of known variables replaced; unknown ones stay (the shell may know them)."""
    return _REFERENCE.sub(lambda match: variables.get(match.group("braced") or match.group("plain"), match.group(0)), text)


def undefined(text: str, variables: Mapping[str, str]) -> list[str]:
    """The ``AZ_BATCHAI_*`` names that a text refers to and that do not exist, each once, in order."""
    names = [match.group("braced") or match.group("plain") for match in _REFERENCE.finditer(text)]
    return [name for name in dict.fromkeys(names) if name.startswith("AZ_BATCHAI_") and name not in variables]


class NodeLayout:
    """Paths of one job on one node.

    Args:
        share: where agents find the control share, whether the job mounts it or not: a directory of this node, or an address;
            default: its mount point.

    Attributes:
        mounted_share: the control share as ranks see it, through its mount.
        artifacts: where what scripts log by MLflow goes, likewise.
    """

    def __init__(self, root: str, plan: Plan, node: int, share: str | None = None, sas: str | None = None) -> None:
        self.root = root
        self.plan = plan
        self.node = node
        self.node_id = node_id(node)
        self.mark = job_mark(plan.job, plan.attempt)
        self.cluster_mounts = os.path.join(root, "mounts")
        self.job = os.path.join(root, "jobs", plan.job)
        self.job_mounts = os.path.join(self.job, "mounts")
        self.temp = os.path.join(self.job, "temp")
        self.code = os.path.join(self.temp, "code")
        self.inputs = os.path.join(self.temp, "inputs")
        self.spool = os.path.join(self.job, "spool")
        self.site = os.path.join(self.job, "site")
        self.bin = os.path.join(self.job, "bin")
        self.hostfile = os.path.join(self.job, "hostfile")
        self.umask = int(plan.umask, 8)
        cached = plan.preparation_cache
        # What a cached preparation leaves, for later jobs too; None: preparation is the job's own.
        self.prepared: str | None = os.path.join(root, "prepared", cached) if cached else None
        # The virtual environment over the training interpreter that a preparation changes; None: there is none, or a container.
        own = os.path.join(self.prepared, ".venv") if self.prepared else os.path.join(self.job, "venv")
        self.venv: str | None = own if plan.preparation and not plan.container else None
        self.mounted_share = os.path.join(self.cluster_mounts, plan.control_mount)
        self.share = share or self.mounted_share
        self.control = open_control(self.share, sas)
        self.paths = JobPaths(plan.folder, plan.attempt)
        self.attempt = self.control.attempt(self.paths, node, plan.node_count)
        mounted = os.path.join(self.mounted_share, *self.paths.folder.split("/"))
        self.mounted_stdouterr = self.on_mount(self.paths.stdouterr)
        self.shared_temp = os.path.join(mounted, "shared")
        self.artifacts = self.on_mount(self.paths.artifacts)

    def on_mount(self, path: str) -> str:
        return os.path.join(self.mounted_share, *path.split("/"))

    def input_path(self, staged: StagedInput) -> str:
        return os.path.join(self.inputs, staged.variable, staged.name)

    def volume_root(self, path: str) -> str | None:
        """The mount point of the plan's volume that a path on this node lies in, by its name; None: it lies in none whose files
        have owners and modes of their own (Azure's have those that their mount gives to all)."""
        for volume in self.plan.volumes:
            root = self.mount_path(volume)
            if path.startswith(root + os.sep):
                return None if volume.kind in AZURE_KINDS else root
        return None

    def mount_path(self, volume: Volume) -> str:
        base = self.job_mounts if volume.scope == "job" else self.cluster_mounts
        return os.path.join(base, *volume.path.split("/"))

    def roots(self) -> dict[str, str]:
        return {
            "AZ_BATCHAI_MOUNT_ROOT": self.cluster_mounts,
            "AZ_BATCHAI_JOB_MOUNT_ROOT": self.job_mounts,
            "AZ_BATCHAI_JOB_TEMP": self.temp,
            "AZ_BATCHAI_JOB_TEMP_DIR": self.temp,
            "AZ_BATCHAI_SHARED_JOB_TEMP": self.shared_temp,
        }

    def directories(self) -> dict[str, str]:
        roots = self.roots()
        found = {"AZ_BATCHAI_STDOUTERR_DIR": self.mounted_stdouterr}
        for directory in self.plan.input_directories:
            found["AZ_BATCHAI_INPUT_" + directory.id] = expand(directory.path, roots)
        for entry in self.plan.output_directories:
            parts = [expand(entry.path_prefix, roots), self.plan.segment, "outputs"]
            suffix = (entry.path_suffix or "").strip("/")
            found["AZ_BATCHAI_OUTPUT_" + entry.id] = (
                os.path.join(*parts, *suffix.split("/")) if suffix else os.path.join(*parts)
            )
        return found

    def service_variables(self, addresses: Sequence[str], gpus: int) -> dict[str, str]:
        found = self.roots()
        found.update(self.directories())
        found.update(
            AZ_BATCHAI_NUM_GPUS=str(gpus),
            AZ_BATCHAI_MPI_HOST_FILE=self.hostfile,
            AZ_BATCH_HOST_LIST=",".join(addresses),
        )
        return found


def log_name(plan: Plan, node: int, kind: str) -> str:
    """Batch AI's name of a log file: ``stdout-job_prep.txt`` on one node, with the node's id in it on several.

    Args:
        kind: ``execution``, ``stdout-job_prep`` or ``stderr-job_prep``.
    """
    ending = ".log" if kind == "execution" else ".txt"
    return kind + ("" if plan.node_count == 1 else "-" + node_id(node)) + ending


def node_id(node: int) -> str:
    """The id of a node in file names and for Horovod (Batch AI's were ``tvm-<pool>-<n>``)."""
    return f"node-{node}"


def archive_path() -> str:
    """The archive (or, run from source, the folder) that this module came from: what ranks import our helpers from."""
    location = os.path.abspath(__file__)
    for _ in range(3):
        location = os.path.dirname(location)
    return location
