"""Find and choose the saved models of a job, and describe one from its file, without importing TensorFlow or Keras.

Rank 0, its node's agent and the client choose alike. A file is described by the interpreter that trained, so that the
submitting machine, which may have another TensorFlow or none, can make an MLflow model of it. Standard library, and h5py
for ``.h5`` files only.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

Record = dict[str, Any]

# What a record's ``meta`` calls its format.
H5, KERAS, SAVED_MODEL, MLFLOW, TORCH = "h5", "keras", "saved_model", "mlflow", "torch"
# The signature of a SavedModel that is served, if it has it.
SERVING = "serving_default"
TORCH_ENDINGS = (".pt", ".pth")
MOST_FOUND = 100
# How a model's check came out.
PASSED, FAILED, UNCHECKED = "passed", "failed", "unchecked"
LONGEST_SENTENCE = 600
TENSORFLOW_PACKAGES = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "tensorflow-intel",
    "tensorflow-macos",
    "tensorflow-rocm",
    "intel-tensorflow",
    "tf-nightly",
)


class DescribeError(Exception):
    """The file holds no whole Keras model; ``str(error)`` is one sentence for a person."""


def choose(known: Sequence[Mapping[str, Any]], path: str | None) -> Mapping[str, Any] | None:
    """The record of the job's model, or None.

    The one that node 0 has chosen, if it has said so; else the last that a rank reported, else the last that was found. What
    only PyTorch can load comes behind all others.

    Args:
        known: bodies of ``report`` records on saved models, in their order.
        path: what batchai.yaml names, below an output directory; None: anything.
    """
    chosen = [record for record in known if record.get("chosen")]
    if chosen:
        return chosen[-1]
    if path:
        ending = "/" + path.strip("/")
        known = [record for record in known if str(record["path"]).rstrip("/").endswith(ending)]
    best = [record for record in known if not record.get("found")] or list(known)
    best = [record for record in best if not str(record["path"]).endswith(TORCH_ENDINGS)] or best
    return best[-1] if best else None


def found_in(folders: Sequence[str], path: str | None) -> list[str]:
    """Saved models in output directories: the named file or folder, else all that have a model's form and are no checkpoints.

    A folder that is a model (MLflow's, or a TensorFlow SavedModel) is one; what lies in it is not looked at.
    """
    found: list[str] = []
    for folder in folders:
        if path:
            named = os.path.join(folder, path)
            found += [named] if os.path.exists(named) else []
            continue
        for parent, below, names in os.walk(folder):
            if folder_format(parent):
                found.append(parent)
                below[:] = []
                continue
            below[:] = sorted(name for name in below if "checkpoint" not in name.lower())
            found += [os.path.join(parent, name) for name in sorted(names) if _is_model(name)]
    return list(dict.fromkeys(found))[-MOST_FOUND:]


def known(reported: Sequence[Record], folders: Sequence[str], path: str | None) -> list[Record]:
    """Saved models that ranks reported, and those in output directories, for ``choose``.

    Args:
        path: what batchai.yaml names; without it nothing is looked for where a rank has reported one.
    """
    found = [] if reported and not path else found_in(folders, path)
    names = {os.path.realpath(str(body.get("path"))) for body in reported}
    return [*reported, *({"type": "model", "path": one, "found": True} for one in found if os.path.realpath(one) not in names)]


def stamp(path: str) -> list[int]:
    """Size and modification time (ns) of a file: whether it is still the one that was tried. Raises OSError."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


def folder_format(path: str) -> str | None:
    """``mlflow`` or ``saved_model`` for a folder that is a model, else None."""
    if os.path.isfile(os.path.join(path, "MLmodel")):
        return MLFLOW
    return SAVED_MODEL if os.path.isfile(os.path.join(path, "saved_model.pb")) else None


def _is_model(name: str) -> bool:
    return name.endswith((".h5", ".keras", *TORCH_ENDINGS)) and not name.endswith(".weights.h5")


def outcome(result: str, why: str | None, seconds: float) -> Record:
    """The record of a check: its outcome, and a sentence's end on why."""
    return {"outcome": result, "why": why and why[:LONGEST_SENTENCE], "seconds": round(seconds, 2)}


def describe(path: str) -> dict[str, Any]:
    """Describe the model in one ``.h5`` or ``.keras`` file, of Keras 2, tf_keras or Keras 3.

    Returns:
        ``keras`` (the version that wrote the file), ``backend``, ``tensorflow`` (or None), ``python``,
        ``numpy``, ``requirements`` (pins of this interpreter's packages), ``format`` (``h5`` or ``keras``).

    Raises:
        DescribeError: the file is missing, is no Keras model, or holds weights alone.
    """
    file_format, keras_version, backend = _read(path)
    packages = _packages()
    keras = keras_version or packages.get("keras")
    if keras is None:
        raise DescribeError(f"{path} does not say which Keras wrote it, and this Python has no keras")
    backend = backend or _backend_here(_tensorflow(packages) is not None, "torch" in packages)
    return {"keras": keras, "format": file_format, **environment(backend, keras)}


def environment(backend: str, keras: str | None = None) -> dict[str, Any]:
    """The part of ``describe``'s record on this interpreter, for a model of a backend.

    Args:
        keras: the version of Keras that wrote it; None: it is no Keras file, and Keras is pinned if it is here.
    """
    packages = _packages()
    tensorflow = _tensorflow(packages)
    return {
        "backend": backend,
        "tensorflow": packages[tensorflow] if tensorflow else None,
        "python": platform.python_version(),
        "numpy": packages.get("numpy"),
        "requirements": _requirements(keras or packages.get("keras", ""), backend, tensorflow, packages),
    }


def keras_module(keras: str, requirements: Sequence[str]) -> str:
    """The module whose ``models.load_model`` reads a file: keras, tf_keras or tensorflow.keras.

    Args:
        keras: the version that wrote it.
        requirements: pins of the interpreter that trained.
    """
    names = {re.split(r"[\[<>=!~]", line)[0].lower().replace("_", "-"): line for line in requirements}
    if "tf-keras" in names:
        return "tf_keras"
    pinned = re.search(r"==(\d+)", names.get("keras", ""))
    major = int(pinned.group(1) if pinned else keras.split(".")[0])
    return "keras" if major >= 3 else "tensorflow.keras"


def _read(path: str) -> tuple[str, str | None, str | None]:
    """(format, version of the writing Keras, backend), by the file's content, not its name."""
    if not Path(path).is_file():
        raise DescribeError(f"there is no model file {path}")
    try:
        if zipfile.is_zipfile(path):
            return _read_keras(path)
        return _read_h5(path)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DescribeError(f"{path} is not a whole Keras model: {error}") from error


def _read_keras(path: str) -> tuple[str, str | None, str | None]:
    with zipfile.ZipFile(path) as archive:
        archive.getinfo("config.json")
        version = json.loads(archive.read("metadata.json").decode()).get("keras_version")
    return "keras", version, None


def _read_h5(path: str) -> tuple[str, str | None, str | None]:
    try:
        import h5py
    except ImportError:
        raise DescribeError(f"{path} can't be read: {sys.executable} has no h5py") from None
    with h5py.File(path, "r") as file:
        texts = {
            key: value.decode() if isinstance(value, bytes) else str(value)
            for key, value in file.attrs.items()
            if key in ("model_config", "keras_version", "backend")
        }
    if "model_config" not in texts:
        raise DescribeError(f"{path} holds weights without a model: save it with model.save(path)")
    return "h5", texts.get("keras_version"), texts.get("backend")


def _tensorflow(packages: Mapping[str, str]) -> str | None:
    return next((name for name in TENSORFLOW_PACKAGES if name in packages), None)


def _packages() -> dict[str, str]:
    """Versions of the packages a Keras model needs, of this interpreter."""
    found = {}
    for name in (*TENSORFLOW_PACKAGES, "keras", "tf_keras", "torch", "jax", "numpy", "h5py", "mlflow"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _requirements(keras: str, backend: str, tensorflow: str | None, packages: dict[str, str]) -> list[str]:
    """Pins for loading the model elsewhere. Where tf_keras is installed, it wrote the Keras 2 files."""
    names = [tensorflow] if tensorflow else []
    names += ["tf_keras"] if keras.startswith("2.") and "tf_keras" in packages else ["keras"]
    names += [backend] if backend in ("torch", "jax") else []
    return [f"{name}=={packages[name]}" for name in [*names, "numpy", "h5py", "mlflow"] if name in packages]


def _backend_here(has_tensorflow: bool, has_torch: bool) -> str:
    """The backend Keras would choose here: its own order, variable, then keras.json, then TensorFlow."""
    chosen = os.environ.get("KERAS_BACKEND")
    if chosen:
        return chosen
    try:
        home = Path(os.environ["KERAS_HOME"]) if "KERAS_HOME" in os.environ else Path.home() / ".keras"
        chosen = str(json.loads((home / "keras.json").read_text()).get("backend") or "")
    except (OSError, ValueError, AttributeError, RuntimeError):
        chosen = ""
    return chosen or ("torch" if has_torch and not has_tensorflow else "tensorflow")
