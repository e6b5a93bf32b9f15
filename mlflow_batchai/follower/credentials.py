"""Collect the volume credentials and secrets for the agents of a new attempt."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.plan import Plan, Volume
from mlflow_batchai.cluster import setup
from mlflow_batchai.cluster.clusters import Cluster, share_secret
from mlflow_batchai.errors import BatchAIError, JobError, JobNotFoundError, ShareError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.signing import Signature
from mlflow_batchai.storage import credentials
from mlflow_batchai.storage.location import AzureLocation
from mlflow_batchai.storage.opening import for_nodes

SECRET_PREFIX = "BATCHAI_SECRET_"
REGISTRY = {"username": "BATCHAI_REGISTRY_USERNAME", "password": "BATCHAI_REGISTRY_PASSWORD"}


def for_next_attempt(
    job: Job,
    cluster: Cluster,
    seconds: float,
    environment: Mapping[str, str] = os.environ,
    kept: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Collect what agents read on their standard input (``agent/agent.py``).

    What opens a storage account is looked for as at submit, except that the job's document is gone; the job's secrets are taken
    from variables ``BATCHAI_SECRET_<NAME>``, its registry's user from ``BATCHAI_REGISTRY_USERNAME`` and ``_PASSWORD``. Those
    of the setup task stand in the cluster's document.

    Args:
        seconds: for how long what opens the volumes has to be good.
        kept: what agents of an earlier attempt were told, of which everything counts that doesn't expire.

    Raises:
        MissingSecretError: something isn't there, and what to set; nothing was done.
        JobError: it can't be done from here, or this user has not signed the job: what he starts its next clients would refuse.
    """
    if job.signature is not Signature.OWN:
        raise JobError(
            f"job {job.name} can be started again only with the key that signed it: take it along (batchai key export,"
            " batchai key import)"
        )
    kept = kept or {}
    variables, missing = _variables(job, environment, kept.get("variables") or {})
    registry = None
    if job.plan.container and job.plan.container.credentials:
        registry = kept.get("registry") or {key: environment.get(variable, "") for key, variable in REGISTRY.items()}
        missing += [variable for key, variable in REGISTRY.items() if not registry[key]]
    if missing:
        raise MissingSecretError(job.name, missing)
    setup_secrets = _setup_secrets(job, cluster, kept.get("setup") or {})
    opened = kept.get("volumes") or {}
    try:
        volumes = {
            str(index): {"endpoint": volume.endpoint, **opens}
            for index, volume in enumerate(job.plan.volumes)
            if (opens := _opens(volume, seconds, opened.get(str(index)) or {}))
        }
        share = share_secret(cluster.location, seconds)
    except BatchAIError as error:
        raise JobError(f"job {job.name} can't start again from here: {error}") from error
    return {"variables": variables, "setup": setup_secrets, "share": share, "volumes": volumes, "registry": registry}


def check_here(job: Job, cluster: Cluster) -> None:
    """Raise if agents of ours could not go on with a job on its cluster."""
    if job.plan.protocol != protocol.PROTOCOL_VERSION:
        raise JobError(
            f"job {job.name} was submitted by another version of mlflow-batchai (its plan is of protocol"
            f" {job.plan.protocol}, this is {protocol.PROTOCOL_VERSION}): submit it again"
        )
    try:
        there = Job(cluster.share, job.folder, job.attempt)
    except JobNotFoundError:
        there = None
    if there is None or there.plan.job != job.plan.job:
        raise JobError(f"job {job.name} lies on {job.share.url}, which is not the share of cluster '{cluster.name}' any more")


class MissingSecretError(JobError):
    """A job can't start again from here, since nobody here has some of its secrets.

    Attributes:
        variables: those of the environment that are to be set to them.
    """

    def __init__(self, job: str, variables: Sequence[str]) -> None:
        self.variables = tuple(variables)
        super().__init__(
            f"job {job} needs what only its submitter had; set {', '.join(variables)} to what its document gave as secrets"
        )


def _names(plan: Plan, variable: str) -> list[str]:
    """Variables of a client's environment that may have the value of a secret variable of the job."""
    # What docker_env copies from the submitter's environment is there under its own name.
    return [SECRET_PREFIX + variable] if variable in plan.secret_names else [SECRET_PREFIX + variable, variable]


def variables_of(plan: Plan) -> list[str]:
    """All variables of a client's environment that may have secrets of a job."""
    secret = [name for variable in plan.secret_variables for name in _names(plan, variable)]
    return [*secret, *(REGISTRY.values() if plan.container and plan.container.credentials else ())]


def _variables(job: Job, environment: Mapping[str, str], kept: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """(the job's secret variables, the names of those of ours that are not set)."""
    found: dict[str, str] = {}
    missing: list[str] = []
    for name in job.plan.secret_variables:
        there = (environment[variable] for variable in _names(job.plan, name) if variable in environment)
        value = next(there, kept.get(name))
        if value is None:
            missing.append(SECRET_PREFIX + name)
        else:
            found[name] = value
    return found, missing


def _setup_secrets(job: Job, cluster: Cluster, kept: Mapping[str, str]) -> dict[str, str]:
    """Variable -> value, of the setup task that the job's plan has."""
    wanted = job.plan.setup_task.secret_names if job.plan.setup_task else ()
    task = cluster.document.node_setup.setup_task if wanted else None
    found = {**kept, **(setup.secrets(task) if task else {})}
    if missing := [name for name in wanted if name not in found]:
        raise JobError(
            f"job {job.name} can't start again from here: the document of cluster '{cluster.name}' has no"
            f" {', '.join(missing)} among the secrets of nodeSetup.setupTask any more; add it again, or submit the job again"
        )
    return {name: found[name] for name in wanted}


def _opens(volume: Volume, seconds: float, kept: Mapping[str, str]) -> dict[str, str]:
    """Credentials of a volume of the plan for nodes, new ones where possible; nothing if it needs none.

    Args:
        kept: what opened it before.

    Raises:
        ShareError: it isn't to be had.
    """
    if volume.kind not in ("azureFiles", "azureBlob") or volume.how == "bind":
        return {}
    try:
        return _opens_anew(volume, seconds)
    except ShareError:
        if not kept:
            raise
        return dict(kept)


def _opens_anew(volume: Volume, seconds: float) -> dict[str, str]:
    """Make new credentials for a volume of an account.

    Raises:
        ShareError: it isn't to be had.
    """
    where, account = f"{volume.where} ({volume.name})", volume.account
    service = "blob" if volume.kind == "azureBlob" else "file"
    try:
        found = credentials.at(volume.endpoint, account, service, volume.container if service == "file" else "")
        if volume.kind == "azureFiles" and volume.how != "cifs":
            location = AzureLocation(volume.endpoint, account, volume.container, volume.folder)
            return for_nodes(location, seconds)
    except ShareError as error:
        raise ShareError(f"{where}: {error}") from error
    if found.key:
        return {"key": found.key}
    if found.sas and volume.kind == "azureBlob":
        return {"sas": found.sas}
    raise ShareError(
        f"{where}: there is no key for the account {account}; set AZURE_BATCHAI_STORAGE_ACCOUNT and AZURE_BATCHAI_STORAGE_KEY"
    )
