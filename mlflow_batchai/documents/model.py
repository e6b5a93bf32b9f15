"""The base of all document models, and `parse`: plain data to a model, or one sentence for each fault."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from mlflow_batchai.documents.fields import WRONG, unfit, wrong
from mlflow_batchai.documents.reading import kind
from mlflow_batchai.errors import DocumentError
from mlflow_batchai.terminal import Notice, printable

_API = "2018-05-01"
_MOST_FAULTS = 10
_MOST_MEANT = 3
_LONGEST = 1000
_COMMENTS = frozenset({"comment", "$comment", "$schema"})
# pydantic's error types, and what we say of them.
_RULES = {
    "missing": "is missing",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
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


class SpecModel(BaseModel):
    """A frozen mapping with Batch AI's camelCase keys; unknown keys are refused, null means absent.

    Python code constructs it with snake_case names; documents are read by `parse`, which accepts only the
    camelCase ones. ``meaningless`` names the keys that published files carry here without effect; ``older`` maps keys
    of other versions to today's; ``alternatives`` names the fields of which exactly one must be given.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        hide_input_in_errors=True,
    )
    meaningless: ClassVar[frozenset[str]] = frozenset()
    older: ClassVar[Mapping[str, str]] = {}
    alternatives: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        known = {*cls.model_fields, *keys_of(cls)}
        return {key: value for key, value in data.items() if value is not None or key not in known}

    @model_validator(mode="after")
    def _one_alternative(self) -> SpecModel:
        if self.alternatives:
            exactly_one(self, *self.alternatives)
        return self


M = TypeVar("M", bound=SpecModel)
Path = tuple[int | str, ...]


def key_of(model: type[SpecModel], name: str) -> str:
    """The document key of the field ``name`` (``node_count`` -> ``nodeCount``)."""
    return model.model_fields[name].alias or name


def keys_of(model: type[SpecModel]) -> dict[str, str]:
    """Document key -> field name, in declaration order."""
    return {key_of(model, name): name for name in model.model_fields}


def exactly_one(model: SpecModel, *names: str) -> None:
    """Raise unless exactly one of the fields is given; the message names their document keys."""
    given = [name for name in names if getattr(model, name) is not None]
    if len(given) != 1:
        keys = " or ".join(key_of(type(model), name) for name in names)
        raise wrong(f"must have either {keys}" + (", not both" if given else ""))


def secret_values(document: object) -> Iterator[str]:
    """Every secret's text in a document: of ``secrets``, credentials, passwords and keys alike."""
    if isinstance(document, SecretStr):
        yield document.get_secret_value()
    elif isinstance(document, BaseModel):
        for name in type(document).model_fields:
            yield from secret_values(getattr(document, name))
    elif isinstance(document, (tuple, list)):
        for entry in document:
            yield from secret_values(entry)


def as_shown(document: object) -> Any:
    """A document as the service showed it: plain data with all of its keys, null for secrets and for what wasn't given."""
    if isinstance(document, SpecModel):
        return {key: as_shown(getattr(document, name)) for key, name in keys_of(type(document)).items()}
    if isinstance(document, (tuple, list)):
        return [as_shown(entry) for entry in document]
    if isinstance(document, SecretStr):
        return None
    return document.value if isinstance(document, Enum) else document


MASK = "**********"
"""What stands for a secret in what ``masked`` returns: pydantic's own."""


def masked(document: SpecModel) -> dict[str, Any]:
    """The document as plain JSON data with Batch AI's keys: what was given, with asterisks for secrets.

    Secrets are secrets[].value, accountKey, the registry's password, adminUserPassword and
    instrumentationKey. What stands in a command line or an environment variable is not known to be secret,
    and stays. The copy parses again with the same model.
    """
    return document.model_dump(mode="json", by_alias=True, exclude_unset=True)


def parse(model: type[M], data: object, source: str, under: Mapping[str, str] | None = None) -> tuple[M, list[str]]:
    """``data`` as a ``model``, and a warning for each key that never had a meaning, or has another name today.

    ``source`` names the file in every message; ``under`` maps a top-level key to the path it stood under, if
    it was moved. Raises DocumentError with one line for each fault, at most ten. No message repeats the value
    of a secret.
    """
    under = under or {}
    refuse_unfit(data, source, under)
    document, faults = _validated(model, data)
    unknown = [fault["loc"] for fault in faults if fault["type"] == "extra_forbidden"]
    renamed = {path: name for path in unknown if (name := _model_at(model, path[:-1]).older.get(str(path[-1])))}
    warnings: list[str] = []
    for path, name in renamed.items():
        warnings.append(f"{source}: {_shown(path, under)} is read as {name}, as API {_API} calls it")
        data = _renamed(data, path, name)
    if renamed:
        document, faults = _validated(model, data)
    ignored = [fault["loc"] for fault in faults if fault["type"] == "extra_forbidden" and _is_ignored(model, fault["loc"])]
    for path in ignored:
        if path != ("$schema",):
            warnings.append(f"{source}: {_shown(path, under)} has no effect and is ignored")
        elif isinstance(data, Mapping) and _API not in str(data["$schema"]):
            warnings.append(f"{source}: $schema names another version; the document is read as {_API}")
        data = _without(data, path)
    if ignored:
        document, faults = _validated(model, data)
    if document is None:
        raise DocumentError(_report(model, faults, source, under))
    return document, list(map(Notice, warnings))


def refuse_unfit(data: object, source: str, under: Mapping[str, str] | None = None) -> None:
    """Raise DocumentError for texts in plain data that no program can be given, wherever they stand; their keys are named."""
    faults = [f"{source}: {printable(_shown(path, under or {}))} {why}" for path, why in _unfit_texts(data, (), set())]
    if faults:
        raise DocumentError("\n".join(map(_short, faults[:_MOST_FAULTS])))


