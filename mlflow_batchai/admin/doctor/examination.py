"""Examine a cluster's nodes: first each by itself, then the share and the network between them."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from mlflow_batchai.admin.doctor import findings
from mlflow_batchai.admin.doctor.findings import CHECKS, Check, Finding, failed, ok
from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.gpus import LISTING_SECONDS
from mlflow_batchai.agent.plan import Volume, plain
from mlflow_batchai.cluster.clusters import Cluster, share_secret
from mlflow_batchai.documents.job import JobProperties
from mlflow_batchai.engines.machines import Answer, Node
from mlflow_batchai.engines.parallel import at_once
from mlflow_batchai.errors import ClusterError, HostKeyError, ShareError
from mlflow_batchai.plan.volumes import choose_volumes
from mlflow_batchai.storage import Share
from mlflow_batchai.storage.base import identify

ASK_SECONDS = 20.0
# A first import of TensorFlow from a slow disk takes a minute.
TRAINING_SECONDS = 90.0
# Two engines may each take a while to say that they don't work (``containers.engines.LOOK_SECONDS``).
CONTAINERS_SECONDS = 40.0
# As long as a share's caches may take; a job would wait longer.
VISIBLE_SECONDS = 10.0
LISTEN_SECONDS = 60.0
PROBE_SECONDS = 5.0
# What a doctor that was killed has left: none takes that long.
LEFT_SECONDS = 86400.0

FOLDER = ".batchai/doctor"
# This machine's file among those of the nodes.
CLIENT = "client"


class JobCheck(NamedTuple):
    """Parameters of an examination that are the same for all nodes.

    Attributes:
        identity: the control share's.
        folder: where nodes put files for each other to see.
        secret: what opens the control share for them, None: a directory.
        volumes: those that every job of the cluster mounts, but for directories.
    """

    cluster: Cluster
    identity: str
    folder: str
    secret: str | None
    volumes: Sequence[Volume]


class NodeCheck:
    """One node to check.

    Args:
        tell: called after each check of it.

    Attributes:
        file: its name among the files on the share.
        answers: what it has said, by verb.
        found: by check.
    """

    def __init__(self, index: int, node: Node, tell: Callable[[], None]) -> None:
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
        self._tell()

    def plain(self, error: ClusterError | str) -> str:
        """A sentence of the engine without the node's name in front."""
        return str(error).removeprefix(f"{self.title}: ").removeprefix(f"{self.title} ({self.node.machine.address}): ")


def examine(cluster: Cluster, tell: Callable[[], None] = lambda: None) -> list[Check]:
    """Examine all nodes; every wait is bounded.

    A node that can't be reached, or whose agent can't be run, has no further checks. Nodes of this machine have no checks of
    what lies between machines (host key, network, clock).

    Args:
        tell: called after each check, by several threads.

    Returns:
        All checks, in the order of nodes and of ``CHECKS``.

    Raises:
        ShareError: this machine can't use the control share.
        NotSupportedError: the cluster's engine has no nodes to look into.
    """
    nodes = [NodeCheck(index, node, tell) for index, node in enumerate(cluster.node_access.nodes)]
    folder = f"{FOLDER}/{time.time():.0f}-{uuid.uuid4().hex}"
    identity = identify(cluster.share)
    _tidy(cluster.share)
    cluster.share.claim(folder)
    try:
        cluster.share.write(f"{folder}/{CLIENT}", protocol.encode([{"host": CLIENT}]))
        chosen = choose_volumes(JobProperties(), cluster, "doctor", ASK_SECONDS)
        volumes = [volume for volume in chosen.volumes if volume.kind != "link"]
        _examine(JobCheck(cluster, identity, folder, share_secret(cluster.location), volumes), nodes)
    finally:
        # A share that fails now has failed in a check, too.
        with contextlib.suppress(ShareError):
            cluster.share.delete(folder)
    return [Check(node.name, name, *node.found[name]) for node in nodes for name in CHECKS if name in node.found]


def _tidy(share: Share) -> None:
    """Remove folders of doctors that were killed, as far as we may."""
    for entry in share.list(FOLDER):
        made, _, _ = entry.name.partition("-")
        if made.isdigit() and time.time() - int(made) > LEFT_SECONDS:
            with contextlib.suppress(ShareError):
                share.delete(f"{FOLDER}/{entry.name}")


def _examine(job: JobCheck, nodes: Sequence[NodeCheck]) -> None:
    machines: dict[int, list[NodeCheck]] = {}
    for node in nodes:
        machines.setdefault(id(node.node.machine), []).append(node)
    present = [node for group in at_once([partial(_machine, job, group) for group in machines.values()]) for node in group]
    _compare(job.cluster, nodes)
    writers = [node for node in present if node.answers.get("offer", {"trouble": "lost"})["trouble"] is None]
    at_once([partial(node.check, "visible", partial(_visible, job, node, writers)) for node in writers])
    if present and present[0].is_remote:
        _network(present, job.cluster.document.network_interface)


