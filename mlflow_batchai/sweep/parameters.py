"""The sets of parameters of a sweep: from lists of values, from a file, or both."""

from __future__ import annotations

import csv
import io
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow_batchai.documents.reading import kind, load_list, read_text
from mlflow_batchai.errors import DocumentError, UsageError
from mlflow_batchai.terminal import printable

MOST = 1000

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


def combine(
    values: Mapping[str, Sequence[str]], rows: Sequence[Combination] = (), sample: int | None = None, seed: int = 0
) -> tuple[list[Combination], int]:
    """Combine all values with each other and with each row; the last parameter's values change first.

    Args:
        sample: draw so many combinations, without repetition; the same ``seed`` draws the same ones.

    Returns:
        The distinct combinations, compared as text (``0.1`` and ``1e-1`` differ), and how many repeated ones were left out.

    Raises:
        UsageError: a parameter is in both, there are too many combinations, or fewer than the sample.
    """
    for name in values:
        if any(name in row for row in rows):
            raise UsageError(f"parameter '{printable(name)}' is given by -P and by the file; drop one")
    lists = [list(rows) or [{}], *([{name: text} for text in texts] for name, texts in values.items())]
    total = math.prod(map(len, lists))
    if total > (MOST if sample is None else sys.maxsize):
        counts = [f"{len(rows)} rows"] if rows else []
        product = " x ".join([*counts, *(f"{len(texts)} of {printable(name)}" for name, texts in values.items())])
        hint = "give fewer values, or --random N" if sample is None else "give fewer values"
        raise UsageError(f"{product} make {total} combinations, and a sweep has {MOST} at most; {hint}")
    if sample is not None and sample > min(total, MOST):
        most = f"there are {total} combinations" if total < MOST else f"a sweep has {MOST} jobs at most"
        raise UsageError(f"--random {sample}: {most}")
    numbers = range(total) if sample is None else sorted(random.Random(seed).sample(range(total), sample))
    combinations = [_combination(lists, number) for number in numbers]
    distinct = {frozenset(combination.items()): combination for combination in combinations}
    return list(distinct.values()), len(combinations) - len(distinct)


def _combination(lists: Sequence[Sequence[Combination]], number: int) -> Combination:
    """The combination of a number: its digits are places in the lists."""
    parts = []
    for entries in reversed(lists):
        number, index = divmod(number, len(entries))
        parts.append(entries[index])
    return {name: text for part in reversed(parts) for name, text in part.items()}


def read_rows(path: Path) -> list[Combination]:
    """Read sets of parameters from CSV with a header line, or from a YAML or JSON list of mappings.

    An empty CSV cell and a null mean the parameter's default. Blank lines and blanks before a cell are ignored.

    Raises:
        DocumentError: the file can't be read, or is none of these.
    """
    ending = path.suffix.lower()
    if ending not in (".csv", ".yaml", ".yml", ".json"):
        raise DocumentError(f"{path}: --from takes a .csv, .yaml or .json file")
    text = read_text(path)
    rows = _csv(text, path) if ending == ".csv" else _mappings(load_list(text, str(path)), path)
    if not rows:
        raise DocumentError(f"{path}: there is no set of parameters in it")
    return rows


def _csv(text: str, path: Path) -> list[Combination]:
    lines = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    written = (cells for cells in lines if cells not in ([], [""]))
    rows: list[Combination] = []
    try:
        header = [name.strip() for name in next(written, [])]
        if "" in header or len(set(header)) < len(header):
            raise DocumentError(f"{path}, line {lines.line_num}: should name each parameter once: learning_rate,batch_size")
        for cells in written:
            if len(cells) != len(header):
                raise DocumentError(f"{path}, line {lines.line_num}: has {len(cells)} cells, and the header {len(header)}")
            rows.append({name: cell for name, cell in zip(header, cells, strict=True) if cell})
    except csv.Error as error:
        raise DocumentError(f"{path}, line {lines.line_num}: not valid CSV: {error}") from None
    return rows


def _mappings(data: Sequence[Any], path: Path) -> list[Combination]:
    rows: list[Combination] = []
    for number, entry in enumerate(data, 1):
        if not isinstance(entry, Mapping):
            raise DocumentError(f"{path}, entry {number}: should map parameters to values, and is {kind(entry)}")
        for name, value in entry.items():
            if isinstance(value, Mapping | list):
                raise DocumentError(f"{path}, entry {number}: '{printable(str(name))}' should be a value, and is {kind(value)}")
        given = {str(name): value for name, value in entry.items() if value is not None}
        rows.append({name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()})
    return rows


def varying(combinations: Sequence[Combination]) -> list[str]:
    """Names of the parameters whose value is not the same in all combinations."""
    names = dict.fromkeys(name for combination in combinations for name in combination)
    return [name for name in names if len({combination.get(name) for combination in combinations}) > 1]


def shown(combination: Mapping[str, str]) -> str:
    """A combination in one line, for messages."""
    return ", ".join(printable(f"{name}={text}") for name, text in combination.items())
