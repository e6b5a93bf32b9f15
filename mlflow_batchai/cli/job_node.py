"""``batchai job node``: the nodes that a job runs on, by the job's own names of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from mlflow_batchai.cli.job_lookup import find_job
from mlflow_batchai.cli.options import Scope, command, named, notice
from mlflow_batchai.cli.output import Column
from mlflow_batchai.errors import BatchAIError, JobError, NotFoundError

if TYPE_CHECKING:
    from mlflow_batchai.cluster.clusters import Cluster
    from mlflow_batchai.follower.detached import Submitted


def _called(node: Mapping[str, Any]) -> str:
    return node["nodeId"] if node["port"] is None else f"{node['nodeId']} ({node['host']})"


COLUMNS: list[Column] = [("ID", _called), ("IP", "ipAddress"), ("SSH Port", "port")]


@command(COLUMNS, example="batchai job node list -j digits-3f2a1c -o table", experiment=True)
@named("job", ("-j", "--job"), dest="job")
def list_nodes(scope: Scope, job: str) -> Any:
    """The nodes on which a job still runs, with address and port."""
    from mlflow_batchai.cluster import clusters

    found = find_job(scope, job)
    nodes = _alive(found)
    places = {}
    try:
        cluster = clusters.load(found.job.plan.cluster)[0]
        try:
            places = {report.place.name: report.place for report in cluster.scalable.census().nodes} if nodes else {}
        finally:
            cluster.engine.close()
    except BatchAIError as error:
        notice(f"the cluster can't be asked where its nodes are: {error}")
    for node in nodes:
        if place := places.get(node["name"]):
            node.update(ipAddress=place.address, port=place.port)
    return nodes


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
            # Agents of earlier versions announced none.
            "name": str(record.get("name", node_id(node))),
            "host": record["host"],
            "ipAddress": record["address"],
            "port": None,
        }
        for node, record in sorted(snapshot.announces.items())
        if node not in snapshot.exits
    ]


@command(example="batchai job node exec -j digits-3f2a1c -n node-0 --exec nvidia-smi", experiment=True)
@named("job", ("-j", "--job"), dest="job")
@click.option("-n", "--node-id", "node", metavar="ID", help="The job's node: node-2, or its host's name.  [node-0]")
@click.option("--exec", "line", metavar="COMMAND", help="A shell line; may be left out with -L.")
@click.option("-L", "--address", "forwards", metavar="PORT:HOST:PORT", multiple=True, help="Forward a port, as ssh -L does.")
def execute(scope: Scope, job: str, node: str | None, line: str | None, forwards: tuple[str, ...]) -> None:
    """Run a command on a node of a job, or forward ports; the exit code is the command's."""
    from mlflow_batchai.cli import node_exec
    from mlflow_batchai.cluster import clusters

    found = find_job(scope, job)
    nodes = _alive(found)
    if not nodes:
        raise JobError(f"job {found.job.name} has no nodes now")
    chosen = (
        nodes[0] if node is None else next((one for one in nodes if node in (one["nodeId"], one["name"], one["host"])), None)
    )
    if chosen is None:
        known = ", ".join(f"{one['nodeId']} ({one['host']})" for one in nodes)
        raise NotFoundError(f"job {found.job.name} has no node '{node}' now; it has: {known}")
    cluster: Cluster = clusters.load(found.job.plan.cluster)[0]
    raise click.exceptions.Exit(node_exec.execute(cluster, chosen["name"], line, forwards))
