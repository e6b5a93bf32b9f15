"""The engine ``local``: this machine as N nodes, each a folder and the process tree of its agent."""

from __future__ import annotations

import socket
from pathlib import Path

from mlflow_batchai.agent.staging import remove_job_folder
from mlflow_batchai.engines.base import CheckResult, Handle, Needs
from mlflow_batchai.engines.hosts import Hosts
from mlflow_batchai.engines.machines import LocalMachine, Node
from mlflow_batchai.engines.registry import Site
from mlflow_batchai.errors import ClusterError


def build(site: Site) -> LocalHosts:
    return LocalHosts(site.home, site.cluster, site.nodes, site.share, site.document.nodes)


def _folder(home: Path, cluster: str) -> Path:
    return home / "nodes" / cluster


def remove_nodes(home: Path, cluster: str) -> None:
    """Remove the folders of a cluster's nodes, on which nothing runs any more; mounts there are undone, not emptied."""
    remove_job_folder(str(_folder(home, cluster)))


class LocalHosts(Hosts):
    """N nodes on this machine.

    Args:
        home: the client's folder (``$BATCHAI_HOME``).
        divided: among how many nodes the machine's GPUs are divided: resizing must not move those of running jobs.
    """

    kind = "local"
    poll_seconds = 1.0

    def __init__(self, home: Path, cluster: str, nodes: int, share: str, divided: int | None = None) -> None:
        self._folder = folder = _folder(home, cluster)
        machine = LocalMachine(home / "agents")
        parts = f"{nodes}/{divided or nodes}"
        made = [Node(str(index), machine, str(folder / str(index)), f"{index}/{parts}", str(index)) for index in range(nodes)]
        super().__init__(made, str(folder / "book"), share)
        self._here = machine

    def check(self, node_count: int, needs: Needs | None = None) -> CheckResult:
        nodes = self._usable(node_count)
        # What one of them lacks all do.
        lack, missing = self._lack(nodes[0], needs)
        if lack:
            raise ClusterError(lack)
        return CheckResult(len(nodes), missing)

    def _node(self, entry: Handle) -> Node | None:
        # The cluster's document may name fewer nodes by now.
        name = str(entry["name"])
        return Node(name, self._here, str(self._folder / name)) if name.isdecimal() else None

    def _cant_ask(self, handle: Handle) -> str:
        if handle["host"] != socket.gethostname():
            return f"the job runs on {handle['host']}, whose processes can't be seen from here"
        return super()._cant_ask(handle)

    def cancel(self, handle: Handle) -> None:
        if handle["host"] != socket.gethostname():
            raise ClusterError(f"the job runs on {handle['host']}; end it there")
        super().cancel(handle)
