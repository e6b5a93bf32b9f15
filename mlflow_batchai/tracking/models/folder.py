"""A finished MLflow model folder (one with an ``MLmodel`` file) becomes a logged model as it is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import yaml

from mlflow_batchai.errors import ModelError
from mlflow_batchai.tracking.models.directory import link_or_copy, links
from mlflow_batchai.tracking.models.logged import TAG_CHECK, TAG_JOB, TAG_KEY, LoggedModelRef, find_logged, publish

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

MLMODEL = "MLmodel"
LONGEST_MLMODEL = 16 << 20
# Where the model's code once lay, of which MLflow uses the last part only.
_ANYWHERE = frozenset({"model_code_path"})
_ADDRESSES = frozenset({"uri", "source_model_download_uri"})


def log_folder(
    client: MlflowClient,
    *,
    experiment_id: str,
    run_id: str,
    folder: Path,
    job: str,
    key: str | None = None,
    name: str = "model",
    register: str | None = None,
    params: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    model_type: str | None = None,
    step: int = 0,
    check: str | None = None,
    found: tuple[str, ...] = (),
) -> LoggedModelRef:
    """Make an MLflow model folder a READY logged model of the run, and a version of the registered model ``register``.

    All in it stays as it is (signature, flavors, environment, example); only ``run_id`` and ``model_id`` in its ``MLmodel``
    become those of the run and of the logged model. A second call for the same job and key makes no second model: it
    returns the first one, and makes up for what was not done when its caller died.

    Args:
        folder: on this machine. What was fetched from a share is removed by its owner.
        job: the job's id.
        key: what tells the model from others of the job, such as the id that it had on a node; None for the one that
            batchai.yaml asks for.
        name: of the logged model.
        params: the model's; None: those of the run.
        tags: more tags of the logged model.
        step: the training step at which the run put it out.
        check: how it was checked, for a tag; None: it wasn't.
        found: the notes of the reference.

    Raises:
        ModelError: the folder is no whole MLflow model, or a path in it leads out of it: nothing was created; or a later step
            failed, and the logged model is marked FAILED.
    """
    known = find_logged(client, experiment_id=experiment_id, run_id=run_id, job=job, key=key, register=register, found=found)
    if known is not None:
        return known
    description = check_folder(folder)
    own = {TAG_JOB: job, **({TAG_KEY: key} if key else {}), **({TAG_CHECK: check} if check else {})}
    return publish(
        client,
        lambda target, model_id: _mirror(folder, description, target, run_id, model_id),
        what=str(folder),
        experiment_id=experiment_id,
        run_id=run_id,
        name=name,
        register=register,
        tags={**(tags or {}), **own},
        params=params,
        model_type=model_type,
        step=step,
        found=found,
    )


def check_folder(folder: Path) -> dict[str, Any]:
    """What the ``MLmodel`` of a folder says.

    Whoever loads the model follows its paths, on his own machine: none may lead out of the folder.

    Raises:
        ModelError: the folder is no MLflow model, or a path or link in it leads out of it.
    """
    file = folder / MLMODEL
    for path in links(folder):
        if not (folder / path).exists() or not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise ModelError(f"{folder} can't be used: {path} in it is a link out of it, or to nothing.")
    try:
        with file.open("rb") as stream:
            description = yaml.safe_load(stream.read(LONGEST_MLMODEL))
    except OSError as error:
        raise ModelError(f"{folder} is no MLflow model: {MLMODEL} in it can't be read: {error.strerror or error}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ModelError(f"{folder} is no MLflow model: {MLMODEL} in it is no YAML.") from error
    if not isinstance(description, dict) or not isinstance(description.get("flavors"), dict) or not description["flavors"]:
        raise ModelError(f"{folder} is no MLflow model: {MLMODEL} in it names no flavors.")
    for key, text in _texts({"flavors": description["flavors"], "example": description.get("saved_input_example_info")}):
        if _leads_out(key, text):
            raise ModelError(f"{folder} can't be used: {key} in its {MLMODEL} is '{text}', which leads out of the folder.")
    return description


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of all that is text below a value."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, str(name))


def _leads_out(key: str, text: str) -> bool:
    if key in _ANYWHERE or key in _ADDRESSES:
        return False
    path = PurePosixPath(text.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts


def _mirror(folder: Path, description: Mapping[str, Any], target: Path, run_id: str, model_id: str) -> None:
    """The folder again, its files linked where the file system allows it, with other ids in its MLmodel."""
    shutil.copytree(folder, target, copy_function=link_or_copy)
    (target / MLMODEL).unlink()
    own = {**description, "run_id": run_id, "model_id": model_id}
    (target / MLMODEL).write_text(yaml.safe_dump(own, sort_keys=False, allow_unicode=True), encoding="utf-8")
