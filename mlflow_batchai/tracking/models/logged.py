"""A saved model as MLflow knows it: a logged model of the job's run, and a version of a registered model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mlflow_batchai.errors import ModelError
from mlflow_batchai.tracking.models import registry
from mlflow_batchai.tracking.models.directory import build_directory, check_file, notes
from mlflow_batchai.tracking.models.facts import ModelFacts

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

TAG_JOB = "batchai.job"
# What tells a logged model from others of its job; absent for the one that batchai.yaml asks for.
TAG_KEY = "batchai.modelKey"
TAG_CHECK = "batchai.modelCheck"


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
    found: tuple[str, ...] | None = None,
) -> LoggedModelRef:
    """Make ``file`` a READY logged model of the run, and a version of the registered model ``register``.

    It is an output of the run, so the run's page and the experiment's Models tab show it, with the run's
    parameters; ``runs:/<run_id>/<name>``, ``models:/<model_id>`` and ``models:/<register>/<version>`` all
    load it. Every call makes a new one; ``job``, the job's id, lets ``find_logged`` find it.

    Args:
        file: what the training script saved: a file, or a TensorFlow SavedModel's folder.
        found: the notes of the reference; None: those on the facts.

    Raises:
        ModelError: ``file`` is missing, is no model, or not of the format that ``facts`` tell: nothing
            was created; or a later step failed, and the logged model is marked FAILED and a registered model
            that this call created is deleted again.
    """
    check_file(file, facts)
    return publish(
        client,
        lambda target, model_id: build_directory(file, facts, target, run_id=run_id, model_id=model_id),
        what=str(file),
        experiment_id=experiment_id,
        run_id=run_id,
        name=name,
        register=register,
        tags={**({TAG_JOB: job} if job else {}), **({TAG_CHECK: facts.check} if facts.check else {})},
        found=notes(facts) if found is None else found,
    )


def publish(
    client: MlflowClient,
    build: Callable[[Path, str], object],
    *,
    what: str,
    experiment_id: str,
    run_id: str,
    name: str,
    register: str | None,
    tags: Mapping[str, str],
    params: Mapping[str, str] | None = None,
    model_type: str | None = None,
    step: int = 0,
    found: tuple[str, ...] = (),
) -> LoggedModelRef:
    """Make a model directory a READY logged model of the run, and register it.

    Args:
        build: makes the directory at a path, for the model of an id.
        what: is made a model, for sentences.
        params: the model's; None: those of the run.
        found: the notes of the reference.

    Raises:
        ModelError: as ``log_model`` says.
    """
    from mlflow.entities import LoggedModelOutput

    with as_model_error(what), ExitStack() as undo, TemporaryDirectory(prefix="batchai-model-") as scratch:
        given = dict(client.get_run(run_id).data.params if params is None else params)
        model = client.create_logged_model(
            experiment_id, name=name, source_run_id=run_id, params=given, tags=dict(tags), model_type=model_type
        )
        undo.callback(_mark_failed, client, model.model_id)
        target = Path(scratch, "model")
        build(target, model.model_id)
        client.log_model_artifacts(model.model_id, str(target))
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=step)])
        client.finalize_logged_model(model.model_id, "READY")
        version = registry.register(client, register, model, run_id) if register else None
        undo.pop_all()
    return LoggedModelRef(model.model_id, f"models:/{model.model_id}", version, found)


def find_logged(
    client: MlflowClient,
    *,
    experiment_id: str,
    run_id: str,
    job: str,
    key: str | None = None,
    register: str | None = None,
    found: tuple[str, ...] = (),
) -> LoggedModelRef | None:
    """The READY model that an earlier call has made for the job, as a version of ``register``; None if there is none.

    Who called it may have died at any point: models that it left unfinished are marked FAILED, a registration is made up for.

    Args:
        key: its tag ``batchai.modelKey``, if it has one.
        found: the notes of the reference.
    """
    known = client.search_logged_models([experiment_id], filter_string=f"tags.`{TAG_JOB}` = '{job}'")
    known_here = [model for model in known if model.tags.get(TAG_KEY) == key and model.source_run_id == run_id]
    for model in known_here:
        if str(model.status) == "PENDING":
            _mark_failed(client, model.model_id)
    ready = [model for model in known_here if str(model.status) == "READY"]
    if not ready:
        return None
    model, version = ready[0], None
    if register:
        with as_model_error(model.name):
            version = registry.version_of(client, register, model, run_id)
    return LoggedModelRef(model.model_id, f"models:/{model.model_id}", version, found)


def _mark_failed(client: MlflowClient, model_id: str) -> None:
    with suppress(Exception):  # the failure that brought us here is what a person has to see
        client.finalize_logged_model(model_id, "FAILED")


@contextmanager
def as_model_error(what: str, failed: str = "could not be made an MLflow model") -> Iterator[None]:
    """Whatever MLflow raises becomes a ModelError that names the model, and says what has failed."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ModelError(f"{what} {failed}: {reason}.") from error
