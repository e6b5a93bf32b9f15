"""Examine a cluster's nodes: first each by itself, then the network between them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from mlflow_batchai.admin.doctor import findings
from mlflow_batchai.admin.doctor.findings import CHECKS, Check, Finding, failed, ok
from mlflow_batchai.agent.containers.engines import APPTAINER
from mlflow_batchai.agent.gpus import LISTING_SECONDS
from mlflow_batchai.agent.plan import Container, plain
from mlflow_batchai.cluster.clusters import Cluster, share_secret
from mlflow_batchai.engines.machines import Answer, Node
from mlflow_batchai.engines.parallel import at_once
from mlflow_batchai.errors import ClusterError, HostKeyError, ShareError
from mlflow_batchai.storage.base import identify

ASK_SECONDS = 20.0
# A first import of TensorFlow from a slow disk takes a minute.
TRAINING_SECONDS = 90.0
LISTEN_SECONDS = 60.0
PROBE_SECONDS = 5.0


class JobCheck(NamedTuple):
    """Parameters of an examination that are the same for all nodes.

    Attributes:
        folder: where nodes write, to see that they can.
        secret: what opens the control share for them, None: a directory.
    """

    cluster: Cluster
    identity: str
    folder: str
    secret: str | None


class NodeCheck:
    """One node to check.

    Args:
        tell: called after each check of it, with its name and state in a few words.

    Attributes:
        answers: what it has said, by verb.
    """

    def __init__(self, index: int, node: Node, tell: Callable[[str], None]) -> None:
        machine = node.machine
        self.node = node
        self.file = f"node-{index}"
        self.is_remote = machine.address is not None
        self.name = node.name if self.is_remote else self.file
        self.title = machine.title
        self.answers: dict[str, Answer] = {}
        self.found: dict[str, Finding] = {}
        self._tell = tell

    def ask(self, verb: str, timeout: float = ASK_SECONDS, **arguments: Any) -> Answer:
        """Ask a verb, and keep the answer; ClusterError if there is none."""
        said = self.answers[verb] = self.node.machine.ask(verb, timeout, **arguments)
        return said

    def check(self, name: str, make: Callable[[], Finding | Answer]) -> bool:
        """Make a check, or only ask for what is judged later; whether the node answered."""
        try:
            found = make()
        except ClusterError as error:
            self.tell(name, failed(self.plain(error)))
            return False
        if isinstance(found, Finding):
            self.tell(name, found)
        return True

    def tell(self, name: str, finding: Finding) -> None:
        self.found[name] = finding
        self._tell(f"{self.name}: {name} {finding.state.value}")

    def plain(self, error: ClusterError | str) -> str:
        """A sentence of the engine without the node's name in front."""
        return str(error).removeprefix(f"{self.title}: ").removeprefix(f"{self.title} ({self.node.machine.address}): ")


def examine(cluster: Cluster, tell: Callable[[str], None]) -> list[Check]:
    """Examine all nodes; every wait is bounded.

    A node that can't be reached, or whose agent can't be run, has no further checks. Nodes of this machine have no checks of
    what lies between machines (host key, network).

    Args:
        tell: called after each check, by several threads; as of ``NodeCheck``.

    Returns:
        All checks, in the order of nodes and of ``CHECKS``.

    Raises:
        ShareError: this machine can't use the control share.
        NotSupportedError: the cluster's engine has no nodes to look into.
    """
    nodes = [NodeCheck(index, node, tell) for index, node in enumerate(cluster.node_access.nodes)]
    secret = share_secret(cluster.location)
    job = JobCheck(cluster, identify(cluster.share), f".batchai/doctor/{uuid.uuid4().hex}", secret)
    cluster.share.claim(job.folder)
    try:
        _examine(job, nodes)
    finally:
        # A share that fails now has failed in a check, too.
        with contextlib.suppress(ShareError):
            cluster.share.delete(job.folder)
    return [Check(node.name, name, *node.found[name]) for node in nodes for name in CHECKS if name in node.found]


def _examine(job: JobCheck, nodes: Sequence[NodeCheck]) -> None:
    machines: dict[int, list[NodeCheck]] = {}
    for node in nodes:
        machines.setdefault(id(node.node.machine), []).append(node)
    present = [node for group in at_once([partial(_machine, job, group) for group in machines.values()]) for node in group]
    _compare(job.cluster, nodes)
    if present and present[0].is_remote:
        _network(present, job.cluster.document.network_interface)


