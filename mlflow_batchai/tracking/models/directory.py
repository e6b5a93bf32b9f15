"""Build the MLflow model directory from a saved Keras file, a SavedModel, or an MLflow model.

``mlflow.tensorflow``, run later in an environment built from the *training* environment's requirements, opens
``data/model.h5``, ``data/model.keras`` or ``data/model``.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import yaml

from mlflow_batchai.errors import ModelError
from mlflow_batchai.tracking.models.facts import ModelFacts, TensorFacts, project
from mlflow_batchai.training.saved_models import H5, KERAS, SAVED_MODEL, folder_format

if TYPE_CHECKING:
    import numpy
    from mlflow.models import ModelSignature
    from mlflow.types import Schema

HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
TENSORFLOW_NAMES = re.compile(r"tensorflow(-(cpu|gpu|intel|macos|rocm))?|intel-tensorflow|tf-nightly")
KERAS_3_TENSORFLOW = "tensorflow-cpu>=2.16.1"  # the first TensorFlow that runs Keras 3
EXAMPLE, SERVING_EXAMPLE = "input_example.json", "serving_input_example.json"
# Zeros of an input with open dimensions, or of a very large one, are no example.
MOST_ZEROS = 1 << 18
MLMODEL = "MLmodel"
LONGEST_MLMODEL = 16 << 20
# What in an MLmodel may look like a path out of it: where its code once lay, of which MLflow uses the last part, and addresses.
_NO_PATHS = frozenset({"model_code_path", "uri", "source_model_download_uri"})


def build_directory(file: Path, facts: ModelFacts, run_id: str | None, target: Path, model_id: str | None = None) -> None:
    """Write the MLflow model directory of ``file`` at ``target``, a new directory.

    The model's files in it are hard links where the file system allows them, else copies.
    The first dimension of every tensor in the signature is -1: MLflow's TensorFlow models may have no other. The input example
    is the one that the script gave, else zeros.

    Args:
        file: a Keras file, or a SavedModel's folder, that ``check_file`` takes.

    Raises:
        OSError: ``target`` can't be written.
    """
    from mlflow.models import Model

    target.mkdir(parents=True)
    flavor = _saved_model(file, facts, target) if facts.format == SAVED_MODEL else _keras_file(file, facts, target)
    _write_environment(facts, target)
    model = Model(
        run_id=run_id,
        model_id=model_id,
        signature=_signature(facts)[0],
        saved_input_example_info=_write_example(facts, target),
        model_size_bytes=sum(path.stat().st_size for path in (file, *file.rglob("*")) if path.is_file()),
    )
    model.model_uuid = model_id or model.model_uuid
    model.add_flavor("tensorflow", code=None, **flavor)
    # What mlflow.pyfunc.add_to_model writes, but with the Python that trained.
    model.add_flavor(
        "python_function",
        loader_module="mlflow.tensorflow",
        python_version=facts.python,
        env={"conda": "conda.yaml", "virtualenv": "python_env.yaml"},
        **({"data": "data"} if facts.format != SAVED_MODEL else {}),
    )
    model.save(str(target / MLMODEL))


def check_file(file: Path, facts: ModelFacts) -> None:
    """Refuse what is no whole model of the format that ``facts`` tell. Raises ModelError: with the reason."""
    if facts.format == SAVED_MODEL:
        if folder_format(str(file)) != SAVED_MODEL:
            raise ModelError(f"{file} is no SavedModel: there is no saved_model.pb in it.")
        for link in _links(file):
            raise ModelError(f"{file} can't be used: {link} in it is a link.")
        return
    try:
        with file.open("rb") as stream:
            is_h5 = stream.read(len(HDF5_MAGIC)) == HDF5_MAGIC
    except OSError as error:
        raise ModelError(f"The model file {file} can't be read: {error.strerror or error}.") from error
    found = H5 if is_h5 else KERAS if zipfile.is_zipfile(file) else None
    if found is None:
        raise ModelError(f"{file} is not a saved Keras model, or only part of one: save it with model.save(path).")
    if found != facts.format:
        raise ModelError(f"{file} is a .{found} file, but its description is of a .{facts.format} file.")


def check_folder(folder: Path) -> dict[str, Any]:
    """Read and check the ``MLmodel`` of an MLflow model.

    Whoever loads the model follows its paths, on his own machine: none may lead out of the folder.

    Raises:
        ModelError: the folder is no MLflow model, or a path or link in it leads out of it.
    """
    for link in _links(folder):
        if not (folder / link).exists() or not (folder / link).resolve().is_relative_to(folder.resolve()):
            raise ModelError(f"{folder} can't be used: {link} in it is a link out of it, or to nothing.")
    try:
        with (folder / MLMODEL).open("rb") as stream:
            description = yaml.safe_load(stream.read(LONGEST_MLMODEL))
    except OSError as error:
        raise ModelError(f"{folder} is no MLflow model: {MLMODEL} in it can't be read: {error.strerror or error}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ModelError(f"{folder} is no MLflow model: {MLMODEL} in it is no YAML.") from error
    if not isinstance(description, dict) or not isinstance(description.get("flavors"), dict) or not description["flavors"]:
        raise ModelError(f"{folder} is no MLflow model: {MLMODEL} in it names no flavors.")
    for key, text in _texts({"flavors": description["flavors"], "example": description.get("saved_input_example_info")}):
        path = PurePosixPath(text.replace("\\", "/"))
        if key not in _NO_PATHS and (path.is_absolute() or ".." in path.parts):
            raise ModelError(f"{folder} can't be used: {key} in its {MLMODEL} is '{text}', which leads out of the folder.")
    return description


def mirror(folder: Path, description: Mapping[str, Any], run_id: str, target: Path, model_id: str) -> None:
    """Write an MLflow model again at ``target``, its files linked if the file system allows it, with these ids in its MLmodel.

    Args:
        description: what ``check_folder`` returned.
    """
    shutil.copytree(folder, target, copy_function=_link_or_copy)
    (target / MLMODEL).unlink()
    own = {**description, "run_id": run_id, "model_id": model_id}
    (target / MLMODEL).write_text(yaml.safe_dump(own, sort_keys=False, allow_unicode=True), encoding="utf-8")


def notes(facts: ModelFacts) -> list[str]:
    """Sentences on what a person may miss in a model, if anything."""
    found = _signature(facts)[1]
    if facts.backend != "tensorflow":
        found.append(f"It was trained on Keras' {facts.backend} backend, and loads on TensorFlow.")
    return found


def _keras_file(file: Path, facts: ModelFacts, target: Path) -> dict[str, Any]:
    """Put a Keras file where MLflow's loader looks for it; its flavor."""
    data = target / "data"
    data.mkdir()
    _link_or_copy(file, data / f"model.{facts.format}")
    (data / "keras_module.txt").write_text(facts.keras_module)
    (data / "save_format.txt").write_text(facts.format)
    return {
        "data": "data",
        "model_type": "keras",
        "keras_module": facts.keras_module,
        "keras_version": facts.keras,
        "save_format": facts.format,
    }


