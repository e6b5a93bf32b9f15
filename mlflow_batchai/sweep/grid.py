"""Which sets of parameters a sweep has: from lists of values, from a file, or from both. Pure, but for reading the file."""

from __future__ import annotations

import csv
import io
import itertools
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow_batchai.documents.reading import kind, load_list
from mlflow_batchai.errors import DocumentError, UsageError
from mlflow_batchai.terminal import printable

MOST = 1000

Combination = dict[str, str]


def parse_values(options: Sequence[str]) -> dict[str, list[str]]:
    """Parameter -> its values, of options ``name=value,value``; a value that has a comma, or begins with a blank, stands in
    double quotes, as in CSV.

    Raises:
        UsageError: an option has no name or no ``=``, a parameter stands twice, or quotes are wrong.
    """
    found: dict[str, list[str]] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not (name and equals):
            raise UsageError(f"-P {printable(option)}: should be NAME=VALUE or NAME=VALUE,VALUE")
        if name in found:
            raise UsageError(f"-P {printable(name)} is given twice; write its values in one list: -P {printable(name)}=1,2")
        found[name] = _values(name, text)
    return found


def _values(name: str, text: str) -> list[str]:
    try:
        rows = list(csv.reader([text], strict=True, skipinitialspace=True))
    except csv.Error as error:
        raise UsageError(
            f"-P {printable(name)}={printable(text)}: {error}; a value with a comma or a quote is written as in CSV:"
            f" -P '{printable(name)}=\"a,b\",c'"
        ) from None
    # Nothing at all is one value, the empty one.
    return rows[0] if rows and rows[0] else [""]


def combine(
    values: Mapping[str, Sequence[str]], rows: Sequence[Mapping[str, str]] = (), sample: int | None = None, seed: int = 0
) -> tuple[list[Combination], int]:
    """Every combination of the values, with each of the rows if there are any; (combinations, how many were left out since
    they stood there before).

    The last parameter's values change first. Equal texts are equal: ``0.1`` and ``1e-1`` are two values.

    Args:
        sample: take so many of them, by chance.
        seed: the same seed takes the same ones.

    Raises:
        UsageError: a parameter is in both, there are too many combinations, or fewer than the sample.
    """
    for name in values:
        if any(name in row for row in rows):
            raise UsageError(f"parameter '{printable(name)}' is given by -P and by the file; drop one")
    lists = [list(rows or [{}]), *values.values()]
    total = math.prod(map(len, lists))
    if sample is None and total > MOST:
        raise UsageError(
            f"{_counts(values, rows)} make {total} combinations, and a sweep has {MOST} at most; give fewer values, or"
            " --random N"
        )
    if sample is None:
        return _distinct(_combination(values, chosen) for chosen in itertools.product(*lists))
    if not 0 < sample <= min(total, MOST):
        most = f"there are {total} combinations" if total < MOST else f"a sweep has {MOST} jobs at most"
        raise UsageError(f"--random {sample}: {most}")
    if total > sys.maxsize:
        raise UsageError(f"{_counts(values, rows)} make more combinations than can be counted; give fewer values")
    chosen = sorted(random.Random(seed).sample(range(total), sample))
    return _distinct(_combination(values, _pick(lists, number)) for number in chosen)


def _counts(values: Mapping[str, Sequence[str]], rows: Sequence[Mapping[str, str]]) -> str:
    parts = [f"{len(rows)} rows"] if rows else []
    return " x ".join([*parts, *(f"{len(found)} of {printable(name)}" for name, found in values.items())])


def _pick(lists: Sequence[Sequence[Any]], number: int) -> list[Any]:
    """One of all combinations, by its number."""
    picked = []
    for entries in reversed(lists):
        number, index = divmod(number, len(entries))
        picked.append(entries[index])
    return picked[::-1]


def _combination(values: Mapping[str, Sequence[str]], chosen: Sequence[Any]) -> Combination:
    row, *texts = chosen
    return {**row, **dict(zip(values, texts, strict=True))}


def _distinct(found: Iterator[Combination]) -> tuple[list[Combination], int]:
    kept: dict[frozenset[tuple[str, str]], Combination] = {}
    count = 0
    for combination in found:
        count += 1
        kept.setdefault(frozenset(combination.items()), combination)
    return list(kept.values()), count - len(kept)


def read_rows(path: Path) -> list[Combination]:
    """The sets of parameters of a file: CSV with a header line, or a YAML or JSON list of mappings.

    An empty cell of CSV and a null are not given: the parameter has its default then. Blanks before a cell don't count, and
    neither do blank lines.

    Raises:
        DocumentError: it can't be read, or is none of these.
    """
    ending = path.suffix.lower()
    if ending not in (".csv", ".yaml", ".yml", ".json"):
        raise DocumentError(f"{path}: --from takes a .csv, .yaml or .json file")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise DocumentError(f"{path}: can't be read: {error.strerror}") from error
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
        rows.append({str(name): _text(value) for name, value in entry.items() if value is not None})
    return rows


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def varying(combinations: Sequence[Mapping[str, str]]) -> list[str]:
    """Parameters whose value is not the same everywhere, in the order in which they were written."""
    names = dict.fromkeys(name for combination in combinations for name in combination)
    return [name for name in names if len({combination.get(name) for combination in combinations}) > 1]


def shown(combination: Mapping[str, str], names: Sequence[str] | None = None) -> str:
    """A combination in one line.

    Args:
        names: the parameters that are shown; None: all.
    """
    wanted = combination if names is None else [name for name in names if name in combination]
    return ", ".join(printable(f"{name}={combination[name]}") for name in wanted)
