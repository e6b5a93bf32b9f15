"""A translated command, run by a real bash: every value arrives in argv exactly, wherever its placeholder stands; and a line of
arguments as parameters that MLflow takes.

Where no text may stand: tests/security/test_placeholders.py.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlflow_batchai.documents.command import LONGEST_NAME, LONGEST_VALUE, parameters, translate, variable_names
from mlflow_batchai.errors import ProjectError

HOSTILE = [
    '$(touch pwned); "x"',
    "`touch pwned`",
    "it's; touch pwned",
    "'; touch pwned; '",
    'a "quoted" \\ back\\\\slash \\',
    "two\nlines\n",
    "  spaced   out  ",
    "*",
    "?? [a-z]* ~ {a,b}",
    "",
    "-n",
    "--flag=1",
    "# no comment",
    "$HOME ${PATH} $$ !!",
    "%s %d\t\x01\x7f",
    "héllo 世界 \u2028",
    "\udcff",
    "() { :; }; touch pwned",
]


@pytest.fixture(scope="session")
def show(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that appends its arguments, NUL after each and an empty record's mark after all, to $SHOWN."""
    path = tmp_path_factory.mktemp("bin") / "show"
    path.write_text('#!/bin/bash\nprintf "%s\\0" "$#" "$@" >> "$SHOWN"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def run(show: Path, folder: Path, template: str, **values: str) -> list[list[str]]:
    """The argument lists of every ``show`` that the translated template ran."""
    variables = variable_names(values)
    line = translate(template, variables, "MLproject")
    shown = folder / "shown"
    environment = {variables[name]: value for name, value in values.items()}
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env={**environment, "PATH": f"{show.parent}:{os.environ['PATH']}", "SHOWN": str(shown), "LC_ALL": "C.UTF-8"},
        capture_output=True,
        timeout=20,
    )
    assert done.returncode == 0 and not done.stderr, (line, done.stderr)
    assert not (folder / "pwned").exists(), line
    fields = os.fsdecode(shown.read_bytes()).split("\0")[:-1]
    shown.unlink()
    calls = []
    while fields:
        count = int(fields.pop(0))
        calls.append(fields[:count])
        fields = fields[count:]
    return calls


# template -> the arguments, where V is the value of {x} and W that of {y}
PLACES = {
    "show {x}": ["V"],
    "show --note {x} --end": ["--note", "V", "--end"],
    'show "{x}"': ["V"],
    "show '{x}'": ["V"],
    "show {x}{y}": ["VW"],
    'show "{x}"{y}': ["VW"],
    "show '{x}{y}'": ["VW"],
    "show pre--{x}--post": ["pre--V--post"],
    'show "pre {x} post"': ["pre V post"],
    "show 'it''s {x} \\ post'": ["its V \\ post"],
    "show \"it's\" 'a\\{x}' '${x}'": ["it's", "a\\V", "$V"],
    "show --x={x}": ["--x=V"],
    "show a b # a comment, don't mind \"it\nshow {x}": ["V"],
    "show {x} # and {y}, don't": ["V"],
    "show a#b'{x}'": ["a#bV"],
    "show {x}#'{y}'": ["V#W"],
    "show \\ #'{x}'": [" #V"],
    "show {{{x},b}}": ["V", "b"],
    "show {{}} {{{{ {x}": ["{}", "{{", "V"],
    "show \\$'a' {x}": ["$a", "V"],
    'show "costs \\${x}"': ["costs $V"],
    "show \\\n  {x} \\\n  {y}": ["V", "W"],
    "true && show {x} || false": ["V"],
    "show $$'' {x} > /dev/null; show {x}": ["V"],
}


@pytest.mark.parametrize("template", PLACES)
def test_every_value_arrives_at_every_place(template: str, show: Path, tmp_path: Path) -> None:
    arguments = PLACES[template]
    for x, y in [(HOSTILE[0], HOSTILE[3]), (HOSTILE[4], HOSTILE[5]), (HOSTILE[7], HOSTILE[2]), ("", HOSTILE[10])]:
        expected = [text.replace("W", "\0").replace("V", x).replace("\0", y) for text in arguments]
        assert run(show, tmp_path, template, x=x, y=y)[-1] == expected


@pytest.mark.parametrize("value", HOSTILE)
def test_every_hostile_value_arrives(value: str, show: Path, tmp_path: Path) -> None:
    template = "show {x} \"{x}\" '{x}' a{x}{y}b # {x}"
    assert run(show, tmp_path, template, x=value, y="") == [[value, value, value, f"a{value}b"]]


@pytest.mark.parametrize(("value", "written"), [("7", "7"), ("-1", "-1"), ("007", "007"), (" 1_0 ", "10"), ("\u0667", "7")])
def test_a_whole_number_is_written_out_wherever_it_stands(value: str, written: str) -> None:
    line = translate("show $(( {x} + 1 )) '{x}' $'{x}' `echo {x}` <<< {x}", variable_names(["x"]), "MLproject", {"x": value})
    assert line == f"show $(( {written} + 1 )) '{written}' $'{written}' `echo {written}` <<< {written}"