def _unfit_texts(data: object, path: Path, seen: set[int]) -> Iterator[tuple[Path, str]]:
    if isinstance(data, str):
        if why := unfit(data):
            yield path, why
    elif isinstance(data, (Mapping, list, tuple)) and id(data) not in seen:
        seen.add(id(data))  # one that contains itself, or the same a billion times
        for key, value in data.items() if isinstance(data, Mapping) else enumerate(data):
            below = (*path, key if isinstance(key, int) else str(key)[:100])
            if isinstance(key, str) and (why := unfit(key)):
                yield below, why
            yield from _unfit_texts(value, below, seen)


def _validated(model: type[M], data: object) -> tuple[M | None, list[ErrorDetails]]:
    """The document, or its faults: pydantic's error itself holds the input, secrets included, and must not travel."""
    try:
        return model.model_validate(data, by_alias=True, by_name=False), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _is_ignored(model: type[SpecModel], path: Path) -> bool:
    return path[-1] in _COMMENTS or path[-1] in _model_at(model, path[:-1]).meaningless


def _without(data: Any, path: Path) -> Any:
    """A copy of plain data without the key at ``path``."""
    return _renamed(data, path, None)


def _renamed(data: Any, path: Path, name: str | None) -> Any:
    """A copy of plain data with another key at ``path``, or without it; a key of that name that is there wins."""
    first, *rest = path
    if not rest:
        found = {key: value for key, value in data.items() if key != first}
        return {name: data[first], **found} if name else found
    copied: Any = dict(data) if isinstance(data, Mapping) else list(data)
    copied[first] = _renamed(copied[first], tuple(rest), name)
    return copied


def _inner(model: type[SpecModel], key: str) -> tuple[type[SpecModel] | None, type | None]:
    """The model inside a key's type ``X``, ``X | None``, ``tuple[X, ...]`` or ``dict[str, X]``, and ``tuple`` or ``dict``."""
    annotation = model.model_fields[keys_of(model)[key]].annotation
    holder = get_origin(annotation) if get_origin(annotation) in (tuple, dict) else None
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, SpecModel):
            return candidate, holder
    return None, holder


def _model_at(model: type[SpecModel], path: Path) -> type[SpecModel]:
    """The model of the mapping at ``path``, which must lead to one."""
    steps = iter(path)
    for step in steps:
        if isinstance(step, str):
            inner, holder = _inner(model, step)
            model = inner or model
            if holder is dict:
                next(steps)  # a name that the user has chosen
    return model


def _report(model: type[SpecModel], faults: list[ErrorDetails], source: str, under: Mapping[str, str]) -> str:
    meant: set[Path] = set()
    lines: list[str] = []
    # Unknown keys first: one of them may be a key that is missing.
    for fault in sorted(faults, key=lambda fault: fault["type"] != "extra_forbidden"):
        path, name = fault["loc"], fault["type"]
        if name == "extra_forbidden":
            sentence, near = _unknown(model, path, under)
            meant.update([near] if near else [])
            lines.append(sentence)
        elif name == "invalid_key":
            lines.append(f"{_shown((*path[:-1], str(path[-1])), under)} {_sentence(fault)}")
        elif name != "default_factory_not_called" and not (name == "missing" and path in meant):
            lines.append(f"{_shown(path, under)} {_sentence(fault)}".lstrip())
    shown = [f"{source}: {_short(printable(line))}" for line in lines[:_MOST_FAULTS]]
    if len(lines) > _MOST_FAULTS:
        shown.append(f"{source}: and {len(lines) - _MOST_FAULTS} more")
    return "\n".join(shown)


def _short(line: str) -> str:
    """A line without most of a script, say, that stands in place of a name."""
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def _unknown(model: type[SpecModel], path: Path, under: Mapping[str, str]) -> tuple[str, Path | None]:
    """The sentence for an unknown key, and the path of the key that was probably meant."""
    *parent, key = path
    owner = _model_at(model, tuple(parent))
    folded = {name.casefold(): name for name in keys_of(owner)}
    wanted = (to_camel(str(key)) if "_" in str(key) else str(key)).casefold()
    start = f"{_shown(path, under)} is not a known key"
    # A key that stands too high up is one of a block below: nodeCount beside ``properties``.
    below = _paths_to(wanted, owner)
    if below and wanted not in folded:
        meant = [(*parent, *inner) for inner in sorted(below, key=len)[:_MOST_MEANT]]
        shown = " or ".join(_shown(one, under) for one in meant)
        return f"{start}; did you mean {shown}?", meant[0] if len(meant) == 1 else None
    close = difflib.get_close_matches(wanted, folded, n=1, cutoff=0.65)
    if close:
        return f"{start}; did you mean {folded[close[0]]}?", (*parent, folded[close[0]])
    return f"{start}; known keys: {', '.join(keys_of(owner))}", None


def _paths_to(wanted: str, model: type[SpecModel]) -> list[Path]:
    """Where a key of that name stands in the blocks of a model; in those of lists and of names the path would need an index."""
    found: list[Path] = []
    for key in keys_of(model):
        inner, holder = _inner(model, key)
        if inner and not holder:
            found += [(key, one) for one in keys_of(inner) if one.casefold() == wanted]
            found += [(key, *path) for path in _paths_to(wanted, inner)]
    return found


def _sentence(fault: ErrorDetails) -> str:
    """Describe an error, to follow the path; repeat the value only if one of a few words was expected."""
    name, value, context = fault["type"], fault["input"], fault.get("ctx", {})
    if name == WRONG:
        return fault["msg"]
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
