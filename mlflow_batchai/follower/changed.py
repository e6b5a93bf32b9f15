"""Ending a job whose records were changed on the share: its nodes by its mark, its run with the reason.

Nothing that lies in its folder is obeyed.
"""

from __future__ import annotations

import contextlib

from mlflow_batchai.cluster import clusters
from mlflow_batchai.errors import JobNotTrustedError
from mlflow_batchai.tracking import runs


def end(tracking: runs.Tracking, run_id: str, why: str, status: str = "FAILED") -> None:
    """End the job of a run, unless the run has ended.

    Args:
        why: a sentence for people.
        status: the run's.

    Raises:
        JobNotTrustedError: this user has not submitted it, so its tags may be anybody's.
        BatchAIError: its cluster isn't known here, or some of it may still run; its run has ended all the same.
    """
    mlflow = runs.client(tracking)
    run = mlflow.get_run(run_id)
    if run.info.status not in ("RUNNING", "SCHEDULED"):
        return
    if not runs.is_signed(run):
        raise JobNotTrustedError(
            f"{why}; the tags of its run {run_id} were changed as well, so its nodes were not asked to end it"
        )
    try:
        cluster, _ = clusters.load(run.data.tags[runs.TAG_CLUSTER])
        with contextlib.closing(cluster.engine) as engine:
            engine.end_job(run.data.tags[runs.TAG_FOLDER].rpartition("/")[2])
    finally:
        runs.fail(mlflow, run_id, why, status)
