"""The sets of parameters of a sweep: all combinations of lists of values, or some."""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Mapping, Sequence

from mlflow_batchai.errors import UsageError
from mlflow_batchai.terminal import printable

MOST, MOST_TO_DRAW_FROM = 1000, 1_000_000

Combination = dict[str, str]


def parse_values(options: Sequence[str]) -> dict[str, list[str]]:
    """Read options ``name=value,value``: parameter -> values. The values are one line of CSV.

    Raises:
        UsageError: an option has no name or no ``=``, a parameter is given twice, or quotes are wrong.
    """
    found: dict[str, list[str]] = {}
    for option in options:
        name, equals, text = option.partition("=")
        shown = printable(name)
        if not (name and equals):
            raise UsageError(f"-P {printable(option)}: should be NAME=VALUE or NAME=VALUE,VALUE")
        if name in found:
            raise UsageError(f"-P {shown} is given twice; write its values in one list: -P {shown}=1,2")
        try:
            rows = list(csv.reader([text], strict=True, skipinitialspace=True))
        except csv.Error as error:
            hint = f"a value with a comma or a quote is written as in CSV: -P '{shown}=\"a,b\",c'"
            raise UsageError(f"-P {shown}={printable(text)}: {error}; {hint}") from None
        # No text is one value, the empty one.
        found[name] = rows[0] if rows and rows[0] else [""]
    return found


def combine(values: Mapping[str, Sequence[str]], sample: int | None = None, seed: int = 0) -> tuple[list[Combination], int]:
    """Combine all values with each other; the last parameter's values change first.

    Args:
        sample: draw so many combinations, without repetition; the same ``seed`` draws the same ones.

    Returns:
        The distinct combinations, compared as text (``0.1`` and ``1e-1`` differ), and how many repeated ones were left out.

    Raises:
        UsageError: there are too many combinations, or fewer than the sample.
    """
    total = math.prod(map(len, values.values()))
    if total > (MOST if sample is None else MOST_TO_DRAW_FROM):
        product = " x ".join(f"{len(texts)} of {printable(name)}" for name, texts in values.items())
        hint = "give fewer values, or --random N" if sample is None else "give fewer values"
        raise UsageError(f"{product} make {total} combinations, and a sweep has {MOST} at most; {hint}")
    if sample is not None and sample > min(total, MOST):
        most = f"there are {total} combinations" if total < MOST else f"a sweep has {MOST} jobs at most"
        raise UsageError(f"--random {sample}: {most}")
    numbers = range(total) if sample is None else sorted(random.Random(seed).sample(range(total), sample))
    every = list(itertools.product(*values.values()))
    chosen = [every[number] for number in numbers]
    return [dict(zip(values, texts, strict=True)) for texts in dict.fromkeys(chosen)], len(chosen) - len(set(chosen))


def varying(combinations: Sequence[Combination]) -> list[str]:
    """Names of the parameters whose value is not the same in all combinations."""
    names = dict.fromkeys(name for combination in combinations for name in combination)
    return [name for name in names if len({combination.get(name) for combination in combinations}) > 1]


def shown(combination: Mapping[str, str]) -> str:
    """A combination in one line, for messages."""
    return ", ".join(printable(f"{name}={text}") for name, text in combination.items())
