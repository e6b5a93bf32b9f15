"""The MLflow model directory of a saved Keras file or SavedModel, the one that ``mlflow.tensorflow`` reads.

Its loader, run later in an environment built from the *training* environment's requirements, opens ``data/model.h5``,
``data/model.keras`` or ``data/model``.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mlflow_batchai.agent.models import H5, KERAS, SAVED_MODEL, folder_format
from mlflow_batchai.errors import ModelError
from mlflow_batchai.tracking.models.facts import ModelFacts, project
from mlflow_batchai.tracking.models.signature import signature_of, write_example

HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
TENSORFLOW_NAMES = re.compile(r"tensorflow(-(cpu|gpu|intel|macos|rocm))?|intel-tensorflow|tf-nightly")
KERAS_3_TENSORFLOW = "tensorflow-cpu>=2.16.1"  # the first TensorFlow that runs Keras 3


def build_directory(file: Path, facts: ModelFacts, target: Path, *, run_id: str | None, model_id: str | None = None) -> Path:
    """Write the MLflow model directory of ``file`` at ``target``, a new directory, and return ``target``.

    The model's files in it are hard links where the file system allows them, else copies.
    The first dimension of every tensor in the signature is -1: MLflow's TensorFlow models may have no other. The input example
    is the one that the script gave, else zeros.

    Args:
        file: a Keras file, or a SavedModel's folder.

    Raises:
        ModelError: ``file`` is missing, is no model, or not of the format that ``facts`` tell.
        OSError: ``target`` can't be written.
    """
    from mlflow.models import Model, ModelSignature

    check_file(file, facts)
    target.mkdir(parents=True)
    flavor = _saved_model(file, facts, target) if facts.format == SAVED_MODEL else _keras_file(file, facts, target)
    _write_environment(facts, target)
    signature = signature_of(facts)[0]
    model = Model(
        run_id=run_id,
        model_id=model_id,
        signature=ModelSignature.from_dict(signature) if signature else None,
        saved_input_example_info=write_example(facts, target),
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
    model.save(str(target / "MLmodel"))
    return target


def _keras_file(file: Path, facts: ModelFacts, target: Path) -> dict[str, Any]:
    """Put a Keras file where MLflow's loader looks for it; its flavor."""
    data = target / "data"
    data.mkdir()
    link_or_copy(file, data / f"model.{facts.format}")
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
    shutil.copytree(folder, target / "data" / "model", copy_function=link_or_copy)
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


def check_file(file: Path, facts: ModelFacts) -> None:
    """Refuse what is no whole model of the format that ``facts`` tell.

    Raises:
        ModelError: with the reason.
    """
    if facts.format == SAVED_MODEL:
        if folder_format(str(file)) != SAVED_MODEL:
            raise ModelError(f"{file} is no SavedModel: there is no saved_model.pb in it.")
        for link in links(file):
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


def notes(facts: ModelFacts) -> tuple[str, ...]:
    """Sentences on what a person may miss in the model, if anything."""
    found = signature_of(facts)[1]
    if facts.backend != "tensorflow":
        found.append(f"It was trained on Keras' {facts.backend} backend, and loads on TensorFlow.")
    return tuple(found)


def links(folder: Path) -> Iterator[str]:
    """The symbolic links below a folder, by their paths from there."""
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent, name)
            if path.is_symlink():
                yield path.relative_to(folder).as_posix()


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """A hard link to a file, behind any symbolic one, or its copy: on another file system, or one without hard links."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


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
