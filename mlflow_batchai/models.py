"""A saved Keras file becomes an MLflow model that loads, serves and registers, without TensorFlow here.

The directory is the one ``mlflow.tensorflow`` reads: its loader, run later in an environment built from the
*training* environment's requirements, opens ``data/model.h5`` or ``data/model.keras``. Facts about the file
come from the node that trained.

A model trained on another Keras backend (torch) is treated the same way: Keras stores weights in one layout
for all backends, so TensorFlow loads it. ``mlflow.tensorflow`` needs TensorFlow to load anything, so a
requirement for it is added, and the backend's own stays, for those who set ``KERAS_BACKEND``. Convolutions in
``channels_first`` order are the exception: TensorFlow computes them on a GPU only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml

from mlflow_batchai.errors import ModelError

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.tracking import MlflowClient

TAG_JOB = "batchai.job"
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w,-]+\])?([<>=!~]=?=?[\w.*+!-]+(,[<>=!~]=?=?[\w.*+!-]+)*)?")
TENSORFLOW_NAMES = re.compile(r"tensorflow(-(cpu|gpu|intel|macos|rocm))?|intel-tensorflow|tf-nightly")
KERAS_3_TENSORFLOW = "tensorflow-cpu>=2.16.1"  # the first TensorFlow that runs Keras 3
DTYPES = {"string": "str"} | {
    name: name
    for name in (
        *("float16", "float32", "float64", "bool"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    )
}


@dataclass(frozen=True)
class TensorFacts:
    """One input or output: -1 in ``shape`` is a dimension that is not fixed; ``dtype`` is Keras' word."""

    name: str | None
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ModelFacts:
    """What the training side says of a saved model: its environment's versions, and its tensors if known."""

    keras: str
    backend: str
    python: str
    requirements: tuple[str, ...]
    format: str
    tensorflow: str | None = None
    inputs: tuple[TensorFacts, ...] = ()
    outputs: tuple[TensorFacts, ...] = ()

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ModelFacts:
        """Facts from the record that ``training.report`` or ``node.describe`` made.

        A job wrote the record, so every value is checked before it gets into a file that pip reads.

        Raises:
            ModelError: the record is one of a failure, or a key is missing or has a value of the wrong kind.
        """
        if "error" in record:
            raise ModelError(str(record["error"]))
        model_format = _text(record, "format", r"h5|keras")
        requirements = record.get("requirements", [])
        if not isinstance(requirements, list):
            raise _bad("requirements", requirements)
        for requirement in requirements:
            if not isinstance(requirement, str) or not REQUIREMENT.fullmatch(requirement):
                raise _bad("requirements", requirement)
        return cls(
            keras=_text(record, "keras", r"\d+\.[\w.+-]+"),
            backend=_text(record, "backend", r"[a-z]+"),
            python=_text(record, "python", r"\d+\.\d+[\w.+]*"),
            requirements=tuple(requirements),
            format=model_format,
            tensorflow=_text(record, "tensorflow") if record.get("tensorflow") is not None else None,
            inputs=_tensors(record, "inputs"),
            outputs=_tensors(record, "outputs"),
        )

    @property
    def keras_module(self) -> str:
        """The module whose ``models.load_model`` reads it: keras, tf_keras or tensorflow.keras."""
        names = {_project(requirement): requirement for requirement in self.requirements}
        if "tf-keras" in names:
            return "tf_keras"
        pinned = re.search(r"==(\d+)", names.get("keras", ""))
        major = int(pinned[1] if pinned else self.keras.split(".")[0])
        return "keras" if major >= 3 else "tensorflow.keras"


@dataclass(frozen=True)
class LoggedModelRef:
    """A model as MLflow knows it; ``notes`` are sentences on what a person may miss in it, if anything."""

    model_id: str
    model_uri: str
    version: str | None
    notes: tuple[str, ...] = ()


def build_directory(file: Path, facts: ModelFacts, target: Path, *, run_id: str | None, model_id: str | None = None) -> Path:
    """Write the MLflow model directory of ``file`` at ``target``, a new directory, and return ``target``.

    The model's file in it is a hard link to ``file`` where the file system allows one, else a copy.
    The first dimension of every tensor in the signature is -1: MLflow's TensorFlow models may have no other.

    Raises:
        ModelError: ``file`` is missing, is no Keras model, or not of the format that ``facts`` tell.
        OSError: ``target`` can't be written.
    """
    from mlflow.models import Model, ModelSignature

    _check_file(file, facts)
    data = target / "data"
    data.mkdir(parents=True)
    saved = data / f"model.{facts.format}"
    _link_or_copy(file, saved)
    (data / "keras_module.txt").write_text(facts.keras_module)
    (data / "save_format.txt").write_text(facts.format)

    requirements = _requirements(facts)
    python_env = {
        "python": facts.python,
        "build_dependencies": ["pip", "setuptools", "wheel"],
        "dependencies": ["-r requirements.txt"],
    }
    conda_env = {
        "name": "mlflow-env",
        "channels": ["conda-forge"],
        "dependencies": [f"python={facts.python}", "pip", {"pip": requirements}],
    }
    (target / "requirements.txt").write_text("\n".join(requirements))
    (target / "python_env.yaml").write_text(yaml.safe_dump(python_env, sort_keys=False))
    (target / "conda.yaml").write_text(yaml.safe_dump(conda_env, sort_keys=False))

    signature = _signature(facts)[0]
    model = Model(
        run_id=run_id,
        model_id=model_id,
        signature=ModelSignature.from_dict(signature) if signature else None,
        model_size_bytes=saved.stat().st_size,
    )
    model.model_uuid = model_id or model.model_uuid
    model.add_flavor(
        "tensorflow",
        data="data",
        model_type="keras",
        keras_module=facts.keras_module,
        keras_version=facts.keras,
        save_format=facts.format,
        code=None,
    )
    # What mlflow.pyfunc.add_to_model writes, but with the Python that trained.
    model.add_flavor(
        "python_function",
        loader_module="mlflow.tensorflow",
        python_version=facts.python,
        data="data",
        env={"conda": "conda.yaml", "virtualenv": "python_env.yaml"},
    )
    model.save(str(target / "MLmodel"))
    return target


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

    _check_file(file, facts)
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
    return LoggedModelRef(model.model_id, f"models:/{model.model_id}", version, _notes(facts))


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
    return LoggedModelRef(model.model_id, f"models:/{model.model_id}", version, _notes(facts))


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


