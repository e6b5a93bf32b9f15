"""What a saved Keras model needs that isn't in its file, named: custom classes and functions, and Lambda layers."""

import re
from typing import Any, Dict, Iterator, List

_KERAS = re.compile(r"(tf_)?keras(\.|$)")
# How versions of Keras name what they don't find.
_NOT_FOUND = re.compile(
    r"(?:Unknown [\w ]{1,80}: *|Could not locate (?:class|function) |Unable to find (?:class|function) )'?([\w>.]+)"
)
_CURE = "save it with model.export(FOLDER), which needs no code, or as an MLflow model with its code (code_paths)"


def why_not(error: BaseException, configuration: Dict[str, Any]) -> str:
    """Why Keras could not load a model, for a sentence.

    Args:
        configuration: what the file says of the model; empty if that can't be read.
    """
    lambdas: List[str] = []
    customs: List[str] = []
    for entry in _objects(configuration):
        kind = str(entry.get("class_name"))
        if kind == "Lambda":
            own = entry.get("config")
            lambdas.append(str(own.get("name") if isinstance(own, dict) else kind))
        elif entry.get("registered_name") and not _KERAS.match(str(entry.get("module") or "")):
            # Of a function the name stands in the place of its configuration.
            own = entry.get("config")
            if kind == "function" and isinstance(own, str):
                customs.append(own)
            elif kind != "__lambda__":
                customs.append(kind)
    customs += [name.rpartition(">")[2] for name in _NOT_FOUND.findall(str(error))]
    if customs:
        return "its file needs %s, which is the script's own code and not in the file: %s" % (_list(customs), _CURE)
    if lambdas and "ambda" in str(error):
        said = "it has Lambda layers (%s), whose code Keras doesn't load from a file (safe_mode): use Keras' own layers, or %s"
        return said % (_list(lambdas), _CURE)
    return "Keras can't load it: %s" % first_line(error)


def first_line(error: BaseException) -> str:
    """An error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "%s: %s" % (type(error).__name__, lines[0].rstrip(".")) if lines else type(error).__name__


def _list(names: List[str]) -> str:
    return ", ".join("'%s'" % name for name in dict.fromkeys(names))


def _objects(value: Any) -> Iterator[Dict[str, Any]]:
    """Every serialized object in a configuration."""
    if isinstance(value, dict):
        if "class_name" in value:
            yield value
        for key, item in value.items():
            if key != "compile_config":  # of the training, which nobody goes on with
                yield from _objects(item)
    elif isinstance(value, list):
        for item in value:
            yield from _objects(item)
