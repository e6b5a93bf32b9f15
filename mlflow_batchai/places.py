"""Where a job's paths lie on shares, as a client works it out: pure functions of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlflow_batchai.errors import DocumentError
from mlflow_batchai.node.layout import expand

# Stand-ins for the mount roots, which are a node's business: no user writes a NUL.
_CLUSTER_ROOT, _JOB_ROOT = "\0cluster", "\0job"


def mount_points(volumes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Mount point -> index of the plan's volume that is mounted there."""
    return {
        f"{_JOB_ROOT if volume['scope'] == 'job' else _CLUSTER_ROOT}/{volume['path']}": index
        for index, volume in enumerate(volumes)
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


def output_places(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where each output directory lies for a client: ``{"id", "share": address, "path"}``."""
    prefixes = mount_points(plan["volumes"])
    places = []
    for entry in plan["outputDirectories"]:
        index, path = locate(entry["pathPrefix"], prefixes, entry["id"])
        suffix = (entry.get("pathSuffix") or "").strip("/")
        parts = [part for part in (path, plan["segment"], "outputs", suffix) if part]
        places.append({"id": entry["id"], "share": plan["volumes"][index]["share"], "path": "/".join(parts), "suffix": suffix})
    return places
