"""From plain data to a model: keys without a meaning are dropped with a warning, faults become sentences."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from mlflow_batchai.documents.base import WRONG, SpecModel, keys_of
from mlflow_batchai.documents.text import kind
from mlflow_batchai.errors import DocumentError
from mlflow_batchai.terminal import printable

M = TypeVar("M", bound=SpecModel)
Path = tuple[int | str, ...]

_API = "2018-05-01"
_MOST = 10
_MOST_MEANT = 3
_LONGEST = 1000
_COMMENTS = frozenset({"comment", "$comment", "$schema"})
_RULES = {
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must not be empty",
    "too_long": "has too many entries",
    "invalid_key": "is a key that is not text; put it in quotes",
    "recursion_loop": "contains itself",
}
_TYPES = {
    "int": "a whole number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "model": "a mapping",
    "dict": "a mapping",
}


def parse(model: type[M], data: object, source: str, under: Mapping[str, str] | None = None) -> tuple[M, list[str]]:
    """``data`` as a ``model``, and a warning for each key that was dropped because it never had a meaning.

    ``source`` names the file in every message; ``under`` maps a top-level key to the path it stood under, if
    it was moved. Raises DocumentError with one line for each fault, at most ten. No message repeats the value
    of a secret.
    """
    under = under or {}
    warnings: list[str] = []
    cleaned = _without_meaningless(model, data, (), warnings, under)
    faults: list[ErrorDetails] = []
    try:
        return model.model_validate(cleaned, by_alias=True, by_name=False), [f"{source}: {note}" for note in warnings]
    except ValidationError as error:
        faults = error.errors(include_url=False)
    # Raised here, not in the handler: pydantic's error holds the input and would travel as the context.
    raise DocumentError(_report(model, faults, source, under))


def _without_meaningless(
    model: type[SpecModel], data: object, path: Path, warnings: list[str], under: Mapping[str, str]
) -> object:
    if not isinstance(data, Mapping):
        return data
    fields = keys_of(model)
    result: dict[Any, Any] = {}
    for key, value in data.items():
        here = (*path, key)
        if key in fields:
            inner = _inner_model(model, fields[key])
            if inner and _is_by_name(model, fields[key]) and isinstance(value, Mapping):
                value = {own: _without_meaningless(inner, item, (*here, own), warnings, under) for own, item in value.items()}
            elif inner and isinstance(value, (list, tuple)):
                value = [_without_meaningless(inner, item, (*here, index), warnings, under) for index, item in enumerate(value)]
            elif inner:
                value = _without_meaningless(inner, value, here, warnings, under)
            result[key] = value
        elif key == "$schema" and not path:
            if _API not in str(value):
                warnings.append(f"$schema names another version; the document is read as {_API}")
        elif key in _COMMENTS or key in model.meaningless:
            warnings.append(f"{_shown(here, under)} has no effect and is ignored")
        else:
            result[key] = value
    return result


def _inner_model(model: type[SpecModel], name: str) -> type[SpecModel] | None:
    """The model inside a field's type: ``X``, ``X | None``, ``tuple[X, ...]`` or ``dict[str, X]``."""
    annotation = model.model_fields[name].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, SpecModel):
            return candidate
    return None


def _is_by_name(model: type[SpecModel], name: str) -> bool:
    """Whether a field is a mapping of names that the user chooses."""
    return get_origin(model.model_fields[name].annotation) is dict


def _model_at(model: type[SpecModel], path: Path) -> type[SpecModel] | None:
    """The model of the mapping at ``path``."""
    current: type[SpecModel] | None = model
    is_name = False
    for step in path:
        if is_name or isinstance(step, int):
            is_name = False
            continue
        if current is None or step not in keys_of(current):
            return None
        field = keys_of(current)[step]
        is_name = _is_by_name(current, field)
        current = _inner_model(current, field)
    return current


