"""``batchai job retry``: another attempt of a job that has not succeeded."""

from __future__ import annotations

from typing import Any

from mlflow_batchai.cli.job import COLUMNS
from mlflow_batchai.cli.job_lookup import find_job
from mlflow_batchai.cli.options import Scope, command, named, notice


@command(COLUMNS, example="batchai job retry digits-3f2a1c", experiment=True)
@named("job")
def retry(scope: Scope, name: str) -> Any:
    """Run a job that has not succeeded once more: the same plan, run and output directories, in a new attempt.

    Returns when its agents wait for their nodes. A script that finds its checkpoint in its output directory goes on from there;
    the logs of earlier attempts are kept. The values of the document's secrets are taken from variables BATCHAI_SECRET_<NAME>.
    """
    from mlflow_batchai.client import attempts, jobview
    from mlflow_batchai.cluster import clusters

    found = find_job(scope, name)
    cluster, warnings = clusters.load(found.job.plan.cluster)
    for warning in warnings:
        notice(warning)
    attempts.retry(found, cluster, notice)
    notice(f"job {found.job.name}: attempt {found.job.attempt} is on its way; batchai job attach {found.job.name}")
    return jobview.view(found)
