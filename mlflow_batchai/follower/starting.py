"""Start an attempt of a job: its agents, then its follower; undo it if a step fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.engines.base import Handle, StartRequest
from mlflow_batchai.errors import BatchAIError
from mlflow_batchai.follower.detached import Submitted, start_follower
from mlflow_batchai.job import signing
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.states import failed_verdict
from mlflow_batchai.plan.prepared import terms_of
from mlflow_batchai.storage import Share
from mlflow_batchai.tracking import runs


def start(submitted: Submitted, cluster: Cluster, agent_secrets: Mapping[str, Any], follow: bool = True) -> None:
    """Start the agents of the attempt that ``submitted.job`` is at, and a follower.

    Args:
        agent_secrets: what agents read on their standard input and nowhere else (``agent/agent.py``).
        follow: whether nobody relays the job yet.

    Raises:
        BatchAIError: it can't be done; no agent is left.
    """
    submitted.secrets = agent_secrets
    with contextlib.ExitStack() as undo:
        undo.callback(cluster.engine.close)
        handle = start_agents(submitted.job, cluster, agent_secrets)
        undo.callback(_end_agents, cluster, handle)
        if follow:
            start_follower(submitted)
        undo.pop_all()
    # From here on only the follower asks the nodes.
    cluster.engine.close()


def start_agents(job: Job, cluster: Cluster, agent_secrets: Mapping[str, Any]) -> Handle:
    """Start the agents of a job's attempt, and write down how they are known; see ``start``.

    Raises:
        BatchAIError: it can't be done; no agent is left.
    """
    mark = protocol.job_mark(job.plan.job, job.attempt)
    # Agents obey these two records, and no others that may lie in their place.
    digests = {"plan": job.plan_digest, "attempt": job.terms_digest}
    request = StartRequest(
        job.plan.job, mark, job.folder, job.attempt, job.node_count, {**agent_secrets, **digests}, terms_of(job.plan)
    )
    with contextlib.ExitStack() as undo:
        handle = cluster.engine.submit(request)
        undo.callback(_end_agents, cluster, handle)
        job.share.write(job.paths.submitted, protocol.encode([signing.sign(job.paths.submitted, dict(handle))]))
        undo.pop_all()
    return handle


def _end_agents(cluster: Cluster, handle: Mapping[str, Any]) -> None:
    # What went wrong first is what a person has to see.
    with contextlib.suppress(BatchAIError):
        cluster.engine.cancel(handle)


@contextlib.contextmanager
def attempt_fails_with_it(share: Share, folder: str, attempt: int = 1) -> Iterator[None]:
    """An attempt that fails to start inside has its verdict, so that nobody waits for it."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(BatchAIError):
            Job(share, folder, attempt).claim_verdict(verdict_of(error))
        raise


def verdict_of(error: BaseException) -> Record:
    """The verdict on an attempt that could not be started."""
    terminated = isinstance(error, KeyboardInterrupt)
    code = protocol.JOB_TERMINATED if terminated else protocol.NODE_SETUP_FAILED
    return failed_verdict(code, runs.why(error), "submitter", terminated)
