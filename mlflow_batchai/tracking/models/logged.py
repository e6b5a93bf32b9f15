"""Create a job's logged model and registered model version in MLflow, each once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mlflow_batchai.errors import ModelError

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel, Run
    from mlflow.tracking import MlflowClient

TAG_JOB = "batchai.job"
TAG_CHECK = "batchai.modelCheck"
# Which of a job's scripts' models it is: JOB/ID, where the id is the one that the script had.
TAG_SCRIPT = "batchai.scriptModel"


def find_logged(client: MlflowClient, run_id: str, tag: str, value: str) -> LoggedModel | None:
    """The READY model of a run that an earlier call has made with this tag; what that left unfinished is marked FAILED."""
    experiment = client.get_run(run_id).info.experiment_id
    ready = None
    for model in client.search_logged_models([experiment], filter_string=f"tags.`{tag}` = '{value}'"):
        if model.source_run_id == run_id and str(model.status) == "PENDING":
            client.finalize_logged_model(model.model_id, "FAILED")
        elif model.source_run_id == run_id and str(model.status) == "READY":
            ready = ready or model
    return ready


def last_of_scripts(client: MlflowClient, run_id: str) -> LoggedModel | None:
    """The last logged model that a script of a run's job has made, or None: what a job may register that reported no file."""
    outputs = client.get_run(run_id).outputs
    for output in reversed(outputs.model_outputs if outputs else []):
        model = client.get_logged_model(output.model_id)
        if TAG_SCRIPT in model.tags and str(model.status) == "READY":
            return model
    return None


@contextmanager
def being_made(
    client: MlflowClient,
    run: Run,
    name: str,
    tags: Mapping[str, str],
    params: Mapping[str, str],
    model_type: str | None = None,
) -> Iterator[LoggedModel]:
    """A new logged model of a run, READY once the block has ended, FAILED if that raises."""
    model = client.create_logged_model(
        run.info.experiment_id,
        name=name,
        source_run_id=run.info.run_id,
        tags=dict(tags),
        params=dict(params),
        model_type=model_type,
    )
    try:
        yield model
        client.finalize_logged_model(model.model_id, "READY")
    except Exception:
        with suppress(Exception):  # the failure that brought us here is what a person has to see
            client.finalize_logged_model(model.model_id, "FAILED")
        raise


def publish(
    client: MlflowClient,
    build: Callable[[Path, str], object],
    *,
    what: str,
    run_id: str,
    job: str,
    name: str = "model",
    check: str | None = None,
) -> LoggedModel:
    """Make a model directory a READY logged model of the run, with the run's params.

    It is an output of the run, so the run's page and the experiment's Models tab show it. Every call makes a new one.

    Args:
        build: makes the directory at a path, for the model of an id.
        check: how it was checked, for a tag; None: it wasn't.

    Raises:
        ModelError: a step failed, and the logged model is marked FAILED.
    """
    from mlflow.entities import LoggedModelOutput

    with as_model_error(what), TemporaryDirectory(prefix="batchai-model-") as scratch:
        run = client.get_run(run_id)
        tags = {TAG_JOB: job, **({TAG_CHECK: check} if check else {})}
        with being_made(client, run, name, tags, run.data.params) as model:
            target = Path(scratch, "model")
            build(target, model.model_id)
            client.log_model_artifacts(model.model_id, str(target))
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
    return model


def register(client: MlflowClient, name: str, model: LoggedModel, run_id: str) -> str:
    """The version of ``name`` that the model is: the one that an earlier call has made, else a new one.

    The registered model is made if it isn't there.

    Raises:
        ModelError: the registry failed.
    """
    with as_model_error(model.name, f"could not be registered as {name}"):
        # A registry in a database does not keep a version's model_id; both forms of its source hold it.
        known = client.search_model_versions(f"run_id = '{run_id}'")
        versions = [str(one.version) for one in known if one.name == name and model.model_id in (one.source or "")]
        if not versions:
            _create_registered_model(client, name)
            created = client.create_model_version(name, source=_source(client, model), run_id=run_id, model_id=model.model_id)
            versions = [str(created.version)]
        _link_version(client, model.model_id, name, versions[0])
        return versions[0]


def _create_registered_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
            raise


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


@contextmanager
def as_model_error(what: str, failed: str = "could not be made an MLflow model") -> Iterator[None]:
    """Turn MLflow's errors into a ModelError that names the model and what has failed."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ModelError(f"{what} {failed}: {reason}.") from error
