"""``batchai cluster node`` and ``batchai job node``: states of nodes, commands on them, ports that lead to them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from mlflow_batchai.cli.lookup import asking, find_cluster, find_job
from mlflow_batchai.cli.options import Noun, Scope, named, notice
from mlflow_batchai.cli.output import Column
from mlflow_batchai.errors import BatchAIError, ClusterError, JobError, NotFoundError, UsageError

if TYPE_CHECKING:
    from mlflow_batchai.cluster.clusters import Cluster
    from mlflow_batchai.engines.base import Handle
    from mlflow_batchai.engines.machines import Node
    from mlflow_batchai.follower.detached import Submitted

_FORWARD = re.compile(r"(?:[^\s:]+:)?\d{1,5}:[^\s:]+:\d{1,5}")

cluster_node = Noun("node", "A cluster's nodes.")
job_node = Noun("node", "The nodes that a job runs on.", experiment=True)
of_cluster = named("cluster", option=("-c", "--cluster"))
shell_line = click.option("--exec", "line", metavar="COMMAND", help="A shell line; may be left out with -L.")
forwarding = click.option(
    "-L", "--address", "forwards", metavar="PORT:HOST:PORT", multiple=True, help="Forward a port, as ssh -L does."
)


def _called(node: Mapping[str, Any]) -> str:
    return node["nodeId"] if node["port"] is None else f"{node['nodeId']} ({node['host']})"


PLACE: list[Column] = [("IP", "ipAddress"), ("SSH Port", "port")]
CLUSTER_COLUMNS: list[Column] = [("ID", "nodeId"), *PLACE, ("State", "state"), ("Job", "job")]
JOB_COLUMNS: list[Column] = [("ID", _called), *PLACE]


@cluster_node.verb("list", CLUSTER_COLUMNS, example="batchai cluster node list -c nc6cluster -o table")
@of_cluster
def list_cluster(scope: Scope, name: str) -> Any:
    """The nodes of a cluster: where each can be reached, what it does, and the job that has it.

    A node that takes no jobs, since the cluster was resized to fewer nodes, is `closed`.
    """
    from mlflow_batchai.cluster import scaling, states

    cluster = find_cluster(scope, name)
    with asking(cluster):
        census = cluster.scalable.census()
        jobs = {each.number: scaling.name_of(cluster.share, each) for each in census.reservations}
        return [states.show_node(node, jobs) for node in census.nodes]


@cluster_node.verb("exec", example="batchai cluster node exec -c nc6cluster -n 0 --exec 'nvidia-smi -L'")
@of_cluster
@click.option("-n", "--node-id", "node", required=True, metavar="NODE", help="The node's id, as `cluster node list` has it.")
@shell_line
@forwarding
def execute_on_cluster(scope: Scope, name: str, node: str, line: str | None, forwards: Sequence[str]) -> None:
    """Run a command on a node, or forward ports to it until Ctrl-C. The exit code is the command's.

    On a local cluster it starts in the node's own folder, over SSH (by the program ssh) in the login's home.
    """
    raise click.exceptions.Exit(_execute(_find(find_cluster(scope, name), node), line, forwards))


@job_node.verb("list", JOB_COLUMNS, example="batchai job node list -j digits-3f2a1c -o table")
@named("job", ("-j", "--job", "-n", "--name"), dest="job")
def list_job(scope: Scope, job: str) -> Any:
    """The nodes on which a job still runs, with address and port."""
    from mlflow_batchai.cluster import clusters

    found = find_job(scope, job)
    nodes = _alive(found)
    places = {}
    if nodes:
        try:
            cluster = clusters.load(found.job.plan.cluster)[0]
            with asking(cluster):
                places = {report.place.name: report.place for report in cluster.scalable.census().nodes}
        except BatchAIError as error:
            notice(f"the cluster can't be asked where its nodes are: {error}")
    for node in nodes:
        if place := places.get(node["name"]):
            node.update(ipAddress=place.address, port=place.port)
    return nodes


@job_node.verb("exec", example="batchai job node exec -j digits-3f2a1c -n node-0 --exec nvidia-smi")
@named("job", ("-j", "--job"), dest="job")
@click.option("-n", "--node-id", "node", metavar="ID", help="The job's node: node-2, or its host's name.  [node-0]")
@shell_line
@forwarding
def execute_on_job(scope: Scope, job: str, node: str | None, line: str | None, forwards: Sequence[str]) -> None:
    """Run a command on a node of a job, or forward ports; the exit code is the command's."""
    from mlflow_batchai.cluster import clusters

    found = find_job(scope, job)
    nodes = _alive(found)
    if not nodes:
        raise JobError(f"job {found.job.name} has no nodes now")
    chosen = [one for one in nodes if node is None or node in (one["nodeId"], one["name"], one["host"])]
    if not chosen:
        known = ", ".join(f"{one['nodeId']} ({one['host']})" for one in nodes)
        raise NotFoundError(f"job {found.job.name} has no node '{node}' now; it has: {known}")
    cluster = clusters.load(found.job.plan.cluster)[0]
    on = _find(cluster, chosen[0]["name"], found.job.handle())
    raise click.exceptions.Exit(_execute(on, line, forwards))


def _alive(found: Submitted) -> list[dict[str, Any]]:
    """The nodes that a job has now: none before they are taken, and none after its end."""
    from mlflow_batchai.agent.layout import node_id
    from mlflow_batchai.client import runner

    if runner.state(found).ended:
        return []
    snapshot = found.job.snapshot()
    return [
        {
            "nodeId": node_id(node),
            "name": str(record.get("name", node_id(node))),
            "host": record["host"],
            "ipAddress": record["address"],
            "port": None,
        }
        for node, record in sorted(snapshot.announces.items())
        if node not in snapshot.exits
    ]


def _execute(found: Node, line: str | None, forwards: Sequence[str]) -> int:
    """Run a shell line on a node, with our own terminal, and forward ports to it meanwhile.

    Args:
        line: None: only ports are forwarded, until Ctrl-C.
        forwards: ``port:host:port`` each.

    Returns:
        The line's exit code.

    Raises:
        UsageError: there is nothing to do, or a forward can't be read.
        ClusterError: bash or ssh can't be started.
    """
    for forward in forwards:
        if not _FORWARD.fullmatch(forward):
            raise UsageError(f"-L '{forward}' must be PORT:HOST:PORT")
    if found.machine.address is None and forwards:
        notice("-L plays no part: the node is this machine, and its ports are this machine's")
        forwards = ()
    if line is None and not forwards:
        raise UsageError("there is nothing to do: give --exec COMMAND, or -L PORT:HOST:PORT for a node on another machine")
    command = found.machine.shell(line, None, found.root, forwards, os.isatty(0) and os.isatty(1))
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


def _find(cluster: Cluster, node: str, handle: Handle | None = None) -> Node:
    access = cluster.node_access
    if found := access.find(node, handle):
        return found
    names = ", ".join(other.name for other in access.nodes)
    raise NotFoundError(f"cluster '{cluster.name}' has no node '{node}'; its nodes are: {names}")