def _saved_model(folder: Path, facts: ModelFacts, target: Path) -> dict[str, Any]:
    """Put a SavedModel where its flavor says.

    The type is the one that is served by a signature, by which any SavedModel can be: MLflow's other type calls the object that
    was saved, and what Keras exports can't be called.
    """
    shutil.copytree(folder, target / "data" / "model", copy_function=_link_or_copy)
    return {
        "saved_model_dir": "data/model",
        "model_type": "tf1-estimator",
        "meta_graph_tags": ["serve"],
        "signature_def_key": facts.signature,
    }


def _write_environment(facts: ModelFacts, target: Path) -> None:
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


def _requirements(facts: ModelFacts) -> list[str]:
    """The training environment's pins without local labels (no index has them), and what loading needs."""
    from mlflow.version import VERSION

    lines = [re.sub(r"\+[\w.]+", "", requirement) for requirement in facts.requirements]
    names = {project(line) for line in lines}
    if not any(TENSORFLOW_NAMES.fullmatch(name) for name in names):
        lines.append(f"tensorflow=={facts.tensorflow}" if facts.tensorflow else KERAS_3_TENSORFLOW)
    if facts.keras and not names & {"keras", "tf-keras"} and facts.keras_module == "keras":
        lines.append(f"keras=={facts.keras}")
    if "mlflow" not in names:
        # Our MLflow may not exist for an old Python; MLflow 2 reads this directory as well.
        modern = tuple(int(part) for part in facts.python.split(".")[:2]) >= (3, 10)
        lines.insert(0, f"mlflow=={VERSION}" if modern else "mlflow")
    return lines


