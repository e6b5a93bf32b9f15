"""What lies on nodes and on this machine that nothing uses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

from mlflow_batchai.admin.gc.items import Item, Say
from mlflow_batchai.agent.leftovers import size
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.config import home
from mlflow_batchai.engines import archive
from mlflow_batchai.engines.hosts import Hosts
from mlflow_batchai.engines.machines import Answer, LocalMachine, Machine, Node, SshMachine
from mlflow_batchai.engines.parallel import at_once
from mlflow_batchai.errors import ClusterError
from mlflow_batchai.horovod_wheel.environment import cache_root, wheel_pattern

# An environment has tens of thousands of files, which a slow disk counts, or removes, in minutes.
ASK_SECONDS = 600.0
# The user's cache of wheels serves all clusters and client folders of that user, and a wheel takes minutes of all cores:
# freeing one client folder leaves what another may use.
WHEEL_SECONDS = 30 * 86400.0


def of_local_nodes(names: Collection[str] | None, seconds: float) -> list[Item]:
    """What the folders of local nodes hold, and what all of them share: environments, agents' archives.

    Args:
        names: clusters; None: all that there ever were.
    """
    machine = LocalMachine(home() / "agents")
    roots = sorted(path for path in (home() / "nodes").glob("*/*") if path.name != "book" and path.is_dir())
    common = {
        "seconds": seconds,
        "environments": str(home() / "envs"),
        "agents": str(home() / "agents"),
        "archive": str(home() / "agents" / archive.name_of(archive.build())),
    }
    # A cluster that has no nodes any more leaves what all share.
    wanted = [root for root in roots if names is None or root.parent.name in names] or [home() / "nodes"]
    found: dict[str, Item] = {}
    for root in wanted:
        for item in _of_node(machine, "", {"root": str(root), **common}):
            found.setdefault(item.path, item)
    return list(found.values())


def of_ssh_nodes(cluster: Cluster, seconds: float, say: Say) -> list[Item]:
    """What the machines of a cluster hold, all asked at once; one that can't be asked is told of, and keeps what it has."""
    engine = cluster.engine
    if not isinstance(engine, Hosts):
        return []

    def ask(node: Node) -> list[Item]:
        try:
            return _of_node(node.machine, f"{node.name}:", {"root": node.root, "seconds": seconds})
        except ClusterError as error:
            say(f"cluster {cluster.name}: {error}; what it has stays")
            return []

    nodes = [node for node in engine.nodes if isinstance(node.machine, SshMachine)]
    try:
        return [item for items in at_once([partial(ask, node) for node in nodes]) for item in items]
    finally:
        # What is to be removed opens them anew: a person may think about it for long.
        engine.close()


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


def of_this_machine(living: Collection[str] | None, before: float) -> list[Item]:
    """Followers' logs, and Horovod wheels that were built for interpreters that nobody used since.

    Args:
        living: short ids of jobs whose follower may run; None: of some nobody knows.
        before: seconds since the epoch.
    """
    logs = [] if living is None else [path for path in (home() / "followers").glob("*.log") if path.stem not in living]
    items = [
        Item("log", str(path), size(str(path)), used, "not written since", partial(_unlink, path, before))
        for path in sorted(logs)
        if (used := _used([path])) is not None and used < before
    ]
    before = min(before, time.time() - WHEEL_SECONDS)
    cache = cache_root(os.environ)
    for folder in sorted(path for path in cache.glob("*") if path.is_dir() and (cache / f"{path.name}.lock").exists()):
        used = _used([*folder.glob(wheel_pattern()), folder])
        if used is not None and used < before:
            reason, remove = "not used since", partial(_remove_wheel, folder, before)
            items.append(Item("wheel", str(folder), size(str(folder)), used, reason, remove))
    return items


def _used(paths: Sequence[Path]) -> float | None:
    """When the newest of files and folders was last read or written."""
    times = []
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            # Whoever lists a folder reads it.
            times.append(status.st_mtime if path.is_dir() else max(status.st_mtime, status.st_atime))
    return max(times, default=None)


def _unlink(path: Path, before: float) -> bool:
    return _removed(path, before, lambda: path.unlink(missing_ok=True))


def _removed(path: Path, before: float, remove: Callable[[], None]) -> bool:
    used = _used([path])
    if used is not None and used >= before:
        return False
    try:
        remove()
    except OSError as error:
        raise ClusterError(f"{path} can't be removed: {error.strerror or error}") from error
    return not path.exists()


def _remove_wheel(folder: Path, before: float) -> bool:
    with _locked(folder.parent / f"{folder.name}.lock") as is_ours:
        if not is_ours:
            return False
        used = _used([*folder.glob(wheel_pattern()), folder])
        if used is not None and used >= before:
            return False
        shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Keep builds of a wheel waiting; False if one is under way."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
