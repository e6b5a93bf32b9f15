"""Change how many of a cluster's nodes take jobs, delete clusters, and handle the jobs that run there."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable

from mlflow_batchai.agent import protocol
from mlflow_batchai.client import attempts, lookup, runner
from mlflow_batchai.cluster import clusters, records, scaling
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.config import home
from mlflow_batchai.documents.cluster import ScaleSettings
from mlflow_batchai.engines.census import Census, NodeState, Reservation
from mlflow_batchai.engines.local_hosts import remove_nodes
from mlflow_batchai.errors import (
    BatchAIError,
    ClusterError,
    ClusterNotFoundError,
    DocumentError,
    JobError,
    JobFailedError,
    NotSupportedError,
    UsageError,
)
from mlflow_batchai.follower import detached
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease, LeaseState
from mlflow_batchai.tracking.runs import Tracking

Say = Callable[[str], None]

TERMINATE, REQUEUE, STAY, GROW = "terminate", "requeue", "waitforjobcompletion", "grow"
# Ranks get 10 s to end, agents on an Azure share up to 18 s to look; who relays a job then needs a moment for its run.
END_SECONDS, RELAY_SECONDS, LOOK_SECONDS = 90.0, 15.0, 0.3
PATIENCE_SECONDS = 5.0


def resize(cluster: Cluster, settings: ScaleSettings, option: str, tracking: Callable[[], Tracking], say: Say) -> Cluster:
    """Give a cluster other scale settings, and see to the jobs on nodes that take no more jobs then, and to those that wait.

    Args:
        option: what becomes of those that run there: ``requeue``, ``terminate`` or ``waitforjobcompletion``.
        tracking: the store that their runs are in; asked for only if a job is put back in the queue, or is ended and nobody
            relays it.

    Returns:
        The cluster as it is now; some of its nodes may still be leaving.

    Raises:
        ClusterError: some nodes could not be told; the others have been.
        ClusterNotFoundError: somebody has just deleted it.
    """
    with records.locked(cluster.name, say):
        return _resize(clusters.load(cluster.name)[0], settings, option, tracking, say)


def _resize(cluster: Cluster, settings: ScaleSettings, option: str, tracking: Callable[[], Tracking], say: Say) -> Cluster:
    told = True
    try:
        now = scaling.apply(cluster, settings)
    except ClusterError as error:
        # Said at once: what follows may take minutes.
        say(str(error))
        told, now = False, clusters.load(cluster.name)[0]
    census = now.scalable.census()
    ending = set()
    for reservation, decision in decisions(census, option):
        if not _goes_on(now, reservation):
            continue
        name = scaling.name_of(now.share, reservation)
        if decision == TERMINATE:
            ending |= _terminate(now, reservation, f"cluster {now.name} was resized", tracking, say)
        elif decision == REQUEUE:
            ending |= _requeue(now, reservation, name, tracking, say)
        elif decision == STAY:
            say(f"job {name} goes on; its nodes leave when it has ended")
        else:
            say(f"job {name} waits: {scaling.too_few(now, len(reservation.nodes), census)}")
    _await_end(now, ending, say)
    if not now.on_this_machine and scaling.closed(census):
        say(f"the machines of cluster '{now.name}' keep running, and cost what they cost; they only take no jobs")
    if not told:
        raise ClusterError(
            f"not all nodes of cluster '{now.name}' could be told whether they take jobs; resize it again when they can be"
        )
    return now


def decisions(census: Census, option: str) -> list[tuple[Reservation, str]]:
    """Decide what happens to the jobs of a resized cluster; lists those for which something changes.

    A job that runs on a node which leaves is treated as ``option`` says. One that waits is put back in the queue if it
    stands at a closed node and would fit on the open ones, or behind others while as many nodes as it wants are free; at a
    closed node it has to wait until the cluster grows (``GROW``) otherwise.
    """
    closed = scaling.closed(census)
    taken = Counter(node for reservation in census.reservations for node in reservation.nodes)
    free = sum(node.state is NodeState.IDLE and not taken[index] for index, node in enumerate(census.nodes))
    found = []
    for position, reservation in enumerate(census.reservations):
        wanted = len(reservation.nodes)
        leaves = bool(closed.intersection(reservation.nodes))
        blocked = any(set(other.nodes).intersection(reservation.nodes) for other in census.reservations[:position])
        if reservation.started:
            found += [(reservation, option)] if leaves else []
        elif leaves:
            found.append((reservation, REQUEUE if wanted <= len(census.nodes) - len(closed) else GROW))
        elif blocked and wanted <= (at_hand := free + sum(taken[node] == 1 for node in reservation.nodes)):
            free = at_hand - wanted
            found.append((reservation, REQUEUE))
    return found


def _goes_on(cluster: Cluster, reservation: Reservation) -> bool:
    """Whether a reservation's attempt is what its job is at, and not over: its agents may be there for a moment longer."""
    try:
        job = Job(cluster.share, reservation.folder)
        return reservation.mark == protocol.job_mark(job.plan.job, job.attempt) and not job.state().ended
    except JobError:  # it isn't there, or was changed
        return True


