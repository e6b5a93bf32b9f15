"""What every document model shares: camelCase keys, no unknown keys, null means absent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

WRONG = "batchai"
"""The pydantic error type whose message is written by us and fit to show as it stands."""


def wrong(message: str) -> PydanticCustomError:
    """An error for a validator to raise; ``message`` continues a sentence that starts with the key's path."""
    return PydanticCustomError(WRONG, "{message}", {"message": message})


class SpecModel(BaseModel):
    """A frozen mapping with Batch AI's camelCase keys; unknown keys are refused, null means absent.

    Python code constructs it with snake_case names; documents are read by `problems.parse`, which accepts
    only the camelCase ones. ``meaningless`` names the keys that published files carry here without effect.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        hide_input_in_errors=True,
    )
    meaningless: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        known = {*cls.model_fields, *keys_of(cls)}
        return {key: value for key, value in data.items() if value is not None or key not in known}


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


def refuse_repeats(values: Iterable[str], what: str) -> None:
    """Raise if a value stands twice; ``what`` says what the values are."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise wrong(f"gives the {what} {value!r} twice")
        seen.add(value)


def any_case(*allowed: str) -> BeforeValidator:
    """Words in any case become the spelling in ``allowed``; other values are left for the type to judge."""
    words = {word.casefold(): word for word in allowed}
    return BeforeValidator(lambda value: words.get(value.casefold(), value) if isinstance(value, str) else value)


def matching(pattern: str, rule: str) -> AfterValidator:
    """Text that matches ``pattern`` from end to end; ``rule`` completes "is 'x', but must ..."."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise wrong(f"is {value!r}, but must {rule}")
        return value

    return AfterValidator(check)


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise wrong("must be a whole number, not true or false")
    return value


def _secret_text(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


def _inside(value: str) -> str:
    if value.startswith("/") or ".." in value.split("/") or not value.strip("/. "):
        raise wrong(f"is {value!r}, but must be a relative path that stays below its root")
    return value


Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
Whole = Annotated[int, BeforeValidator(_no_bool), Field(ge=0)]
Name = Annotated[str, matching(r"[-\w]{1,64}", "have 1 to 64 letters, digits, '-' or '_'")]
RelativePath = Annotated[str, AfterValidator(_inside)]
NonEmpty = Annotated[str, Field(min_length=1)]
Text = Annotated[str, Field(coerce_numbers_to_str=True)]
"""Text in which a bare number is accepted, such as the value of an environment variable."""
SecretText = Annotated[SecretStr, BeforeValidator(_secret_text)]
