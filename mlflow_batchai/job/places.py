"""Where a job's paths lie on shares: pure functions of the plan."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.layout import expand
from mlflow_batchai.agent.plan import LogPlace, Plan, PlanError, Volume, read_plan
from mlflow_batchai.agent.protocol import TornFileError
from mlflow_batchai.documents.job import JobProperties
from mlflow_batchai.errors import DocumentError
from mlflow_batchai.storage import Share, job_file
from mlflow_batchai.storage.objects import each

# One file for each path under which job folders lie, besides the root: a share may hold millions of files that aren't ours.
PREFIXES = ".batchai/prefixes"
TOP = "workspaces"
# Below the prefix: workspaces/<workspace>/experiments/<experiment>/jobs/<job>/<short id>; None: any name.
_LEVELS: Sequence[str | None] = (TOP, None, "experiments", None, "jobs", None, None)


CONTROL_MOUNT = "share"
DEFAULT_PREFIX = f"$AZ_BATCHAI_MOUNT_ROOT/{CONTROL_MOUNT}"
# Stand-ins for the mount roots, which are a node's business: no user writes a NUL.
_CLUSTER_ROOT, _JOB_ROOT = "\0cluster", "\0job"


def note(share: Share, prefix: str) -> None:
    """Write that job folders lie under a path of the share (empty: its root, where they are looked for anyway)."""
    if prefix:
        name = hashlib.sha256(prefix.encode()).hexdigest()[:16]
        share.write(f"{PREFIXES}/{name}", protocol.encode([{"prefix": prefix}]))


def find(share: Share) -> list[str]:
    """Every job folder: under the root, under each folder of the root, and under every path that was noted.

    Raises:
        ShareError: a folder that job folders may lie in can't be read.
    """
    prefixes = {""}
    names = [f"{PREFIXES}/{entry.name}" for entry in share.list(PREFIXES)]
    for _, data in share.read_many(names, protocol.LONGEST_RECORD):
        with contextlib.suppress(TornFileError):
            prefix = protocol.decode_one(data).get("prefix")
            if isinstance(prefix, str) and ".." not in prefix.split("/") and "\0" not in prefix:
                prefixes.add(prefix)
    prefixes |= {entry.name for entry in share.list("") if entry.is_directory and entry.name not in (TOP, ".batchai")}
    found: Iterable[str] = sorted(prefixes)
    for level in _LEVELS:
        found = _below(share, found, level)
    return sorted(found)


def _below(share: Share, folders: Iterable[str], name: str | None) -> list[str]:
    if name is not None:
        return [f"{folder}/{name}" if folder else name for folder in folders]
    above = list(folders)
    lists = each(share, share.list, above)
    return [
        f"{folder}/{entry.name}"
        for folder, entries in zip(above, lists, strict=True)
        for entry in entries
        if entry.is_directory
    ]


def plan_record(share: Share, folder: str) -> protocol.Record | None:
    """The content of ``plan.json`` of a job folder, of whatever version; None if it has none that is whole."""
    try:
        return protocol.decode_one(job_file(share, protocol.JobPaths(folder).plan) or b"")
    except TornFileError:
        return None


def find_plan(share: Share, folder: str) -> Plan | None:
    """The plan of a job folder; None if it has none that can be read."""
    try:
        return read_plan(plan_record(share, folder))
    except PlanError:
        return None


def slug(text: str, longest: int = 40) -> str:
    """A name that Batch AI would take (``[-\\w_]``), short enough for paths."""
    return (re.sub(r"[^-A-Za-z0-9_]+", "-", text).strip("-") or "job")[:longest]


def segment(workspace: str, experiment: str, name: str, job_id: str) -> str:
    """Batch AI's jobOutputDirectoryPathSegment: what tells the folders of one job from those of all others."""
    return "/".join(("workspaces", slug(workspace), "experiments", slug(experiment), "jobs", name, job_id))


