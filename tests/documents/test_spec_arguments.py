"""A line of arguments as parameters that MLflow takes."""

from __future__ import annotations

import pytest

from mlflow_batchai.documents.command import LONGEST_NAME, LONGEST_VALUE, parameters


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
