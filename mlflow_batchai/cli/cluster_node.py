"""``batchai cluster node``: what a cluster's nodes do, and commands on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from mlflow_batchai.cli.cluster_lookup import asking, find_cluster
from mlflow_batchai.cli.options import Scope, command, named
from mlflow_batchai.cli.output import Column

COLUMNS: list[Column] = [
    ("ID", "nodeId"),
    ("IP", "ipAddress"),
    ("SSH Port", "port"),
    ("State", "state"),
    ("Job", "job"),
]


@command(COLUMNS, example="batchai cluster node list -c nc6cluster -o table")
@named("cluster", option=("-c", "--cluster"))
def list_nodes(scope: Scope, name: str) -> Any:
    """The nodes of a cluster: where each can be reached, what it does, and the job that has it.

    A node that takes no jobs, since the cluster was resized to fewer nodes, is `closed`.
    """
    from mlflow_batchai.cluster import scaling, states

    cluster = find_cluster(scope, name)
    try:
        with asking(name):
            census = cluster.scalable.census()
        jobs = {job.ticket.number: job.name for job in scaling.queue(cluster, census)}
        return [states.show_node(node, jobs) for node in census.nodes]
    finally:
        cluster.engine.close()


@command(example="batchai cluster node exec -c nc6cluster -n 0 --exec 'nvidia-smi -L'")
@named("cluster", option=("-c", "--cluster"))
@click.option("-n", "--node-id", "node", required=True, metavar="NODE", help="The node's id, as `cluster node list` has it.")
@click.option("--exec", "line", metavar="COMMAND", help="A shell line.")
@click.option(
    "-L",
    "--address",
    "forwards",
    multiple=True,
    metavar="PORT:HOST:PORT",
    help="A port of this machine that leads to the node.",
)
def execute(scope: Scope, name: str, node: str, line: str | None, forwards: Sequence[str]) -> None:
    """Run a command on a node, or forward ports to it until Ctrl-C. The exit code is the command's.

    On a local cluster it starts in the node's own folder, over SSH (by the program ssh) in the login's home.
    """
    from mlflow_batchai.cli.node_exec import execute as run

    raise click.exceptions.Exit(run(find_cluster(scope, name), node, line, forwards))
