"""Types of document keys (counts, names, paths, secrets, durations), each with its error sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, PlainSerializer, SecretStr
from pydantic_core import PydanticCustomError, core_schema

WRONG = "batchai"
"""The pydantic error type whose message is written by us and fit to show as it stands."""
LONGEST_TEXT = 131071
"""Bytes of the longest single argument or variable that Linux gives a new process (MAX_ARG_STRLEN)."""
LONGEST_TIME = timedelta(days=3650)
# As Batch AI's clusters had.
MOST_NODES = 100
MOST_PROCESSES = 10_000


def wrong(message: str) -> PydanticCustomError:
    """An error for a validator to raise; ``message`` continues a sentence that starts with the key's path."""
    return PydanticCustomError(WRONG, "{message}", {"message": message})


class AnyCase:
    """Annotation of a Literal or an Enum: its words are read in any case and kept in their own spelling."""

    @classmethod
    def __get_pydantic_core_schema__(cls, words: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        allowed = get_args(words) or [word.value for word in words]
        spelling = {word.casefold(): word for word in allowed}

        def spelled(value: Any) -> Any:
            # Other values are left for the type to judge.
            return spelling.get(value.casefold(), value) if isinstance(value, str) else value

        return core_schema.no_info_before_validator_function(spelled, handler(words))


def matching(pattern: str, rule: str) -> AfterValidator:
    """Text that matches ``pattern`` from end to end; ``rule`` completes "is 'x', but must ..."."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise wrong(f"is {value!r}, but must {rule}")
        return value

    return AfterValidator(check)


def refuse_repeats(values: Iterable[str], what: str) -> None:
    """Raise if a value stands twice; ``what`` says what the values are."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise wrong(f"gives the {what} {value!r} twice")
        seen.add(value)


def distinct(what: str, key: Callable[[Any], str] = str) -> AfterValidator:
    """A tuple whose entries differ by ``key``; ``what`` names it in the refusal."""

    def check(entries: tuple[Any, ...]) -> tuple[Any, ...]:
        refuse_repeats(map(key, entries), what)
        return entries

    return AfterValidator(check)


def unfit(text: str) -> str | None:
    """Why no program can be given a text, to follow its name and without the text itself, or None."""
    if "\0" in text:
        return "holds a NUL byte, which no program can be given"
    try:
        # Bytes of a command line that are no UTF-8 can be given; half a letter of JSON can't.
        length = len(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return "holds half a letter, and is no text that a program can be given"
    if length > LONGEST_TEXT:
        return f"is {length} bytes long, and no program can be given more than {LONGEST_TEXT}: put it in a file"
    return None


def _not_blank(value: str) -> str:
    if not value.strip():
        raise wrong("must not be empty")
    return value


def fits_a_path(value: str) -> str:
    """Validator of a path, or a part of one, that no file system would take for its length."""
    if len(value.encode(errors="replace")) > 4000 or any(len(part.encode(errors="replace")) > 255 for part in value.split("/")):
        raise wrong("is longer than a path can be (255 bytes for each name in it, 4000 in all)")
    return value


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise wrong("must be a whole number, not true or false")
    return value


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _inside(value: str) -> str:
    if value.startswith("/") or ".." in value.split("/") or not value.strip("/. "):
        raise wrong(f"is {value!r}, but must be a relative path that stays below its root")
    return value


Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
Whole = Annotated[int, BeforeValidator(_no_bool), Field(ge=0)]
NodeCount = Annotated[Count, Field(le=MOST_NODES)]
Processes = Annotated[Count, Field(le=MOST_PROCESSES)]
NonEmpty = Annotated[str, AfterValidator(_not_blank)]
PathText = Annotated[NonEmpty, AfterValidator(fits_a_path)]
Text = Annotated[str, Field(coerce_numbers_to_str=True)]
"""Text in which a bare number is accepted, such as the value of an environment variable."""
SecretText = Annotated[SecretStr, BeforeValidator(_number_as_text)]
Name = Annotated[str, matching(r"[-\w]{1,64}", "have 1 to 64 letters, digits, '-' or '_'")]
RelativePath = Annotated[str, AfterValidator(_inside), AfterValidator(fits_a_path)]
Endpoint = Annotated[str, matching(r"https?://\S+", "be an address such as https://ACCOUNT.blob.core.windows.net")]

# Batch AI's durations: ISO 8601 as on the wire, d.hh:mm:ss as in its schema, and what `az` printed.
_ISO = re.compile(
    r"P(?=.)(?:(?P<weeks>\d+)W)?(?:(?P<days>\d+)D)?"
    r"(?:T(?=.)(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?(?:(?P<seconds>\d+(?:\.\d{1,9})?)S)?)?",
    re.IGNORECASE,
)
_CLOCK = re.compile(
    r"(?:(?P<days>\d+)(?:\.| days?, ))?"
    r"(?P<hours>\d{1,2}):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d(?:\.\d{1,9})?)"
)
_FORMS = "write it as ISO 8601 ('PT2H', 'P7D') or as 'd.hh:mm:ss' ('0.02:00:00'), in quotes"


def parse_duration(value: Any) -> timedelta:
    """``P7D``, ``PT1H30M``, ``7.00:00:00``, ``02:00:00`` or ``7 days, 0:00:00``: always more than zero.

    Years and months are refused, having no fixed length. Raises a ValueError whose message continues a
    sentence that starts with the duration's name.
    """
    if isinstance(value, timedelta):
        return value
    if not isinstance(value, str):
        raise wrong(f"must be a duration; {_FORMS}")
    found = _ISO.fullmatch(value.strip()) or _CLOCK.fullmatch(value.strip())
    if found is None:
        raise wrong(f"is {value!r}, which is not a duration; {_FORMS}")
    try:
        length = timedelta(**{unit: float(number) for unit, number in found.groupdict().items() if number})
    except OverflowError:
        length = timedelta.max
    if length > LONGEST_TIME:
        raise wrong(f"is {value!r}, which is too long for a duration ({LONGEST_TIME.days} days at most)")
    if not length:
        raise wrong(f"is {value!r}, but must be longer than zero")
    return length


def _seconds_or_duration(value: Any) -> timedelta:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not 0 < value <= LONGEST_TIME.total_seconds():
            raise wrong(f"is {value}, but must be more than zero seconds, and {LONGEST_TIME.days} days at most")
        return timedelta(seconds=value)
    return parse_duration(value)


def format_duration(length: timedelta) -> str:
    """ISO 8601 in days, hours, minutes and seconds: ``P1DT1H``, ``PT0.5S``."""
    minutes, seconds = divmod(length.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f"{length.microseconds / 1_000_000:.6f}".rstrip("0").lstrip("0") if length.microseconds else ""
    date = f"{length.days}D" if length.days else ""
    time = "".join(f"{number}{unit}" for number, unit in ((hours, "H"), (minutes, "M")) if number)
    if seconds or fraction or not (date or time):
        time += f"{seconds}{fraction}S"
    return f"P{date}" + (f"T{time}" if time else "")


_AsIso = PlainSerializer(format_duration, return_type=str, when_used="json")
Duration = Annotated[timedelta, BeforeValidator(parse_duration), _AsIso]
Seconds = Annotated[timedelta, BeforeValidator(_seconds_or_duration), _AsIso]
"""A duration that may also be a plain number of seconds."""


def lasting(least: timedelta = timedelta(0), most: timedelta = timedelta.max) -> AfterValidator:
    """A duration within these bounds."""

    def check(value: timedelta) -> timedelta:
        if value < least:
            raise wrong(f"must be {format_duration(least)} at least")
        if value > most:
            raise wrong(f"must be {format_duration(most)} at most")
        return value

    return AfterValidator(check)
