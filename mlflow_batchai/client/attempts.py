"""Start another attempt of a job: after its end (retry), or to free nodes for others (requeue).

A job keeps its folder, its run, its plan and its output directories, so a script that finds its checkpoint goes on from there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.attempt import overrides
from mlflow_batchai.client import runner
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.errors import BatchAIError, JobError, JobFailedError, ShareError
from mlflow_batchai.follower import detached, retries
from mlflow_batchai.follower.credentials import check_here, for_next_attempt
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.follower.starting import attempt_fails_with_it, start
from mlflow_batchai.job.jobs import Job, pause_after
from mlflow_batchai.job.lease import Lease
from mlflow_batchai.job.states import JobState
from mlflow_batchai.plan.planning import WAITING_SECONDS
from mlflow_batchai.plan.prepared import needs_of
from mlflow_batchai.tracking import runs

LOOK_SECONDS = 0.2
# Agents end what they have within seconds, after what ranks have to save (``terminateGrace``). Where they can't, whoever
# follows the job says so (``follower/watch.py``), which takes three minutes at most: on an Azure share, with volumes to drain.
MAKE_ROOM_SECONDS = 300.0


def retry(submitted: Submitted, cluster: Cluster, say: Callable[[str], None]) -> None:
    """Begin another attempt of a job that has ended without success; returns when its agents wait for their nodes.

    ``submitted`` is at that attempt afterwards, and its run is SCHEDULED. One that fails half-way is undone as a submit is.

    Args:
        say: told when the results of the attempt before are waited for, and when its share is away meanwhile.

    Raises:
        JobError: the job hasn't ended, has succeeded, somebody else retries it just now, or its secrets are not here.
    """
    submitted.job = submitted.job.at(submitted.job.newest())
    state = runner.state(submitted)
    job = submitted.job
    if not state.ended:
        raise JobError(
            f"job {job.name} is {state.execution_state}; a job can be retried when it has ended (batchai job terminate"
            f" {job.name} ends it)"
        )
    if state.execution_state == protocol.SUCCEEDED:
        raise JobError(f"job {job.name} has succeeded; only a job that has not can be retried")
    check_here(job, cluster)
    secrets = for_next_attempt(job, cluster, _seconds(job))
    with contextlib.closing(cluster.engine):
        following = job.at(job.attempt + 1).plan  # which has all nodes, whatever the attempt before had
        usable = _check_nodes(job, cluster, following.least_nodes)
        counts = overrides.counts_on(following, retries.fitting_nodes(following, cluster, usable))
    # Whoever relays the attempt before this one must have ended its run first.
    if not Lease(job).finished():
        say(f"the last results of attempt {job.attempt} of job {job.name} are on their way to MLflow; waiting for that")
    detached.ensure_follower(submitted)
    runner.wait(submitted, say)
    mlflow = runs.client(submitted.tracking)
    if mlflow.get_run(submitted.run_id).info.lifecycle_stage != "active":
        raise JobError(f"the run of job {job.name} is deleted: mlflow runs restore --run-id {submitted.run_id}")
    begun = job.begin(job.attempt + 1, overrides.record(job.plan.retries, overrides.MANUAL, "batchai job retry", counts))
    if begun is None:
        raise JobError(f"somebody else retries job {job.name} just now; see it with: batchai job show {job.name}")
    submitted.job = begun
    with runs.fails_with_it(mlflow, submitted.run_id), attempt_fails_with_it(job.share, job.folder, begun.attempt):
        runs.begin_attempt(mlflow, submitted.run_id, begun.attempt)
        # It was meant for the attempt that it ended.
        runs.forget(mlflow, submitted.run_id, [runs.TAG_CANCEL])
        start(submitted, cluster, secrets)


def requeue(submitted: Submitted, cluster: Cluster, why: str, say: Callable[[str], None]) -> bool:
    """End the attempt that runs and begin the next one, which waits in the queue; returns when its agents do.

    ``submitted`` is at that attempt afterwards. A job that ends meanwhile, by itself or because somebody wants it, has ended.

    Args:
        say: told before the end of its attempt is waited for.

    Returns:
        Whether it waits in the queue; False: it has ended.

    Raises:
        JobError: it can't be put back in the queue, and is left as it is; or its attempt doesn't end.
        JobFailedError: the next attempt could not be started: the job has failed with that reason.
    """
    secrets = _agent_secrets(submitted, cluster)
    before, submitted.secrets = submitted.job, secrets
    detached.ensure_follower(submitted)
    before.request_requeue(runner.user(), why)
    say(f"job {before.name} was asked to end its attempt {before.attempt}; waiting for that")
    state = _await_verdict(before)
    if state.next_attempt is None:
        return False
    # On as many nodes as it had: whether there are more now, nobody has asked.
    counts = {key: count for key, count in before.overrides().items() if key in overrides.COUNTS}
    own = overrides.record(before.plan.retries_left, overrides.REQUEUE, why, counts)
    begun = before.begin(state.next_attempt, own)
    submitted.job = begun or before.at(state.next_attempt)
    if begun is None:
        return True  # by who wanted the same
    # Who asked for the job's end before he could see that there is a next attempt: see ``Job.request_cancel``. Looked for anew.
    wish = protocol.wish(before.afresh().requests(), before.attempt)
    if wish and wish["kind"] == protocol.CANCEL:
        begun.claim_verdict(protocol.terminated_record("submitter", running=False, wish=wish))
        return False
    try:
        with attempt_fails_with_it(before.share, before.folder, begun.attempt):
            start(submitted, cluster, secrets, follow=False)
    except BatchAIError as error:
        raise JobFailedError(f"job {before.name} has failed, since it could not be started again: {error}") from error
    return True


def _agent_secrets(submitted: Submitted, cluster: Cluster) -> dict[str, Any]:
    """Collect the credentials and secrets for the agents of the next attempt.

    Raises:
        JobError: the job has ended, or they can't be told all.
    """
    if runner.state(submitted).ended:
        raise JobError(f"job {submitted.job.name} has ended")
    try:
        check_here(submitted.job, cluster)
        _check_nodes(submitted.job, cluster, submitted.job.node_count)
        return for_next_attempt(submitted.job, cluster, _seconds(submitted.job))
    except BatchAIError as error:
        raise JobError(f"{error}; or wait for its end (waitforjobcompletion), or end it (terminate)") from error


def _await_verdict(job: Job) -> JobState:
    until = time.monotonic() + MAKE_ROOM_SECONDS + job.plan.terminate_seconds
    while True:
        begun = time.monotonic()
        with contextlib.suppress(ShareError):  # it may be away for a moment, and the attempt ends all the same
            state = job.state()
            if state.ended or state.next_attempt:
                return state
        if begun > until:
            raise JobError(
                f"job {job.name} doesn't end its attempt {job.attempt} to make room; see {detached.follower_log(job.plan.job)},"
                f" or end it (batchai job terminate {job.name})"
            )
        time.sleep(pause_after(time.monotonic() - begun, LOOK_SECONDS))


def _check_nodes(job: Job, cluster: Cluster, count: int) -> int:
    """Number of nodes that can be used; an error if too few, or if they lack a tool that the job doesn't send."""
    checked = cluster.engine.check(count, needs_of(job.plan))
    missing = sorted(set(checked.missing) - set(job.plan.tools))
    if missing:
        raise JobError(f"nodes of cluster '{cluster.name}' have no {missing[0]} now: install it there, or submit the job again")
    return checked.usable


def _seconds(job: Job) -> float:
    return job.plan.max_wall_clock_seconds + WAITING_SECONDS