def _requeue(cluster: Cluster, reservation: Reservation, name: str, tracking: Callable[[], Tracking], say: Say) -> set[str]:
    """Put a job back in the queue; if that is impossible leave it alone and say why.

    Returns:
        The mark of the attempt that ends, if it does.
    """
    goes_on = "goes on; its nodes leave when it has ended" if reservation.started else "waits for its nodes"
    try:
        job = Job(cluster.share, reservation.folder)
        found = lookup.find(job.plan.run_id, tracking())
        if found.job.folder != job.folder:
            raise JobError("its run is in another tracking store (MLFLOW_TRACKING_URI)")
        again = attempts.requeue(found, cluster, f"cluster {cluster.name} was resized", say)
    except JobFailedError as error:
        say(str(error))
        return {reservation.mark}
    except BatchAIError as error:
        say(f"job {name} {goes_on}: it can't be put back in the queue: {error}")
        return set()
    say(f"job {name} is in the queue again (attempt {found.job.attempt})" if again else f"job {name} has ended meanwhile")
    return {reservation.mark}


def _terminate(cluster: Cluster, reservation: Reservation, why: str, tracking: Callable[[], Tracking], say: Say) -> set[str]:
    """Ask for a job's end, and see to it that somebody brings it into its run; the job's mark, if it will come."""
    name = scaling.name_of(cluster.share, reservation)
    try:
        if not reservation.folder:
            raise JobError("its reservation names no folder; end it with: batchai job terminate")
        job = Job(cluster.share, reservation.folder)
        job.request_cancel(runner.user(), why)
    except BatchAIError as error:
        say(f"job {name} can't be ended: {error}")
        return set()
    say(f"job {name} is terminated")
    _have_relayed(job, tracking, say)
    return {reservation.mark}


def _have_relayed(job: Job, tracking: Callable[[], Tracking], say: Say) -> None:
    """Start a follower for a job whose own seems dead: else its run would never end."""
    try:
        if Lease(job).view().state not in (LeaseState.HELD, LeaseState.FINISHED):
            detached.ensure_follower(lookup.find(job.plan.run_id, tracking()))
    except Exception as error:  # MLflow raises whatever its store raises, and the job ends all the same
        say(f"job {job.name} ends, and nobody relays that into its run ({error}); later: batchai job attach {job.plan.run_id}")


def _await_end(cluster: Cluster, marks: set[str], say: Say) -> None:
    """Wait until no node has these jobs any more."""
    begun, said = time.monotonic(), False
    while marks and (there := [one for one in cluster.scalable.census().reservations if one.mark in marks]):
        names = ", ".join(scaling.name_of(cluster.share, reservation) for reservation in there)
        if time.monotonic() > begun + END_SECONDS:
            say(f"still ending: {names}")
            return
        if not said and time.monotonic() > begun + PATIENCE_SECONDS:
            said = True
            say(f"waiting for the end of {names}")
        time.sleep(LOOK_SECONDS)


def delete(name: str, tracking: Callable[[], Tracking], say: Say) -> None:
    """Delete a cluster: its jobs are ended, then its document, its record, and its nodes' folders on this machine removed.

    The control share stays, and so do machines that are reached over SSH, which take jobs of others again. Jobs that can't be
    seen (its document is wrong, the machine that knows them is away) go on, and that is said.

    Args:
        tracking: the store that their runs are in; asked for only if nobody relays one of them any more.

    Raises:
        ClusterNotFoundError: there is none.
        UsageError: it is the local cluster, which needs no document.
        ClusterError: jobs still run on this machine's nodes; nothing was removed.
    """
    there = records.document_path(name).is_file()
    if not there and records.find(name) is None:
        if name == clusters.DEFAULT_CLUSTER:
            raise UsageError(f"the cluster '{name}' needs no document, is always there, and can't be deleted")
        raise ClusterNotFoundError(f"there is no cluster '{name}'; the clusters are: {', '.join(clusters.names())}")
    with records.locked(name, say):
        try:
            cluster, _ = clusters.load(name)
        except (DocumentError, NotSupportedError, ClusterError) as error:
            say(f"{error}; jobs that may run there were not ended")
            records.delete(name)
            return
        try:
            _end_jobs(cluster, tracking, say)
            # Its hosts may belong to other documents as well.
            with contextlib.suppress(ClusterError):
                cluster.scalable.admit(cluster.engine.node_limit)
            records.delete(name)
            if cluster.on_this_machine:
                remove_nodes(home(), name)
        finally:
            cluster.engine.close()


def _end_jobs(cluster: Cluster, tracking: Callable[[], Tracking], say: Say) -> None:
    census = cluster.scalable.census()
    if census.trouble:
        say(f"{census.trouble}; jobs that may run there were not ended")
    reservations = [reservation for reservation in census.reservations if scaling.sent_to(cluster, reservation)]
    marks: set[str] = set()
    for reservation in reservations:
        marks |= _terminate(cluster, reservation, f"cluster {cluster.name} was deleted", tracking, say)
    _await_end(cluster, marks, say)
    # What agents of this machine still use must not be taken from under them.
    if cluster.on_this_machine and (left := cluster.scalable.census().reservations):
        names = ", ".join(scaling.name_of(cluster.share, reservation) for reservation in left)
        raise ClusterError(f"cluster '{cluster.name}' still has jobs: {names}; delete it again when they have ended")
    jobs = [Job(cluster.share, reservation.folder) for reservation in reservations if reservation.mark in marks]
    until = time.monotonic() + RELAY_SECONDS
    while any(not Lease(job).finished() for job in jobs) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