def _signature(facts: ModelFacts) -> tuple[ModelSignature | None, list[str]]:
    """(MLflow's signature, sentences on what had to be left out of it)"""
    from mlflow.models import ModelSignature

    inputs, outputs = _schema(facts, facts.inputs), _schema(facts, facts.outputs)
    if inputs is None:
        return None, ["It has no signature, because the shape and type of its inputs are not known."]
    missing = [] if outputs else ["Its signature has no outputs, because their shape or type is not known."]
    return ModelSignature(inputs=inputs, outputs=outputs), missing


def _schema(facts: ModelFacts, tensors: tuple[TensorFacts, ...]) -> Schema | None:
    """None if MLflow can't say it: a type NumPy has no word for, or several tensors without a name each."""
    from mlflow.exceptions import MlflowException
    from mlflow.types import Schema, TensorSpec

    named = _named(facts, tensors)
    if any(not tensor.shape for tensor in tensors) or (named and len({tensor.name for tensor in tensors}) < len(tensors)):
        return None
    try:
        return Schema([TensorSpec(_dtype(one), (-1, *one.shape[1:]), one.name if named else None) for one in tensors])
    except (MlflowException, TypeError):
        return None


def _named(facts: ModelFacts, tensors: tuple[TensorFacts, ...]) -> bool:
    """One tensor goes without a name, so that a plain array is taken for it; a SavedModel's signature takes names only."""
    return len(tensors) > 1 or facts.format == SAVED_MODEL


def _dtype(tensor: TensorFacts) -> numpy.dtype[Any]:
    """Raises TypeError for what is no number, truth value or text of NumPy."""
    import numpy

    dtype = numpy.dtype("str" if tensor.dtype == "string" else tensor.dtype)
    if dtype.kind not in "biufU":
        raise TypeError(tensor.dtype)
    return dtype


def _write_example(facts: ModelFacts, target: Path) -> dict[str, str] | None:
    """Write an example of the inputs, as MLflow writes that of ``save_model(input_example=...)``.

    Returns:
        What the MLmodel says of it; None: there is none, because the inputs are not known, or have no fixed size.
    """
    if _schema(facts, facts.inputs) is None:
        return None
    arrays = _given(facts) or _zeros(facts)
    if arrays is None:
        return None
    named = _named(facts, facts.inputs)
    values = {name: array.tolist() for name, array in arrays.items()}
    example: Any = values if named else next(iter(values.values()))
    (target / EXAMPLE).write_text(json.dumps(example), encoding="utf-8")
    (target / SERVING_EXAMPLE).write_text(json.dumps({"inputs": example}), encoding="utf-8")
    return {"artifact_path": EXAMPLE, "serving_input_path": SERVING_EXAMPLE, "type": "ndarray"}


def _given(facts: ModelFacts) -> dict[str, numpy.ndarray[Any, Any]] | None:
    """The script's own example, if it is one for these inputs."""
    import numpy

    given = facts.example if isinstance(facts.example, dict) else {facts.inputs[0].name or "": facts.example}
    arrays = {}
    for tensor in facts.inputs:
        try:
            arrays[tensor.name or ""] = array = numpy.asarray(given[tensor.name or ""], _dtype(tensor))
        except (KeyError, ValueError, TypeError, OverflowError):
            return None
        if array.ndim != len(tensor.shape):
            return None
    return arrays


def _zeros(facts: ModelFacts) -> dict[str, numpy.ndarray[Any, Any]] | None:
    import numpy

    shapes = [(1, *tensor.shape[1:]) for tensor in facts.inputs]
    if any(-1 in shape for shape in shapes) or sum(map(math.prod, shapes)) > MOST_ZEROS:
        return None
    pairs = zip(facts.inputs, shapes, strict=True)
    return {tensor.name or "": numpy.zeros(shape, _dtype(tensor)) for tensor, shape in pairs}


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


def _links(folder: Path) -> Iterator[str]:
    """The symbolic links below a folder, by their paths from there."""
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent, name)
            if path.is_symlink():
                yield path.relative_to(folder).as_posix()


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    """A hard link to a file, behind any symbolic one, or its copy: on another file system, or one without hard links."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)
