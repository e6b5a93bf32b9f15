"""Which sets of parameters a sweep has, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlflow_batchai.errors import DocumentError, UsageError
from mlflow_batchai.sweep.parameters import MOST, combine, parse_values, read_rows, shown, varying

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
    rows = [{"a": "1", "b": "2"}, {"a": "3"}]
    found, _ = combine({"e": ["5", "6"]}, rows)
    assert found == [{**row, "e": value} for row in rows for value in ("5", "6")] and varying(found) == ["a", "b", "e"]


def test_a_sample() -> None:
    many = dict.fromkeys("abcd", NUMBERS)
    found, repeated = combine(many, sample=5, seed=3)
    assert len(found) == 5 and repeated == 0
    assert combine(many, sample=5, seed=3)[0] == found != combine(many, sample=5, seed=4)[0]
    few = {"a": ["1", "2"], "b": ["3", "4"]}
    assert combine(few, sample=4)[0] == combine(few)[0], "in the order of the grid"


@pytest.mark.parametrize(
    ("values", "rows", "sample", "words"),
    [
        ({"a": NUMBERS[:100], "b": NUMBERS[:11]}, [], None, "100 of a x 11 of b make 1100 combinations"),
        ({}, [{"a": value} for value in [*NUMBERS, "x"]], None, "1001 rows make 1001 combinations"),
        (dict.fromkeys("abcdefghijk", NUMBERS), [], 1, "give fewer values"),
        ({"a": ["1", "2"]}, [], 3, "--trials 3: there are 2 combinations"),
        (dict.fromkeys("ab", NUMBERS), [], 1001, "--trials 1001: a sweep has 1000 jobs at most"),
        ({"b": ["1"]}, [{"a": "1"}, {"b": "1"}], None, "parameter 'b' is given by -P and by the file"),
    ],
)
def test_combinations_that_are_refused(values, rows, sample, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        combine(values, rows, sample)
    assert len(combine({"a": NUMBERS})[0]) == MOST


LR_AND_NOTE = [{"lr": "0.1", "note": "x,y"}, {"lr": "0.2"}]


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("a.csv", 'lr, note\n0.1,"x,y"\n\n0.2,\n', LR_AND_NOTE),
        ("a.csv", '\ufefflr,note\n0.1,"x,y"\n0.2,', LR_AND_NOTE),
        ("a.json", '[{"lr": 0.1, "note": "x,y"}, {"lr": 0.2, "note": null}]', LR_AND_NOTE),
        ("a.yaml", "- {lr: 0.1, note: 'x,y'}\n- lr: 0.2\n", LR_AND_NOTE),
        ("a.yaml", "- {a: 1.10, b: true, c: no, d: 007}\n", [{"a": "1.10", "b": "true", "c": "no", "d": "007"}]),
        ("a.csv", 'a\r\n" x"\r\n"two\nlines"\r\n\u2028\r\n', [{"a": " x"}, {"a": "two\nlines"}, {"a": "\u2028"}]),
        ("a.csv", "a\n1\n  \n\n2\n \n", [{"a": "1"}, {"a": "2"}]),
        ("a.csv", " \n\r\na\n1\n2", [{"a": "1"}, {"a": "2"}]),
    ],
)
def test_a_file(tmp_path: Path, name: str, text: str, rows: list[dict[str, str]]) -> None:
    (tmp_path / name).write_bytes(text.encode())
    assert read_rows(tmp_path / name) == rows


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "x", "--from takes"),
        ("nope/a.csv", None, "can't be read"),
        ("a.csv", "", "no set of parameters"),
        ("a.csv", "a,b\n", "no set of parameters"),
        ("a.csv", "a,a\n1,2\n", "line 1"),
        ("a.csv", "a,\n1,2\n", "line 1"),
        ("a.csv", "a,b\n1\n", "line 2"),
        ("a.csv", 'a\n"1\n', "not valid CSV"),
        ("a.json", "{}", "must hold a list"),
        ("a.json", "[1", "not valid JSON"),
        ("a.json", "[1]", "entry 1"),
        ("a.yaml", "- a: [1]\n", "entry 1: 'a'"),
        ("a.yaml", "- {a: 1, a: 2}\n", "'a' is given twice"),
        ("a.yaml", "\xff", "not UTF-8 text"),
    ],
)
def test_a_file_that_is_refused(tmp_path: Path, name: str, text: str | None, words: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DocumentError) as error:
        read_rows(path)
    assert str(path) in str(error.value) and words in str(error.value)
