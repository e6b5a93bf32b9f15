"""MLflow's plugins for the scheme ``batchai``, found by entry points, in a rank or elsewhere.

Nodes have no route to a tracking server and no credentials for one. What a script says by ``mlflow.*`` becomes records that the
relay brings to the job's run. MLflow imports this module whenever it is imported itself, so it is light; the rest is imported
when an address of the scheme is used.
"""

from __future__ import annotations

from typing import Any, NoReturn

# Ranks have this package from their PYTHONPATH, where nothing is installed: MLflow finds plugins by distributions, so one
# travels. It has the package's name, so that of two there the travelling one counts, as its modules do.
DISTRIBUTION = "mlflow_batchai-{version}.dist-info"
METADATA = "Metadata-Version: 2.1\nName: mlflow-batchai\nVersion: {version}\n"
ENTRY_POINTS = """\
[mlflow.tracking_store]
batchai = mlflow_batchai.training.store:open_store

[mlflow.artifact_repository]
batchai = mlflow_batchai.training.store:open_artifacts

[mlflow.model_registry_store]
batchai = mlflow_batchai.training.store:refuse
"""

NO_REGISTRY = (
    "the model registry can't be reached from a node: name the registered model in batchai.yaml (model: {register: NAME}) and"
    " log the model without registered_model_name; it is registered when the job has succeeded"
)


def open_store(store_uri: Any = None, artifact_uri: Any = None, **options: Any) -> Any:
    """MLflow's constructor of a tracking store."""
    from mlflow_batchai.training.tracking.store import JobStore

    return JobStore()


def open_artifacts(artifact_uri: str, *arguments: Any, **options: Any) -> Any:
    """MLflow's constructor of an artifact repository."""
    from mlflow_batchai.training.tracking.artifacts import JobArtifacts

    return JobArtifacts(artifact_uri)


def refuse(*arguments: Any, **options: Any) -> NoReturn:
    """MLflow's constructor of a registry store. Raises RefusedError: always."""
    from mlflow_batchai.training.tracking.job import RefusedError

    raise RefusedError(NO_REGISTRY)