def segment_of(folder: str) -> str:
    """The segment of the job whose folder that is."""
    return "/".join(folder.split("/")[-7:])


def mount_points(volumes: Sequence[Volume]) -> dict[str, int]:
    """Mount point -> index of the plan's volume that is mounted there."""
    return {
        f"{_JOB_ROOT if volume.scope == 'job' else _CLUSTER_ROOT}/{volume.path}": index for index, volume in enumerate(volumes)
    }


def locate(text: str, prefixes: Mapping[str, int], where: str) -> tuple[int, str]:
    """(index of the volume, path in it) that a path of the document means.

    Raises:
        DocumentError: it lies on no mount, so nothing written there could come back.
    """
    roots = {"AZ_BATCHAI_MOUNT_ROOT": _CLUSTER_ROOT, "AZ_BATCHAI_JOB_MOUNT_ROOT": _JOB_ROOT}
    path = expand(text, roots).rstrip("/")
    for prefix in sorted(prefixes, key=len, reverse=True):
        if path == prefix or path.startswith(prefix + "/"):
            inside = path[len(prefix) :].strip("/")
            if ".." in inside.split("/"):
                raise DocumentError(f"{where} is '{text}': '..' would lead out of the mount")
            return prefixes[prefix], inside
    known = ", ".join(
        prefix.replace(_CLUSTER_ROOT, "$AZ_BATCHAI_MOUNT_ROOT").replace(_JOB_ROOT, "$AZ_BATCHAI_JOB_MOUNT_ROOT")
        for prefix in prefixes
    )
    raise DocumentError(f"{where} is '{text}', which lies on no mounted volume; the mounts are: {known}")


def output_places(plan: Plan) -> list[dict[str, Any]]:
    """Places of output directories that a client can read: ``{"id", "share": address, "path", "rclone"}``.

    The path is as nodes call it; ``rclone`` tells whether the share has it in rclone's spelling (``storage/spelling.py``).
    """
    prefixes = mount_points(plan.volumes)
    places = []
    for entry in plan.output_directories:
        index, path = locate(entry.path_prefix, prefixes, entry.id)
        volume = plan.volumes[index]
        if volume.share is None:
            continue
        suffix = (entry.path_suffix or "").strip("/")
        parts = [part for part in (path, plan.segment, "outputs", suffix) if part]
        place = {"id": entry.id, "share": volume.share, "path": "/".join(parts)}
        places.append({**place, "rclone": volume.by_rclone})
    return places


def place_logs(properties: JobProperties, volumes: Sequence[Volume], source: str) -> tuple[str, LogPlace | None, list[str]]:
    """(path on the control share under which the job folder goes, where else logs are copied at the end, warnings).

    Raises:
        DocumentError: a path of the document lies on no volume.
    """
    prefixes = mount_points(volumes)
    text = properties.std_out_err_path_prefix or DEFAULT_PREFIX
    index, path = locate(text, prefixes, f"{source}: properties.stdOutErrPathPrefix")
    warnings = []
    for entry in properties.output_directories:
        volume, _ = locate(entry.path_prefix, prefixes, f"{source}: outputDirectories {entry.id}: pathPrefix")
        if volumes[volume].share is None:
            warnings.append(
                f"{source}: outputDirectories {entry.id} lies on {volumes[volume].name}, which this machine can't read:"
                " what is written there stays there"
            )
    below = on_control(volumes, index)
    if below is None:
        return "", LogPlace(index, path), warnings
    return "/".join(part for part in (below, path) if part), None, warnings


def on_control(volumes: Sequence[Volume], index: int) -> str | None:
    """Path of a volume on the control share, empty for its root; None: it lies elsewhere."""
    control, volume = volumes[0].share or "", volumes[index].share
    if index == 0 or (volumes[index].kind == "azureFiles" and volume == control):
        return ""
    if volumes[index].kind == "azureFiles" and str(volume).startswith(control + "/"):
        return str(volume)[len(control) + 1 :]
    return None