def _machine(job: JobCheck, nodes: Sequence[NodeCheck]) -> list[NodeCheck]:
    """Check the nodes of one machine in turn, and what they have in common once; those that can be asked more."""
    document, python = job.cluster.document, job.cluster.python
    present = [node for node in nodes if _reach(node)]
    for node in present:
        wanted = {"part": node.node.part, "wanted": document.gpus_per_node}
        node.check("GPUs", partial(node.ask, "accelerators", LISTING_SECONDS + ASK_SECONDS, **wanted))
        if document.containers == APPTAINER:
            node.check("container", partial(_container, node, python))
        node.check("share", partial(_share, job, node))
        node.check("folder", partial(node.ask, "place", root=node.node.root))
        if node is present[0]:
            node.check("training", partial(_training, node, python))
        else:
            node.tell("training", present[0].found["training"])
    return present


def _reach(node: NodeCheck) -> bool:
    try:
        for name, text in node.node.machine.connect().items():
            node.tell(name, ok(text))
    except ClusterError as error:
        node.tell("host key" if isinstance(error, HostKeyError) else "reachable", failed(node.plain(error)))
        return False
    return node.check("python", partial(_python, node))


def _python(node: NodeCheck) -> Finding:
    said = node.ask("facts", 2 * ASK_SECONDS)
    return ok(f"Python {said['python']} ({said['executable']}) runs the agent")


def _share(job: JobCheck, node: NodeCheck) -> Finding:
    path = job.cluster.share_on_nodes
    try:
        said = node.ask(
            "offer", 2 * ASK_SECONDS, share=path, identity=job.identity, path=f"{job.folder}/{node.file}", sas=job.secret
        )
    except ClusterError as error:
        said = {"trouble": "failed", "why": node.plain(error)}
    return findings.share(said, path, node.title)


def _container(node: NodeCheck, python: str) -> Finding:
    said = node.ask("needs", volumes=[], container=plain(Container("", engine=APPTAINER)), python=python)
    return failed(said["trouble"]) if said["trouble"] else ok("Apptainer is there")


def _training(node: NodeCheck, python: str) -> Finding:
    said = node.ask("training", TRAINING_SECONDS + ASK_SECONDS, python=python, seconds=TRAINING_SECONDS)
    return findings.training(said, python)


def _compare(cluster: Cluster, nodes: Sequence[NodeCheck]) -> None:
    """Judge what can only be judged when all have answered: their GPUs, and their folders, of which the engine says it."""
    gpus = {node.name: node.answers["accelerators"] for node in nodes if "accelerators" in node.answers}
    counts = [said["count"] for said in gpus.values() if not said["trouble"]]
    problems = cluster.node_access.folder_problems([node.answers.get("place") for node in nodes])
    for node, reason in zip(nodes, problems, strict=True):
        if node.name in gpus:
            node.tell("GPUs", findings.accelerators(gpus[node.name], counts, node.answers.get("training")))
        if reason:
            node.tell("folder", failed(node.plain(reason)))
        elif place := node.answers.get("place"):
            node.tell("folder", ok(place["root"]))


def _network(present: Sequence[NodeCheck], interface: str | None) -> None:
    """Whether the nodes reach each other: all listen, then all try all addresses of all others."""
    mark = uuid.uuid4().hex

    def listen(node: NodeCheck) -> Answer:
        return node.ask("listen", token=f"{mark} {node.name}", interface=interface, seconds=LISTEN_SECONDS)

    at_once([partial(node.check, "network", partial(listen, node)) for node in present])
    listening = {node.name: node for node in present if "listen" in node.answers}
    reached: dict[str, dict[str, list[str]]] = {}

    def probe(node: NodeCheck) -> Answer:
        others = [other for other in listening.values() if other is not node]
        targets = [
            (each["address"], other.answers["listen"]["port"], f"{mark} {other.name}")
            for other in others
            for each in other.answers["listen"]["interfaces"]
        ]
        said = node.ask("probe", PROBE_SECONDS + ASK_SECONDS, targets=targets, seconds=PROBE_SECONDS)
        results = iter(said["results"])
        reached[node.name] = {other.name: [next(results) for _ in other.answers["listen"]["interfaces"]] for other in others}
        return said

    at_once([partial(node.check, "network", partial(probe, node)) for node in listening.values()])
    tried = {name: node.answers["listen"] for name, node in listening.items() if name in reached}
    for name, finding in findings.network(tried, reached).items():
        listening[name].tell("network", finding)