@pytest.mark.parametrize(
    ("template", "printed"),
    [
        ('echo {x}>log; echo `echo {x}>>log`; echo "$(echo {x}>>log)"; cat log', "\n\n5\n5\n5\n"),
        ("echo $N{x} \"$N{x} b\" '$N{x}' \\$N{x} # $N{x}", "15 15 b $N5 $N5\n"),
        ('echo $(( {x}>3 )) "$(( $N{x} + 1 ))" $1{x} {x}{x}>&1', "1 16 5 55\n"),
        ("echo {{{x}..7}} x{x} \"{x}>3\" '{x}>3'; (( {x}<6 )) && echo yes", "5 6 7 x5 5>3 5>3\nyes\n"),
    ],
)
def test_a_whole_number_belongs_to_nothing_beside_it(template: str, printed: str, tmp_path: Path) -> None:
    """Neither to a variable's name before it, nor as a file descriptor to a redirection behind it."""
    line = translate(template, variable_names(["x"]), "MLproject", {"x": "5"})
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env={**os.environ, "N": "1"}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (printed, ""), line


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_any_text_arrives(show: Path, tmp_path: Path, value: str) -> None:
    assert run(show, tmp_path, "show {x} \"{x}\" '{x}' a-{x}-b", x=value) == [[value, value, value, f"a-{value}-b"]]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("show {nope}", "{nope}, which is no parameter ({x}, {y})"),
        ("show {}", "{}, which is no parameter"),
        ("show {x!r}", "{x}"),
        ("show {x:>10}", "{x}"),
        ("show {x", "write {{ and }} for braces of the shell"),
        ("show x}", "write {{ and }} for braces of the shell"),
        ("awk '{ print $1 }' f", "write {{ and }} for braces of the shell"),
        ("cat << END\n{x}\nEND", "in a line that is more than plain commands, from '<< END' on"),
        ("show \\{x}", "after a backslash"),
        ('show "\\{x}"', "after a backslash"),
        ("show ${x}", "after a $; write it without the $"),
        ('show "${x}"', "after a $"),
        ('show "it\'s ${x}"', "after a $"),
        ("show $'\\{x}'", "after a backslash"),
        ('show "`echo {x}`"', "in a line that is more than plain commands"),
    ],
)
def test_refused(template: str, words: str) -> None:
    with pytest.raises(ProjectError) as error:
        translate(template, variable_names(["x", "y"]), "MLproject: main")
    assert words in str(error.value)
    assert str(error.value).startswith("MLproject: main: command")


def test_names_of_variables_are_distinct() -> None:
    names = variable_names(["a-b", "a_b", "a.b", "a b", "a_b_2", "é", "9"])
    assert len(set(names.values())) == 7
    assert all(name.isascii() and name.replace("_", "a").isalnum() for name in names.values())
    assert names["a-b"] == "BATCHAI_PARAM_a_b"


def test_a_value_of_the_longest_size_that_is_allowed(show: Path, tmp_path: Path) -> None:
    value = "é\n'" * 20000
    assert run(show, tmp_path, "show {x}", x=value) == [[value]]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("  \n ", {}),
        ("--epochs 5 --lr=0.1 -x 3 --quiet", {"epochs": "5", "lr": "0.1", "x": "3", "quiet": "true"}),
        ("--quiet --epochs 5", {"quiet": "true", "epochs": "5"}),
        ("train --x -3 val", {"arg1": "train", "x": "-3", "arg2": "val"}),
        ("--shift -.5 -1 --", {"shift": "-.5", "arg1": "-1"}),
        ("a -- --y z", {"arg1": "a", "arg2": "--y", "arg3": "z"}),
        ("-", {"arg1": "-"}),
        ("--d=$AZ_BATCHAI_INPUT_D/x --e '$HOME b'", {"d": "$AZ_BATCHAI_INPUT_D/x", "e": "$HOME b"}),
        ("--d 1 --d 2 --v --v", {"d": "1, 2", "v": "true, true"}),
        ("--empty '' \"\"", {"empty": "", "arg1": ""}),
        ("""--note "it's" --say 'a "b"'"c d" """, {"note": "it's", "say": 'a "b"c d'}),
        (r"--path a\ b --re \$x", {"path": "a b", "re": "$x"}),
        ("--data *.npz ~/x", {"data": "*.npz", "arg1": "~/x"}),
        ("--host $(hostname -f) --when `date` 1", {"host": "$(hostname -f)", "when": "`date`", "arg1": "1"}),
        # What belongs to the shell is no argument.
        ("--a 1 > out.txt --b 2", {"a": "1"}),
        ("--a 1 2>&1 | tee x", {"a": "1"}),
        ("--a 1; rm -rf x", {"a": "1"}),
        ("--a 1 && echo b", {"a": "1"}),
        ("--a 1 # not --b", {"a": "1"}),
        ("--a '1;2' --b \\> 3", {"a": "1;2", "b": ">", "arg1": "3"}),
        ("--a 1 \\\n --b 2", {"a": "1", "b": "2"}),
        ("--a 1\necho", {"a": "1"}),
        # What can't be taken apart is kept whole.
        ("--a 'x", {"commandLineArgs": "--a 'x"}),
        ("--a $(x", {"commandLineArgs": "--a $(x"}),
        ("--a $(x $(y)) ", {"commandLineArgs": "--a $(x $(y))"}),
    ],
)
def test_parameters(text: str, found: dict[str, str]) -> None:
    assert parameters(text) == found


def test_names_and_values_are_such_as_mlflow_takes() -> None:
    from mlflow.utils.validation import _validate_param

    text = f"--a/../b 1 --é 2 --c@d 3 --.. 4 --/ 5 --x//y 6 --a.b 7 --{'n' * 300} 8 --long {'v' * 9000} --a=b=c '--sp ace' 9"
    found = parameters(text)
    assert found["é"] == "2" and found["c_d"] == "3" and found["a.b"] == "7" and found["a"] == "b=c" and found["sp ace"] == "9"
    assert found["n" * LONGEST_NAME] == "8" and len(found["long"]) == LONGEST_VALUE
    for name, value in found.items():
        _validate_param(name, value)