def _check_file(file: Path, facts: ModelFacts) -> None:
    try:
        with file.open("rb") as stream:
            is_h5 = stream.read(len(HDF5_MAGIC)) == HDF5_MAGIC
    except OSError as error:
        raise ModelError(f"The model file {file} can't be read: {error.strerror or error}.") from error
    found = "h5" if is_h5 else "keras" if zipfile.is_zipfile(file) else None
    if found is None:
        raise ModelError(f"{file} is not a saved Keras model, or only part of one: save it with model.save(path).")
    if found != facts.format:
        raise ModelError(f"{file} is a .{found} file, but its description is of a .{facts.format} file.")


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file.resolve(), target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(file, target)


def _requirements(facts: ModelFacts) -> list[str]:
    """The training environment's pins without local labels (no index has them), and what loading needs."""
    from mlflow.version import VERSION

    lines = [re.sub(r"\+[\w.]+", "", requirement) for requirement in facts.requirements]
    names = {_project(line) for line in lines}
    if not any(TENSORFLOW_NAMES.fullmatch(name) for name in names):
        lines.append(f"tensorflow=={facts.tensorflow}" if facts.tensorflow else KERAS_3_TENSORFLOW)
    if not names & {"keras", "tf-keras"} and facts.keras_module == "keras":
        lines.append(f"keras=={facts.keras}")
    if "mlflow" not in names:
        # Our MLflow may not exist for an old Python; MLflow 2 reads this directory as well.
        modern = tuple(int(part) for part in facts.python.split(".")[:2]) >= (3, 10)
        lines.insert(0, f"mlflow=={VERSION}" if modern else "mlflow")
    return lines


def _signature(facts: ModelFacts) -> tuple[dict[str, str], list[str]]:
    """MLflow's signature, two JSON texts, and notes on what had to be left out of it."""
    inputs, outputs = _schema(facts.inputs), _schema(facts.outputs)
    if inputs is None:
        return {}, ["It has no signature, because the shape and type of its inputs are not known."]
    if outputs is None:
        return {"inputs": inputs}, ["Its signature has no outputs, because their shape or type is not known."]
    return {"inputs": inputs, "outputs": outputs}, []


def _schema(tensors: tuple[TensorFacts, ...]) -> str | None:
    """None if MLflow can't say it: a type NumPy has no word for, or several tensors without a name each.

    One tensor goes without a name, so that a plain array is taken for it.
    """
    names = {tensor.name for tensor in tensors}
    named = len(tensors) > 1
    if not tensors or any(tensor.dtype not in DTYPES or not tensor.shape for tensor in tensors):
        return None
    if named and (None in names or len(names) < len(tensors)):
        return None
    return json.dumps(
        [
            {
                **({"name": tensor.name} if named else {}),
                "type": "tensor",
                "tensor-spec": {"dtype": DTYPES[tensor.dtype], "shape": [-1, *tensor.shape[1:]]},
            }
            for tensor in tensors
        ]
    )


def _notes(facts: ModelFacts) -> tuple[str, ...]:
    notes = _signature(facts)[1]
    if facts.backend != "tensorflow":
        notes.append(f"It was trained on Keras' {facts.backend} backend, and loads on TensorFlow.")
    return tuple(notes)


def _project(requirement: str) -> str:
    """The normalized name of a requirement's project."""
    return re.split(r"[\[<>=!~]", requirement)[0].lower().replace("_", "-")


def _text(record: Mapping[str, Any], key: str, pattern: str = r"\d[\w.+-]*") -> str:
    value = record.get(key)
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise _bad(key, value)
    return value


def _tensors(record: Mapping[str, Any], key: str) -> tuple[TensorFacts, ...]:
    tensors = record.get(key) or []
    try:
        facts = tuple(TensorFacts(item["name"], tuple(item["shape"]), item["dtype"]) for item in tensors)
    except (TypeError, KeyError) as error:
        raise _bad(key, tensors) from error
    for tensor in facts:
        sizes_are_whole = all(type(size) is int and size >= -1 for size in tensor.shape)
        if not (isinstance(tensor.name, str | None) and sizes_are_whole and isinstance(tensor.dtype, str)):
            raise _bad(key, tensors)
    return facts


def _bad(key: str, value: object) -> ModelError:
    return ModelError(f"The description of the saved model has no usable {key!r}: {value!r}.")
