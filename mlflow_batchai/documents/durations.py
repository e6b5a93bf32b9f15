"""Batch AI's durations: ISO 8601 as on the wire, d.hh:mm:ss as in its schema, and what `az` printed."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from mlflow_batchai.documents.base import wrong

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


def parse_duration(text: str) -> timedelta:
    """``P7D``, ``PT1H30M``, ``7.00:00:00``, ``02:00:00`` or ``7 days, 0:00:00``: always more than zero.

    Years and months are refused, having no fixed length. Raises ValueError, whose message continues a
    sentence that starts with the duration's name.
    """
    found = _ISO.fullmatch(text.strip()) or _CLOCK.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"is {text!r}, which is not a duration; {_FORMS}")
    try:
        length = timedelta(**{unit: float(number) for unit, number in found.groupdict().items() if number})
    except OverflowError:
        raise ValueError(f"is {text!r}, which is too long for a duration") from None
    if not length:
        raise ValueError(f"is {text!r}, but must be longer than zero")
    return length


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


def _read(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value
    if not isinstance(value, str):
        raise wrong(f"must be a duration; {_FORMS}")
    try:
        return parse_duration(value)
    except ValueError as error:
        raise wrong(str(error)) from None


Duration = Annotated[timedelta, BeforeValidator(_read), PlainSerializer(format_duration, return_type=str, when_used="json")]


def _read_seconds(value: Any) -> Any:
    """A plain number is seconds."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not 0 < value < timedelta.max.total_seconds():
            raise wrong(f"is {value}, but must be more than zero seconds, and no more than a duration can be")
        return timedelta(seconds=value)
    return _read(value)


Seconds = Annotated[
    timedelta, BeforeValidator(_read_seconds), PlainSerializer(format_duration, return_type=str, when_used="json")
]
