"""Which sets of parameters a sweep has, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlflow_batchai.errors import BatchAIError
from mlflow_batchai.sweep.grid import MOST, combine, parse_values, read_rows, shown, varying


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["a"], "-P a: should be NAME=VALUE or NAME=VALUE,VALUE"),
        (["=1"], "-P =1: should be NAME=VALUE"),
        (["a=1", "a=2"], "-P a is given twice; write its values in one list: -P a=1,2"),
        (['a="x,y'], "unexpected end of data; a value with a comma or a quote is written as in CSV: -P 'a=\"a,b\",c'"),
        (['a="x"y'], "expected after"),
    ],
)
def test_an_option_that_is_refused(options: list[str], words: str) -> None:
    with pytest.raises(BatchAIError) as error:
        parse_values(options)
    assert words in str(error.value)


def test_the_grid() -> None:
    found, repeated = combine(parse_values(["a=1,2", "b=x", "c=3,4,3"]))
    assert [list(each.values()) for each in found] == [["1", "x", "3"], ["1", "x", "4"], ["2", "x", "3"], ["2", "x", "4"]]
    assert repeated == 2 and varying(found) == ["a", "c"]
    assert shown(found[1]) == "a=1, b=x, c=4" and shown(found[1], ["c", "z"]) == "c=4"


def test_rows_of_a_file_with_values() -> None:
    rows = [{"a": "1", "b": "2"}, {"a": "3"}]
    found, _ = combine({"e": ["5", "6"]}, rows)
    assert found == [{**row, "e": value} for row in rows for value in ("5", "6")]
    assert varying(found) == ["a", "b", "e"]
    with pytest.raises(BatchAIError, match=r"parameter 'b' is given by -P and by the file; drop one"):
        combine({"b": ["1"]}, rows)


def test_too_many() -> None:
    many = {"a": [str(number) for number in range(100)], "b": [str(number) for number in range(11)]}
    with pytest.raises(BatchAIError, match=r"100 of a x 11 of b make 1100 combinations, and a sweep has 1000 at most"):
        combine(many)
    assert len(combine({"a": many["a"], "b": many["b"][:10]})[0]) == MOST


def test_a_sample() -> None:
    many = {name: [str(number) for number in range(1000)] for name in "abcd"}
    found, repeated = combine(many, sample=5, seed=3)
    assert len(found) == 5 and repeated == 0
    assert combine(many, sample=5, seed=3)[0] == found != combine(many, sample=5, seed=4)[0]
    few = {"a": ["1", "2"], "b": ["3", "4"]}
    assert combine(few, sample=4)[0] == combine(few)[0], "in the order of the grid"
    for sample, words in ((5, "--random 5: there are 4 combinations"), (0, "--random 0")):
        with pytest.raises(BatchAIError, match=words):
            combine(few, sample=sample)
    with pytest.raises(BatchAIError, match="--random 1001: a sweep has 1000 jobs at most"):
        combine(many, sample=1001)
    with pytest.raises(BatchAIError, match="more combinations than can be counted"):
        combine({str(name): [str(number) for number in range(100)] for name in range(20)}, sample=1)


FILES = {
    "a.csv": 'lr, note\n0.1,"x,y"\n\n0.2,\n',
    "bom.csv": '\ufefflr,note\n0.1,"x,y"\n0.2,',
    "a.json": '[{"lr": 0.1, "note": "x,y"}, {"lr": 0.2, "note": null}]',
    "a.yaml": "- {lr: 0.1, note: 'x,y'}\n- lr: 0.2\n",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FILES[name], encoding="utf-8")
    assert read_rows(path) == [{"lr": "0.1", "note": "x,y"}, {"lr": "0.2"}]


def test_cells_of_a_file(tmp_path: Path) -> None:
    text = 'a, b\r\n1, " x"\r\n2, "two\nlines"\r\n3,\u2028\r\n'
    (tmp_path / "a.csv").write_bytes(text.encode())
    assert read_rows(tmp_path / "a.csv") == [
        {"a": "1", "b": " x"},
        {"a": "2", "b": "two\nlines"},
        {"a": "3", "b": "\u2028"},
    ]


@pytest.mark.parametrize("text", ["a\n1\n  \n\n2\n \n", " \n\r\na\n1\n2"])
def test_blank_lines_of_a_file_are_no_sets(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    assert read_rows(tmp_path / "a.csv") == [{"a": "1"}, {"a": "2"}]


def test_a_long_file_is_drawn_from(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n" + "\n".join(map(str, range(1001))))
    rows = read_rows(tmp_path / "a.csv")
    with pytest.raises(BatchAIError, match=r"1001 rows make 1001 combinations, and a sweep has 1000 at most; .* --random N"):
        combine({}, rows)
    assert len(combine({}, rows, sample=3)[0]) == 3


def test_values_of_a_file_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("- {a: 1.10, b: true, c: no, d: 007, e: 1e-4}\n")
    assert read_rows(tmp_path / "a.yaml") == [{"a": "1.10", "b": "true", "c": "no", "d": "007", "e": "1e-4"}]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "x", "--from takes a .csv, .yaml or .json file"),
        ("a.csv", "", "there is no set of parameters in it"),
        ("a.csv", "a,b\n", "there is no set of parameters in it"),
        ("a.csv", "a,a\n1,2\n", "line 1: should name each parameter once"),
        ("a.csv", "a,\n1,2\n", "line 1: should name each parameter once"),
        ("a.csv", "a,b\n1\n", "line 2: has 1 cells, and the header 2"),
        ("a.csv", 'a\n"1\n', "not valid CSV: unexpected end of data"),
        ("a.json", "{}", "must hold a list, not a mapping"),
        ("a.json", "[1", "not valid JSON"),
        ("a.json", "[1]", "entry 1: should map parameters to values, and is a number"),
        ("a.yaml", "- a: [1]\n", "entry 1: 'a' should be a value, and is a list"),
        ("a.yaml", "- {a: 1, a: 2}\n", "the key 'a' is given twice"),
        ("a.yaml", "\xff", "not UTF-8 text"),
    ],
)
def test_a_file_that_is_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(BatchAIError) as error:
        read_rows(path)
    assert str(path) in str(error.value) and words in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(BatchAIError, match=r"nope.csv: can't be read: No such file"):
        read_rows(tmp_path / "nope.csv")