def _report(model: type[SpecModel], faults: list[ErrorDetails], source: str, under: Mapping[str, str]) -> str:
    meant: set[Path] = set()
    lines: list[str] = []
    for fault in faults:
        if fault["type"] == "extra_forbidden":
            sentence, near = _unknown(model, fault["loc"], under)
            meant.update([near] if near else [])
            lines.append(sentence)
    for fault in faults:
        if fault["type"] == "missing" and fault["loc"] in meant:
            continue
        path = (*fault["loc"][:-1], str(fault["loc"][-1])) if fault["type"] == "invalid_key" else fault["loc"]
        if fault["type"] not in ("extra_forbidden", "default_factory_not_called"):
            lines.append(f"{_shown(path, under)} {_sentence(fault)}".lstrip())
    shown = [f"{source}: {_short(printable(line))}" for line in lines[:_MOST]]
    if len(lines) > _MOST:
        shown.append(f"{source}: and {len(lines) - _MOST} more")
    return "\n".join(shown)


def _short(line: str) -> str:
    """Somebody's whole script, say, in place of a name."""
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def _unknown(model: type[SpecModel], path: Path, under: Mapping[str, str]) -> tuple[str, Path | None]:
    """The sentence for an unknown key, and the path of the key that was probably meant."""
    *parent, key = path
    owner = _model_at(model, tuple(parent))
    known = list(keys_of(owner)) if owner else []
    folded = {name.casefold(): name for name in known}
    wanted = to_camel(str(key)) if "_" in str(key) else str(key)
    start = f"{_shown(path, under)} is not a known key"
    # A key that stands too high up is one of a block below: nodeCount beside ``properties``.
    below = _paths_to(wanted.casefold(), owner) if owner else []
    if below and wanted.casefold() not in folded:
        meant = [(*parent, *inner) for inner in sorted(below, key=len)[:_MOST_MEANT]]
        shown = " or ".join(_shown(one, under) for one in meant)
        return f"{start}; did you mean {shown}?", meant[0] if len(meant) == 1 else None
    close = difflib.get_close_matches(wanted.casefold(), folded, n=1, cutoff=0.65)
    if close:
        return f"{start}; did you mean {folded[close[0]]}?", (*parent, folded[close[0]])
    return f"{start}; known keys: {', '.join(known)}", None


def _paths_to(wanted: str, model: type[SpecModel]) -> list[Path]:
    """Where a key of that name stands in the blocks of a model; in those of lists and of names the path would need an index."""
    found: list[Path] = []
    for key, name in keys_of(model).items():
        inner = _inner_model(model, name)
        if inner is None or inner is model or get_origin(model.model_fields[name].annotation) in (dict, tuple):
            continue
        found += [(key, one) for one in keys_of(inner) if one.casefold() == wanted]
        found += [(key, *path) for path in _paths_to(wanted, inner)]
    return found


def _sentence(fault: ErrorDetails) -> str:
    """What is wrong, to follow the path; repeats the value only where one of a few words was due."""
    name, value, context = fault["type"], fault["input"], fault.get("ctx", {})
    if name == WRONG:
        return fault["msg"]
    if name == "missing":
        return "is missing"
    if name in ("literal_error", "enum"):
        given = f"is {value!r}; " if isinstance(value, str) and len(value) <= 40 else "is not an allowed value; "
        return f"{given}allowed: {str(context['expected']).replace(' or ', ', ')}"
    if name in _RULES:
        return _RULES[name].format(**context)
    expected = _TYPES.get(name.split("_")[0])
    if expected is None:
        return f"is not usable: {fault['msg']}"
    if expected == "text" and isinstance(value, (bool, int, float)):
        return f"must be text, not {kind(value)}; put it in quotes"
    return f"must be {expected}" + ("" if isinstance(value, str) else f", not {kind(value)}")


def _shown(path: Path, under: Mapping[str, str]) -> str:
    """``outputDirectories[1].pathPrefix``."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
    prefix = under.get(str(path[0]), "") if path else ""
    return f"{prefix}.{text}" if prefix else text
