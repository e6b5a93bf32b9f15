"""What a saved Keras model is, read from its file, without importing TensorFlow or Keras.

Run on a node by the interpreter that trained, ``python agent.pyz describe FILE...``, so that the submitting
machine, which may have another TensorFlow or none, can make an MLflow model of the file. Standard library,
and h5py for ``.h5`` files only.
"""

import json
import os
import platform
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from mlflow_batchai.node import tensors

Saved = Tuple[str, Dict[str, Any], Optional[str], Optional[str]]

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


def describe(path: str) -> Dict[str, Any]:
    """Describe the model in one ``.h5`` or ``.keras`` file, of Keras 2, tf_keras or Keras 3.

    Returns:
        ``keras`` (the version that wrote the file), ``backend``, ``tensorflow`` (or None), ``python``,
        ``numpy``, ``requirements`` (pins of this interpreter's packages), ``format`` (``h5`` or ``keras``),
        and, where the configuration tells them, ``inputs`` and ``outputs``: lists of ``{"name", "shape",
        "dtype"}`` with -1 for a dimension that is not fixed.

    Raises:
        DescribeError: the file is missing, is no Keras model, or holds weights alone.
    """
    file_format, config, keras_version, backend = _read(path)
    packages = _packages()
    keras = keras_version or packages.get("keras")
    if keras is None:
        raise DescribeError(f"{path} does not say which Keras wrote it, and this Python has no keras")
    tensorflow = next((name for name in TENSORFLOW_PACKAGES if name in packages), None)
    backend = backend or _backend_here(tensorflow is not None, "torch" in packages)
    record: Dict[str, Any] = {
        "keras": keras,
        "backend": backend,
        "tensorflow": packages[tensorflow] if tensorflow else None,
        "python": platform.python_version(),
        "numpy": packages.get("numpy"),
        "requirements": _requirements(keras, backend, tensorflow, packages),
        "format": file_format,
    }
    ends = {"inputs": tensors.inputs(config), "outputs": tensors.outputs(config)}
    record.update({key: found for key, found in ends.items() if found})
    return record


def main(argv: List[str]) -> int:
    """Print a line of JSON for each file: its description, or ``{"file", "error"}`` and then return 1."""
    if not argv:
        print("usage: describe FILE...", file=sys.stderr)
        return 2
    code = 0
    for path in argv:
        try:
            record = describe(path)
        except DescribeError as error:
            record = {"file": path, "error": str(error)}
            code = 1
        print(json.dumps(record))
    return code


def _read(path: str) -> Saved:
    """(format, configuration, version of the writing Keras, backend), by the file's content, not its name."""
    if not Path(path).is_file():
        raise DescribeError(f"there is no model file {path}")
    try:
        if zipfile.is_zipfile(path):
            return _read_keras(path)
        return _read_h5(path)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DescribeError(f"{path} is not a whole Keras model: {error}") from error


def _read_keras(path: str) -> Saved:
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json").decode())
        version = json.loads(archive.read("metadata.json").decode()).get("keras_version")
    return "keras", config, version, None


def _read_h5(path: str) -> Saved:
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
    return "h5", json.loads(texts["model_config"]), texts.get("keras_version"), texts.get("backend")


def _packages() -> Dict[str, str]:
    """Versions of the packages a Keras model needs, of this interpreter."""
    found = {}
    for name in (*TENSORFLOW_PACKAGES, "keras", "tf_keras", "torch", "jax", "numpy", "h5py"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _requirements(keras: str, backend: str, tensorflow: Optional[str], packages: Dict[str, str]) -> List[str]:
    """Pins for loading the model elsewhere. Where tf_keras is installed, it wrote the Keras 2 files."""
    names = [tensorflow] if tensorflow else []
    names += ["tf_keras"] if keras.startswith("2.") and "tf_keras" in packages else ["keras"]
    names += [backend] if backend in ("torch", "jax") else []
    return [f"{name}=={packages[name]}" for name in [*names, "numpy", "h5py"] if name in packages]


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
