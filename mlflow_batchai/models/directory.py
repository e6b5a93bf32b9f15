"""The MLflow model directory of a saved Keras file, the one that ``mlflow.tensorflow`` reads.

Its loader, run later in an environment built from the *training* environment's requirements, opens ``data/model.h5`` or
``data/model.keras``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import yaml

from mlflow_batchai.errors import ModelError
from mlflow_batchai.models.facts import ModelFacts, TensorFacts, project

HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
TENSORFLOW_NAMES = re.compile(r"tensorflow(-(cpu|gpu|intel|macos|rocm))?|intel-tensorflow|tf-nightly")
KERAS_3_TENSORFLOW = "tensorflow-cpu>=2.16.1"  # the first TensorFlow that runs Keras 3
DTYPES = {"string": "str"} | {
    name: name
    for name in (
        *("float16", "float32", "float64", "bool"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    )
}


def build_directory(file: Path, facts: ModelFacts, target: Path, *, run_id: str | None, model_id: str | None = None) -> Path:
    """Write the MLflow model directory of ``file`` at ``target``, a new directory, and return ``target``.

    The model's file in it is a hard link to ``file`` where the file system allows one, else a copy.
    The first dimension of every tensor in the signature is -1: MLflow's TensorFlow models may have no other.

    Raises:
        ModelError: ``file`` is missing, is no Keras model, or not of the format that ``facts`` tell.
        OSError: ``target`` can't be written.
    """
    from mlflow.models import Model, ModelSignature

    check_file(file, facts)
    data = target / "data"
    data.mkdir(parents=True)
    saved = data / f"model.{facts.format}"
    link_or_copy(file, saved)
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


def check_file(file: Path, facts: ModelFacts) -> None:
    """Refuse what is no whole Keras model of the format that ``facts`` tell.

    Raises:
        ModelError: with the reason.
    """
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


def notes(facts: ModelFacts) -> tuple[str, ...]:
    """Sentences on what a person may miss in the model, if anything."""
    found = _signature(facts)[1]
    if facts.backend != "tensorflow":
        found.append(f"It was trained on Keras' {facts.backend} backend, and loads on TensorFlow.")
    return tuple(found)


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