def _machine(job: JobCheck, nodes: Sequence[NodeCheck]) -> list[NodeCheck]:
    """Check the nodes of one machine in turn, and what they have in common once; those that can be asked more."""
    document, python = job.cluster.document, job.cluster.python
    present = [node for node in nodes if _reach(node)]
    for node in present:
        if node.is_remote:
            node.check("clock", partial(_clock, node))
        wanted = {"part": node.node.part, "wanted": document.gpus_per_node}
        node.check("GPUs", partial(node.ask, "accelerators", LISTING_SECONDS + ASK_SECONDS, **wanted))
        node.check("share", partial(_share, job, node))
        if job.volumes:
            node.check("mounts", partial(_mounts, job, node))
        node.check("space", partial(node.ask, "place", root=node.node.root))
        if node is present[0]:
            node.check("training", partial(_training, node, python))
            node.check("containers", partial(_containers, node, document.containers == "ignore"))
        else:
            for name in ("training", "containers"):
                node.tell(name, present[0].found[name])
    return present


def _reach(node: NodeCheck) -> bool:
    """Whether a node answers, and runs the agent."""
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


def _clock(node: NodeCheck) -> Finding:
    before = time.time()
    said = node.ask("clock")["time"]
    after = time.time()
    return findings.clock(said - (before + after) / 2, (after - before) / 2)


def _share(job: JobCheck, node: NodeCheck) -> Finding:
    path = job.cluster.share_on_nodes
    try:
        said = node.ask("offer", share=path, identity=job.identity, path=f"{job.folder}/{node.file}", sas=job.secret)
    except ClusterError as error:
        said = {"trouble": "failed", "why": node.plain(error)}
    return findings.share(said, path, node.title)


def _mounts(job: JobCheck, node: NodeCheck) -> Finding:
    said = node.ask("needs", volumes=plain(tuple(job.volumes)), container=None, python=job.cluster.python)
    return findings.mounts(said, [volume.name for volume in job.volumes])


def _training(node: NodeCheck, python: str) -> Finding:
    said = node.ask("training", TRAINING_SECONDS + ASK_SECONDS, python=python, seconds=TRAINING_SECONDS)
    return findings.training(said, python)


def _containers(node: NodeCheck, ignored: bool) -> Finding:
    return findings.containers(node.ask("containers", CONTAINERS_SECONDS), ignored)


def _compare(cluster: Cluster, nodes: Sequence[NodeCheck]) -> None:
    """Judge what can only be judged when all have answered: their GPUs, and their folders, of which the engine says it."""
    gpus = {node.name: node.answers["accelerators"] for node in nodes if "accelerators" in node.answers}
    counts = [said["count"] for said in gpus.values() if not said["trouble"]]
    problems = cluster.node_access.folder_problems([node.answers.get("place") for node in nodes])
    for node, reason in zip(nodes, problems, strict=True):
        if node.name in gpus:
            node.tell("GPUs", findings.accelerators(gpus[node.name], counts, node.answers.get("training")))
        if reason:
            node.tell("space", failed(node.plain(reason)))
        elif place := node.answers.get("place"):
            node.tell("space", findings.space(place["root"], place["free"], node.answers.get("offer", {}).get("free")))


def _visible(job: JobCheck, node: NodeCheck, writers: Sequence[NodeCheck]) -> Finding:
    """Whether what others write on the share is there for a node, and here what it wrote."""
    files = {CLIENT: "this machine", **{other.file: other.name for other in writers if other is not node}}
    asked: dict[str, Any] = {"share": job.cluster.share_on_nodes, "folder": job.folder, "names": list(files), "sas": job.secret}
    started = time.monotonic()
    while True:
        missed = {files[file]: why for file, why in node.ask("unseen", **asked)["unseen"].items()}
        here = ""
        try:
            protocol.decode_one(job.cluster.share.read(f"{job.folder}/{node.file}", 0, protocol.LONGEST_RECORD))
        except (ShareError, protocol.TornFileError) as error:
            here = str(error)
        seconds = time.monotonic() - started
        if not (missed or here) or seconds > VISIBLE_SECONDS:
            return findings.visible(missed, here, len(files) - 1, seconds)
        time.sleep(0.5)


def _network(present: Sequence[NodeCheck], interface: str | None) -> None:
    """Whether the nodes reach each other: all listen, then all try all addresses of all others."""
    mark = uuid.uuid4().hex

    def listen(node: NodeCheck) -> Answer:
        return node.ask("listen", token=f"{mark} {node.file}", interface=interface, seconds=LISTEN_SECONDS)

    at_once([partial(node.check, "network", partial(listen, node)) for node in present])
    listening = {node.name: node for node in present if "listen" in node.answers}
    reached: dict[str, dict[str, list[str]]] = {}

    def probe(node: NodeCheck) -> Answer:
        others = [other for other in listening.values() if other is not node]
        targets = [
            (each["address"], other.answers["listen"]["port"], f"{mark} {other.file}")
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
