"""Durations in every form that Batch AI read or printed, and what is none."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_batchai.documents.fields import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("P7D", timedelta(days=7)),
        ("P2W", timedelta(weeks=2)),
        ("PT90M", timedelta(minutes=90)),
        ("P1DT1H1M1.5S", timedelta(days=1, hours=1, minutes=1, seconds=1.5)),
        (" pt30s ", timedelta(seconds=30)),
        ("7.00:00:00", timedelta(days=7)),
        ("2:00:00", timedelta(hours=2)),
        ("1.02:03:04.5", timedelta(days=1, hours=2, minutes=3, seconds=4.5)),
        ("7 days, 0:00:00", timedelta(days=7)),
        ("1 day, 2:00:00", timedelta(days=1, hours=2)),
    ],
)
def test_forms(text: str, length: timedelta) -> None:
    assert parse_duration(text) == length


NONE = ["", "P", "PT", "P1DT", "1h", "7", "7d", "P1Y", "P1M", "-PT1H", "PT1H ago", "1:2:3:4", "00:61:00", "02:00", "½", 7, True]


@pytest.mark.parametrize("value", [*NONE, "PT0S", "P0D", "00:00:00", "P9999999999D"])
def test_not_a_duration(value: object) -> None:
    with pytest.raises(ValueError, match=r"a duration; write it as ISO 8601|longer than zero|too long"):
        parse_duration(value)


@given(st.timedeltas(min_value=timedelta(microseconds=1), max_value=timedelta(days=400)))
def test_what_is_written_is_read_again(length: timedelta) -> None:
    assert parse_duration(format_duration(length)) == length


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (timedelta(hours=25, seconds=90), "P1DT1H1M30S"),
        (timedelta(seconds=0.5), "PT0.5S"),
        (timedelta(days=1, microseconds=10), "P1DT0.00001S"),
    ],
)
def test_written_as_iso(length: timedelta, text: str) -> None:
    assert format_duration(length) == text
