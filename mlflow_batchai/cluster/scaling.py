"""How many of a cluster's nodes take jobs, from its creation on, and the cluster's queue."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from mlflow_batchai.agent import protocol
from mlflow_batchai.cluster import clusters, records
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.cluster.workspaces import timestamp
from mlflow_batchai.config import untold
from mlflow_batchai.documents.cluster import AutoScale, ClusterRecord, ScaleSettings, parse_cluster
from mlflow_batchai.documents.fields import MOST_NODES
from mlflow_batchai.engines.census import Census, NodeState, Reservation
from mlflow_batchai.engines.parallel import in_background
from mlflow_batchai.errors import BatchAIError, ClusterError, UsageError
from mlflow_batchai.job import places
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.storage import Share, job_file

WAITING = "queued: waiting for nodes"
# A job that gets its nodes at once has nobody asked; one that waits long is told of changes.
FIRST_SECONDS, AGAIN_SECONDS = 1.0, 30.0


def name_of(share: Share, reservation: Reservation) -> str:
    """The name of a reservation's job; its id where its folder is not known or gone."""
    identity = reservation.mark.rpartition("/")[0]
    if not reservation.folder:
        return identity
    try:
        return str(
            protocol.decode_one(job_file(share, protocol.JobPaths(reservation.folder).plan) or b"").get("name", identity)
        )
    except protocol.TornFileError:
        return identity


def sent_to(cluster: Cluster, reservation: Reservation) -> bool:
    """Whether a job was sent to a cluster by its name: machines over SSH may belong to other documents as well."""
    if cluster.on_this_machine or not reservation.folder:
        return True
    plan = places.find_plan(cluster.share, reservation.folder)
    return plan is not None and plan.cluster == cluster.name


class Waits(NamedTuple):
    """The reason why a queued job waits. ``behind``: names of the jobs before it on its nodes."""

    behind: tuple[str, ...]
    why: str


def waits(job: Job) -> Waits:
    """Ask the nodes why a queued job waits. Raises BatchAIError: its cluster isn't known here, or its nodes can't be asked."""
    cluster, _ = clusters.load(job.plan.cluster)
    try:
        census = cluster.scalable.census()
        ours = _reservation(job, census)
        if ours is None:
            return Waits((), WAITING)
        if ours.why:
            return Waits((), f"queued: {ours.why}")
        before = [other for other in census.reservations if other.number < ours.number and set(other.nodes) & set(ours.nodes)]
        if names := tuple(name_of(cluster.share, reservation) for reservation in before):
            return Waits(names, f"queued behind {', '.join(names)}")
        if closed(census).intersection(ours.nodes):
            return Waits((), f"queued: {too_few(cluster, job.node_count, census)}")
        return Waits((), WAITING)
    finally:
        cluster.engine.close()


def closed(census: Census) -> set[int]:
    """Indexes of the nodes that take no more jobs."""
    return {index for index, node in enumerate(census.nodes) if node.state in (NodeState.CLOSED, NodeState.LEAVING)}


class WhyQueued:
    """Ask the nodes now and then, in the background, why a queued job waits."""

    def __init__(self, job: Job, clock: Callable[[], float] = time.monotonic) -> None:
        self._job = job
        self._clock = clock
        self._next = clock() + FIRST_SECONDS
        self._asked: Future[Waits] | None = None
        self._told = WAITING

    def news(self) -> str:
        """The reason, if it has changed; else nothing. Returns at once."""
        if self._asked is None:
            if self._clock() >= self._next:
                self._asked = in_background(functools.partial(waits, self._job))
            return ""
        if not self._asked.done():
            return ""
        asked, self._asked, self._next = self._asked, None, self._clock() + AGAIN_SECONDS
        if asked.exception() is not None:
            return ""  # nodes that can't be asked are a trouble that others tell of
        before, self._told = self._told, asked.result().why
        return self._told if self._told != before else ""


def too_few(cluster: Cluster, node_count: int, census: Census | None = None) -> str:
    """Sentence on a job that waits for a cluster to grow."""
    takes = len(census.nodes) - len(closed(census)) if census else cluster.open_nodes
    return (
        f"{takes} of the {cluster.engine.node_limit} nodes of cluster '{cluster.name}' take jobs; "
        f"it starts after: batchai cluster resize -n {cluster.name} -t {node_count}"
    )


def larger(cluster: Cluster, node_count: int) -> str:
    """Sentence on how to enlarge a cluster that has too few nodes."""
    if cluster.on_this_machine:
        return f"; it gets more by: batchai cluster resize -n {cluster.name} -t {node_count}"
    return "; name more hosts in its document"


