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
    refuse_unfit(data, source, under)
    keys = _Keys(under or {})
    document, faults = _validated(model, keys.known(model, data))
    lines = keys.faults + [line for fault in faults if (line := keys.line(fault))]
    if document is None or lines:
        shown = [f"{source}: {_short(printable(line))}" for line in lines[:_MOST_FAULTS]]
        if len(lines) > _MOST_FAULTS:
            shown.append(f"{source}: and {len(lines) - _MOST_FAULTS} more")
        raise DocumentError("\n".join(shown))
    return document, [Notice(f"{source}: {warning}") for warning in keys.warnings]


class _Keys:
    """Looks at the keys of a document, before pydantic looks at the values of those that are known.

    Attributes:
        warnings: on keys that have no meaning, or another name today.
        faults: on unknown keys.
    """

    def __init__(self, under: Mapping[str, str]) -> None:
        self._under = under
        # Keys that were probably meant by unknown ones: it isn't said that they are missing.
        self._meant: set[Path] = set()
        # Mappings that have unknown keys: of them as a whole nothing more is said.
        self._strange: set[Path] = set()
        self.warnings: list[str] = []
        self.faults: list[str] = []

    def known(self, model: type[SpecModel], data: Any, path: Path = ()) -> Any:
        """A copy of plain data with the known keys only, by the names that they have today."""
        if not isinstance(data, Mapping):
            return data
        found = {}
        for key, value in data.items():
            here = (*path, key)
            name = model.older.get(key, key)
            if name != key:
                self.warnings.append(f"{self._shown(here)} is read as {name}, as API {_API} calls it")
            if name in keys_of(model):
                if name == key or name not in data:
                    found[name] = self._inside(model, name, value, (*path, name))
            elif here == ("$schema",):
                if _API not in str(value):
                    self.warnings.append(f"$schema names another version; the document is read as {_API}")
            elif key in _COMMENTS or key in model.meaningless:
                self.warnings.append(f"{self._shown(here)} has no effect and is ignored")
            elif isinstance(key, str):
                self._unknown(model, here)
            else:
                found[key] = value  # no text: pydantic says so
        return found

    def _inside(self, model: type[SpecModel], key: str, value: Any, path: Path) -> Any:
        inner, holder = _inner(model, key)
        if inner and holder is tuple and isinstance(value, (list, tuple)):
            return [self.known(inner, entry, (*path, index)) for index, entry in enumerate(value)]
        if inner and holder is dict and isinstance(value, Mapping):
            return {name: self.known(inner, entry, (*path, name)) for name, entry in value.items()}
        return self.known(inner, value, path) if inner and not holder else value

    def _unknown(self, model: type[SpecModel], path: Path) -> None:
        key = str(path[-1])
        self._strange.add(path[:-1])
        folded = {name.casefold(): name for name in keys_of(model)}
        wanted = (to_camel(key) if "_" in key else key).casefold()
        # A key that stands too high up is one of a block below: nodeCount beside ``properties``.
        if meant := [] if wanted in folded else sorted(_paths_to(wanted, model), key=len)[:_MOST_MEANT]:
            shown = " or ".join(self._shown((*path[:-1], *one)) for one in meant)
        else:
            meant = [(folded[name],) for name in difflib.get_close_matches(wanted, folded, n=1, cutoff=0.65)]
            shown = str(meant[0][0]) if meant else ""
        if len(meant) == 1:
            self._meant.add((*path[:-1], *meant[0]))
        hint = f"did you mean {shown}?" if shown else f"known keys: {', '.join(keys_of(model))}"
        self.faults.append(f"{self._shown(path)} is not a known key; {hint}")

    def line(self, fault: ErrorDetails) -> str:
        """What there is to say of an error of pydantic's; empty: nothing."""
        path, name = fault["loc"], fault["type"]
        if name == "default_factory_not_called" or path in {"missing": self._meant, WRONG: self._strange}.get(name, ()):
            return ""
        if name == "invalid_key":
            path = (*path[:-1], str(path[-1]))
        return f"{self._shown(path)} {_sentence(fault)}".lstrip()

    def _shown(self, path: Path) -> str:
        return _shown(path, self._under)


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


def _inner(model: type[SpecModel], key: str) -> tuple[type[SpecModel] | None, type | None]:
    """The model inside a key's type ``X``, ``X | None``, ``tuple[X, ...]`` or ``dict[str, X]``, and ``tuple`` or ``dict``."""
    annotation = model.model_fields[keys_of(model)[key]].annotation
    holder = get_origin(annotation) if get_origin(annotation) in (tuple, dict) else None
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, SpecModel):
            return candidate, holder
    return None, holder


def _short(line: str) -> str:
    """A line without most of a script, say, that stands in place of a name."""
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


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
