"""Which sets of parameters a sweep has, and what is refused."""

from __future__ import annotations

import pytest

from mlflow_batchai.errors import UsageError
from mlflow_batchai.sweep.parameters import MOST, combine, parse_values, shown, varying

NUMBERS = [str(number) for number in range(1000)]


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("a=1e-4,3e-4", ["1e-4", "3e-4"]),
        ("a=1", ["1"]),
        ("a=", [""]),
        ("a=1,", ["1", ""]),
        ('a="x,y",z', ["x,y", "z"]),
        ('a="say ""hi""",x', ['say "hi"', "x"]),
        ('a=say "hi"', ['say "hi"']),
        ("a=b=c,d", ["b=c", "d"]),
        ('a=1, 2, "x,y"," z"', ["1", "2", "x,y", " z"]),
        ("a=$(id); é", ["$(id); é"]),
    ],
)
def test_values_of_an_option(option: str, values: list[str]) -> None:
    assert parse_values([option]) == {"a": values}


@pytest.mark.parametrize("options", [["a"], ["=1"], ["a=1", "a=2"], ['a="x,y'], ['a="x"y']], ids=str)
def test_an_option_that_is_refused(options: list[str]) -> None:
    with pytest.raises(UsageError, match=f"-P {options[0][0]}"):
        parse_values(options)


def test_combinations() -> None:
    found, repeated = combine(parse_values(["a=1,2", "b=x", "c=3,4,3"]))
    assert [list(each.values()) for each in found] == [["1", "x", "3"], ["1", "x", "4"], ["2", "x", "3"], ["2", "x", "4"]]
    assert repeated == 2 and varying(found) == ["a", "c"] and shown(found[1]) == "a=1, b=x, c=4"


def test_a_sample() -> None:
    many = dict.fromkeys("abcd", NUMBERS)
    found, repeated = combine(many, sample=5, seed=3)
    assert len(found) == 5 and repeated == 0
    assert combine(many, sample=5, seed=3)[0] == found != combine(many, sample=5, seed=4)[0]
    few = {"a": ["1", "2"], "b": ["3", "4"]}
    assert combine(few, sample=4)[0] == combine(few)[0], "in the order of the grid"


@pytest.mark.parametrize(
    ("values", "sample", "words"),
    [
        ({"a": NUMBERS[:100], "b": NUMBERS[:11]}, None, "100 of a x 11 of b make 1100 combinations"),
        (dict.fromkeys("abcdefghijk", NUMBERS), 1, "give fewer values"),
        ({"a": ["1", "2"]}, 3, "--trials 3: there are 2 combinations"),
        (dict.fromkeys("ab", NUMBERS), 1001, "--trials 1001: a sweep has 1000 jobs at most"),
    ],
)
def test_combinations_that_are_refused(values, sample, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        combine(values, sample)
    assert len(combine({"a": NUMBERS})[0]) == MOST
