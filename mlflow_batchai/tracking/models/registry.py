"""A logged model as a version of a registered model, made once however often it is asked for."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.tracking import MlflowClient


def version_of(client: MlflowClient, name: str, model: LoggedModel, run_id: str) -> str:
    """The version of ``name`` that the model is: the one that an earlier call has made, else a new one."""
    # A registry in a database does not keep a version's model_id; both forms of its source hold it.
    known = client.search_model_versions(f"run_id = '{run_id}'")
    versions = [str(one.version) for one in known if one.name == name and model.model_id in (one.source or "")]
    if not versions:
        return register(client, name, model, run_id)
    _link_version(client, model.model_id, name, versions[0])
    return versions[0]


def register(client: MlflowClient, name: str, model: LoggedModel, run_id: str) -> str:
    """Make the model a new version of ``name``, which is made if it isn't there; undone as a whole if that fails."""
    with ExitStack() as undo:
        if _create_registered_model(client, name):
            undo.callback(_delete_if_empty, client, name)
        created = client.create_model_version(name, source=_source(client, model), run_id=run_id, model_id=model.model_id)
        version = str(created.version)
        undo.callback(client.delete_model_version, name, version)
        _link_version(client, model.model_id, name, version)
        undo.pop_all()
    return version


def _source(client: MlflowClient, model: LoggedModel) -> str:
    """``models:/ID``, which MLflow's pages link to the model, wherever the registry can resolve it.

    A registry in a local database looks the model up by the process-wide tracking URI, not by the client's.
    """
    from mlflow.tracking import get_tracking_uri

    if client.tracking_uri.startswith("http") or client.tracking_uri == get_tracking_uri():
        return f"models:/{model.model_id}"
    return model.artifact_location


def _link_version(client: MlflowClient, model_id: str, name: str, version: str) -> None:
    """Tag the logged model with its version, for MLflow's pages; a tracking server did so itself."""
    from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS

    known = json.loads(client.get_logged_model(model_id).tags.get(MLFLOW_MODEL_VERSIONS, "[]"))
    if not any(entry.get("name") == name for entry in known):
        links = [*known, {"name": name, "version": int(version)}]
        client.set_logged_model_tags(model_id, {MLFLOW_MODEL_VERSIONS: json.dumps(links)})


def _create_registered_model(client: MlflowClient, name: str) -> bool:
    """True if it was created, False if there was one."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
            return False
        raise
    return True


def _delete_if_empty(client: MlflowClient, name: str) -> None:
    # The failure that brought us here is what a person has to see.
    with suppress(Exception):
        # Another job may have registered a version meanwhile.
        if not client.get_registered_model(name).latest_versions:
            client.delete_registered_model(name)
