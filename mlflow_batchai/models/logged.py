"""A saved Keras file as MLflow knows it: a logged model of the job's run, and a version of a registered model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mlflow_batchai.errors import ModelError
from mlflow_batchai.models.directory import build_directory, check_file, notes
from mlflow_batchai.models.facts import ModelFacts

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.tracking import MlflowClient

TAG_JOB = "batchai.job"


@dataclass(frozen=True)
class LoggedModelRef:
    """A model as MLflow knows it; ``notes`` are sentences on what a person may miss in it, if anything."""

    model_id: str
    model_uri: str
    version: str | None
    notes: tuple[str, ...] = ()


def log_model(
    client: MlflowClient,
    *,
    experiment_id: str,
    run_id: str,
    file: Path,
    facts: ModelFacts,
    name: str = "model",
    register: str | None = None,
    job: str | None = None,
) -> LoggedModelRef:
    """Make ``file`` a READY logged model of the run, and a version of the registered model ``register``.

    It is an output of the run, so the run's page and the experiment's Models tab show it, with the run's
    parameters; ``runs:/<run_id>/<name>``, ``models:/<model_id>`` and ``models:/<register>/<version>`` all
    load it. Every call makes a new one; ``job``, the job's id, lets ``find_logged`` find it.

    Raises:
        ModelError: ``file`` is missing, is no Keras model, or not of the format that ``facts`` tell: nothing
            was created; or a later step failed, and the logged model is marked FAILED and a registered model
            that this call created is deleted again.
    """
    from mlflow.entities import LoggedModelOutput

    check_file(file, facts)
    with _as_model_error(file), ExitStack() as undo, TemporaryDirectory(prefix="batchai-model-") as scratch:
        params = client.get_run(run_id).data.params
        tags = {TAG_JOB: job} if job else {}
        model = client.create_logged_model(experiment_id, name=name, source_run_id=run_id, params=params, tags=tags)
        undo.callback(_mark_failed, client, model.model_id)
        target = Path(scratch, "model")
        build_directory(file, facts, target, run_id=run_id, model_id=model.model_id)
        client.log_model_artifacts(model.model_id, str(target))
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        client.finalize_logged_model(model.model_id, "READY")
        version = _register(client, register, model, run_id) if register else None
        undo.pop_all()
    return LoggedModelRef(model.model_id, f"models:/{model.model_id}", version, notes(facts))


def find_logged(
    client: MlflowClient, *, experiment_id: str, run_id: str, job: str, facts: ModelFacts, register: str | None = None
) -> LoggedModelRef | None:
    """The READY model that an earlier ``log_model`` has made for the job, as a version of ``register``; None if there is none.

    Who called it may have died at any point: models that it left unfinished are marked FAILED, a registration is made up for.
    """
    found = client.search_logged_models([experiment_id], filter_string=f"tags.`{TAG_JOB}` = '{job}'")
    ready = [model for model in found if str(model.status) == "READY"]
    for model in found:
        if str(model.status) == "PENDING":
            _mark_failed(client, model.model_id)
    if not ready:
        return None
    model, version = ready[0], None
    if register:
        with _as_model_error(Path(model.name)):
            # A registry in a database does not keep a version's model_id; both forms of its source hold it.
            known = client.search_model_versions(f"run_id = '{run_id}'")
            versions = [str(one.version) for one in known if one.name == register and model.model_id in (one.source or "")]
            version = versions[0] if versions else _register(client, register, model, run_id)
            _link_version(client, model.model_id, register, version)
    return LoggedModelRef(model.model_id, f"models:/{model.model_id}", version, notes(facts))


def _register(client: MlflowClient, name: str, model: LoggedModel, run_id: str) -> str:
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


def _mark_failed(client: MlflowClient, model_id: str) -> None:
    with suppress(Exception):  # as above
        client.finalize_logged_model(model_id, "FAILED")


@contextmanager
def _as_model_error(file: Path) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ModelError(f"{file} could not be made an MLflow model: {reason}.") from error