def _reservation(job: Job, census: Census) -> Reservation | None:
    mark = protocol.job_mark(job.plan.job, job.attempt)
    return next((reservation for reservation in census.reservations if reservation.mark == mark), None)


def manual(cluster: Cluster, target: int, option: str | None = None) -> ScaleSettings:
    """Settings of a fixed number of nodes.

    Args:
        option: what becomes of jobs on nodes that leave; None: as it was.

    Raises:
        ClusterError: the cluster can't have as many nodes.
    """
    before = cluster.scale.manual
    kept = before.node_deallocation_option if before else "requeue"
    _check_size(cluster, target)
    return ScaleSettings.model_validate({"manual": {"targetNodeCount": target, "nodeDeallocationOption": option or kept}})


def automatic(cluster: Cluster, minimum: int, maximum: int) -> ScaleSettings:
    """Settings of a number of nodes that follows the queue.

    Raises:
        UsageError: the numbers make no sense.
        ClusterError: the cluster can't have as many nodes.
    """
    if minimum > maximum:
        raise UsageError(f"--min {minimum} is more than --max {maximum}")
    _check_size(cluster, maximum)
    return ScaleSettings(auto_scale=AutoScale(minimum_node_count=minimum, maximum_node_count=maximum))


def _check_size(cluster: Cluster, count: int) -> None:
    if cluster.has_scheduler:
        engine = cluster.document.engine.value
        raise ClusterError(
            f"cluster '{cluster.name}': {engine} decides how many nodes there are and who gets them; nothing to set"
        )
    if count > MOST_NODES:
        raise UsageError(f"a cluster has at most {MOST_NODES} nodes")
    if not cluster.on_this_machine and count > cluster.engine.node_limit:
        raise ClusterError(
            f"cluster '{cluster.name}' has {cluster.engine.node_limit} hosts; name more in its document"
            f" ({records.document_path(cluster.name)}) to have {count} nodes"
        )


def apply(cluster: Cluster, settings: ScaleSettings) -> Cluster:
    """Set a cluster's scale settings: the record first, then its nodes. Running jobs are left alone.

    Args:
        cluster: as it is just now; who lets two do this at once has the record of one and the nodes of the other.

    Returns:
        The cluster as it is now; its engine is the caller's to close.

    Raises:
        ClusterError: some nodes could not be told; the others have been.
    """
    record = cluster.record or ClusterRecord()
    size = max(settings.nodes, cluster.engine.node_limit, cluster.document.nodes)
    changes = {
        "scale_settings": settings,
        "nodes": size if size != cluster.document.nodes else None,
        "allocation_time": timestamp(),
    }
    records.save(cluster.name, record.model_copy(update=changes))
    now, _ = clusters.load(cluster.name)
    with contextlib.ExitStack() as undo:
        undo.callback(now.engine.close)
        now.scalable.admit(settings.nodes)
        undo.pop_all()
    return now


def create(
    name: str,
    data: Mapping[str, Any],
    source: str,
    record: ClusterRecord,
    say: Callable[[str], None],
    check: Callable[[Cluster], object],
) -> Cluster:
    """Make a cluster.

    Args:
        data: its document, as plain data; secrets in it are kept as they stand, in a file for this user only.
        record: where it belongs, and since when it is there.
        check: raises BatchAIError if no job could use the cluster.

    Raises:
        UsageError: there is one of that name.
        BatchAIError: the document is wrong, or can't be used yet; nothing was made.
    """
    if records.document_path(name).exists():
        raise UsageError(
            f"there is a cluster '{name}' already; delete it first (batchai cluster delete -n {name}), or name another"
        )
    document, warnings = parse_cluster(data, source)
    for warning in warnings:
        say(str(warning))  # whatever was said of another cluster's
    cluster, _ = clusters.make(name, document, Path(source), record)
    check(cluster)
    settings = _settings(cluster)
    records.add_document(name, dict(data))
    try:
        records.save(name, record)
        try:
            made = apply(cluster, settings) if settings else clusters.load(name)[0]
        except ClusterError as error:
            # Of machines: the cluster is there, and they are unusable until they can be asked.
            say(str(error))
            made = clusters.load(name)[0]
        untold(clusters.load(name)[1])  # these notices count as said
    except BatchAIError:
        records.delete(name)
        raise
    return made


def _settings(cluster: Cluster) -> ScaleSettings | None:
    """Scale settings from the document; without them all nodes, None where a scheduler has them."""
    written = cluster.document.scale_settings
    if written and written.auto_scale:
        return automatic(cluster, written.auto_scale.minimum_node_count, written.auto_scale.maximum_node_count)
    if written and written.manual:
        return manual(cluster, written.manual.target_node_count, written.manual.node_deallocation_option)
    return None if cluster.has_scheduler else manual(cluster, cluster.engine.node_limit)
