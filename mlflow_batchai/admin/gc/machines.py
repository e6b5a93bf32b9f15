"""Find and remove unused files on nodes and on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path

from mlflow_batchai.admin.gc.items import Age, Item, Say
from mlflow_batchai.agent.leftovers import size
from mlflow_batchai.agent.reservation import locks
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.config import home
from mlflow_batchai.engines import archive
from mlflow_batchai.engines.base import NodeAccess
from mlflow_batchai.engines.machines import Answer, LocalMachine, Machine, Node
from mlflow_batchai.engines.parallel import at_once
from mlflow_batchai.errors import ClusterError
from mlflow_batchai.horovod_wheel.environment import cache_root, wheel_pattern

# An environment has tens of thousands of files, which a slow disk counts, or removes, in minutes.
ASK_SECONDS = 600.0
# What serves all clusters stays that long, whatever was asked for: a follower that lives may have nothing to write for days,
# and a wheel, which takes minutes of all cores, may be another client folder's.
OWN_SECONDS = 30 * 86400.0


def of_local_nodes(names: Collection[str] | None, age: Age) -> list[Item]:
    """Unused files in the folders of this machine's nodes, and in those that they share: environments, archives.

    Args:
        names: clusters; None: all that there ever were.
    """
    machine = LocalMachine(home() / "agents")
    roots = sorted(path for path in (home() / "nodes").glob("*/*") if path.name != "book" and path.is_dir())
    common = {
        "seconds": age.seconds,
        "environments": str(home() / "envs"),
        "agents": str(home() / "agents"),
        "archive": str(home() / "agents" / archive.name_of(archive.build())),
    }
    # A cluster that has no nodes any more leaves what all share.
    wanted = [root for root in roots if names is None or root.parent.name in names] or [home() / "nodes"]
    return [item for root in wanted for item in _of_node(machine, "", {"root": str(root), **common})]


def of_other_machines(cluster: Cluster, age: Age, say: Say) -> list[Item]:
    """Unused files of a cluster's machines, all asked at once; one that can't be asked is named and skipped."""
    if not isinstance(cluster.engine, NodeAccess):
        return []

    def ask(node: Node) -> list[Item]:
        try:
            return _of_node(node.machine, f"{node.name}:", {"root": node.root, "seconds": age.seconds})
        except ClusterError as error:
            say(f"cluster {cluster.name}: {error}; what it has stays")
            return []

    nodes = [node for node in cluster.engine.nodes if node.machine.address is not None]
    try:
        return [item for items in at_once([partial(ask, node) for node in nodes]) for item in items]
    finally:
        # What is to be removed opens them anew: a person may think about it for long.
        cluster.engine.close()


def _of_node(machine: Machine, prefix: str, arguments: Answer) -> list[Item]:
    now = time.time()

    def remove(path: str) -> bool:
        return path in machine.ask("leftovers", ASK_SECONDS, **arguments, remove=[path])["gone"]

    return [
        Item(
            each["kind"], prefix + each["path"], each["bytes"], now - each["age"], each["reason"], partial(remove, each["path"])
        )
        for each in machine.ask("leftovers", ASK_SECONDS, **arguments)["items"]
    ]


def of_this_machine(age: Age) -> list[Item]:
    """Followers' logs, and Horovod wheels that were built for interpreters that nobody used since."""
    cache = cache_root(os.environ)
    logs = [(path, None) for path in sorted((home() / "followers").glob("*.log"))]
    wheels = [(cache / lock.stem, lock) for lock in sorted(cache.glob("*.lock")) if (cache / lock.stem).is_dir()]
    return [
        Item(
            "wheel" if lock else "log",
            str(path),
            size(str(path)),
            _used(path),
            "not used since",
            partial(_remove, path, age, lock),
        )
        for path, lock in (*logs, *wheels)
        if age.is_past(_used(path), OWN_SECONDS)
    ]


def _used(path: Path) -> float | None:
    """When a log, or a folder and the wheels in it, was last read or written."""
    times = []
    for each in [path, *path.glob(wheel_pattern())]:
        with contextlib.suppress(OSError):
            status = each.stat()
            # Whoever lists a folder reads it.
            times.append(status.st_mtime if each.is_dir() else max(status.st_mtime, status.st_atime))
    return max(times, default=None)


def _remove(path: Path, age: Age, lock: Path | None) -> bool:
    """Remove what is still unused; builds of a wheel are kept waiting by the lock, and it stays if one is under way."""
    with contextlib.ExitStack() as stack:
        if lock:
            file = stack.enter_context(lock.open("a"))
            if not locks.try_lock(file.fileno()):
                return False
        used = _used(path)
        if used is not None and not age.is_past(used, OWN_SECONDS):
            return False
        try:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise ClusterError(f"{path} can't be removed: {error.strerror or error}") from error
    return not path.exists()
