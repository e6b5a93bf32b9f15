"""The sets of parameters of a sweep: from lists and ranges of values, from a file, or both."""

from __future__ import annotations

import csv
import io
import math
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow_batchai.documents.reading import kind, load_list, read_text
from mlflow_batchai.errors import DocumentError, UsageError
from mlflow_batchai.terminal import printable

MOST = 1000

Combination = dict[str, str]
Values = Mapping[str, Sequence[str]]

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(?P<low>{_NUMBER})\.\.(?P<high>{_NUMBER})(?::(?P<how>log|{_NUMBER}))?")


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both of them too: whole ones if both are, each ``step`` or (None) any."""

    text: str
    low: float
    high: float
    step: float | None
    is_log: bool
    is_whole: bool

    @classmethod
    def of(cls, name: str, texts: Sequence[str]) -> Range | None:
        """The range that a parameter's values are: one text such as ``1e-5..1e-2:log``, ``16..128:16`` or ``0..0.5``.

        Raises:
            UsageError: it has no numbers.
        """
        match = _RANGE.fullmatch(texts[0]) if len(texts) == 1 else None
        if match is None:
            return None
        given, is_log = match.groupdict(), match["how"] == "log"
        low, high = float(given["low"]), float(given["high"])
        is_whole = all(text is None or text == "log" or text.lstrip("+-").isdigit() for text in given.values())
        step = 1.0 if is_whole and not is_log else None
        if given["how"] not in (None, "log"):
            step = float(given["how"])
        if (
            not (low < high and math.isfinite(high - low))
            or (is_log and low <= 0)
            or (step is not None and not 0 < step <= high - low)
        ):
            hint = "LOW..HIGH, LOW..HIGH:STEP or, above zero, LOW..HIGH:log, such as 1e-5..1e-2:log or 16..128:16"
            raise UsageError(
                f"-P {printable(name)}={texts[0]}: there is nothing between these numbers; write a range as {hint}"
            )
        if step is not None:
            high = float(f"{low + math.floor((high - low) / step + 1e-9) * step:.12g}")
        return cls(texts[0], low, high, step, is_log, is_whole)

    @property
    def count(self) -> int:
        """How many numbers it has. Raises UsageError: it has no steps."""
        if self.step is None:
            raise UsageError(
                f"{self.text} has no steps, so a grid can't have all of its numbers: LOW..HIGH:STEP, or --sampler random or tpe"
            )
        return round((self.high - self.low) / self.step) + 1

    def written(self, value: float) -> str:
        """A number of it as a parameter's value."""
        return str(round(value)) if self.is_whole else f"{value:.{12 if self.step else 6}g}"

    def texts(self, most: int) -> list[str]:
        """Its first numbers."""
        return [self.written(self.low + number * (self.step or 0)) for number in range(min(self.count, most))]

    def draw(self, chance: random.Random) -> str:
        """One of its numbers, by chance."""
        if self.step is not None:
            return self.written(self.low + chance.randrange(self.count) * self.step)
        if self.is_log:
            return self.written(math.exp(chance.uniform(math.log(self.low), math.log(self.high))))
        return self.written(chance.uniform(self.low, self.high))


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


def space(values: Values) -> dict[str, list[str]]:
    """The parameters that have more than one value."""
    return {name: list(texts) for name, texts in values.items() if len(set(texts)) > 1 or Range.of(name, texts)}


def examples(values: Values) -> list[Combination]:
    """Combinations in which each value of a list and both ends of each range occur."""
    ranges = {name: Range.of(name, texts) for name, texts in values.items()}
    lists = {name: [r.written(r.low), r.written(r.high)] if (r := ranges[name]) else texts for name, texts in values.items()}
    count = max(map(len, lists.values()), default=1)
    return [{name: texts[number % len(texts)] for name, texts in lists.items()} for number in range(count)]


def combine(
    values: Values, rows: Sequence[Combination] = (), sample: int | None = None, seed: int = 0
) -> tuple[list[Combination], int]:
    """Combine all values with each other and with each row; the last parameter's values change first.

    Args:
        values: of a parameter; a range counts as the list of its numbers.
        sample: draw so many combinations, of lists without repetition; the same ``seed`` draws the same ones.

    Returns:
        The distinct combinations, compared as text (``0.1`` and ``1e-1`` differ), and how many repeated ones were left out.

    Raises:
        UsageError: a parameter is in both, there are too many combinations, or fewer than the sample.
    """
    for name in values:
        if any(name in row for row in rows):
            raise UsageError(f"parameter '{printable(name)}' is given by -P and by the file; drop one")
    ranges = {name: found for name, texts in values.items() if (found := Range.of(name, texts))}
    if sample is None:
        values = {name: ranges[name].texts(MOST + 1) if name in ranges else texts for name, texts in values.items()}
    elif ranges:
        values = {name: texts for name, texts in values.items() if name not in ranges}
    lists = [list(rows) or [{}], *([{name: text} for text in texts] for name, texts in values.items())]
    total = math.prod(map(len, lists))
    if total > (MOST if sample is None else sys.maxsize):
        counts = [f"{len(rows)} rows"] if rows else []
        product = " x ".join([*counts, *(f"{len(texts)} of {printable(name)}" for name, texts in values.items())])
        hint = "give fewer values, or --sampler random --trials N" if sample is None else "give fewer values"
        raise UsageError(f"{product} make {total} combinations, and a sweep has {MOST} at most; {hint}")
    if sample is not None and (sample > MOST or (sample > total and not ranges)):
        most = f"there are {total} combinations" if total < MOST and not ranges else f"a sweep has {MOST} jobs at most"
        raise UsageError(f"--trials {sample}: {most}")
    chance = random.Random(seed)
    if sample is None:
        combinations = [_combination(lists, number) for number in range(total)]
    elif ranges:
        drawn = ({name: found.draw(chance) for name, found in ranges.items()} for _ in range(sample))
        combinations = [{**_combination(lists, chance.randrange(total)), **each} for each in drawn]
    else:
        combinations = [_combination(lists, number) for number in sorted(chance.sample(range(total), sample))]
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
