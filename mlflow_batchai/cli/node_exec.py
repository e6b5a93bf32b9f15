"""Running a person's command on a node, and forwarding ports to it: for ``cluster node exec`` and ``job node exec``."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

from mlflow_batchai.cli.options import notice
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.engines.machines import Node
from mlflow_batchai.errors import ClusterError, NotFoundError, UsageError

_FORWARD = re.compile(r"(?:[^\s:]+:)?\d{1,5}:[^\s:]+:\d{1,5}")


def execute(cluster: Cluster, node: str, line: str | None, forwards: Sequence[str] = (), folder: str | None = None) -> int:
    """Run a shell line on a node, with our own terminal, and forward ports to it meanwhile.

    Args:
        node: its name in the cluster.
        line: None: only ports are forwarded, until Ctrl-C.
        forwards: ``port:host:port`` each.
        folder: where the line starts; default: the node's own folder on this machine, the login's home on another.

    Returns:
        The line's exit code.

    Raises:
        NotFoundError: the cluster has no such node.
        UsageError: there is nothing to do, or a forward can't be read.
        ClusterError: bash or ssh can't be started.
    """
    found = find(cluster, node)
    for forward in forwards:
        if not _FORWARD.fullmatch(forward):
            raise UsageError(f"-L '{forward}' must be PORT:HOST:PORT")
    if found.machine.address is None and forwards:
        notice("-L plays no part: the node is this machine, and its ports are this machine's")
        forwards = ()
    if line is None and not forwards:
        raise UsageError("there is nothing to do: give --exec COMMAND, or -L PORT:HOST:PORT for a node on another machine")
    command = found.machine.shell(line, folder, found.root, forwards, os.isatty(0) and os.isatty(1))
    try:
        process = subprocess.Popen(command.argv, cwd=command.cwd)
    except OSError as error:
        raise ClusterError(f"{command.argv[0]} can't be started: {error.strerror}: {error.filename}") from error
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the command has got it too, and knows what to do
            continue
        return code if code >= 0 else 128 - code


def find(cluster: Cluster, node: str) -> Node:
    """A node by its name."""
    nodes = cluster.node_access.nodes
    for found in nodes:
        if found.name == node:
            return found
    names = ", ".join(other.name for other in nodes)
    raise NotFoundError(f"cluster '{cluster.name}' has no node '{node}'; its nodes are: {names}")
