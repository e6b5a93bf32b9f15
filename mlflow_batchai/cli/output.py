"""Print results as ``--output`` and ``--query`` say, like the ``az`` command."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import click

from mlflow_batchai.errors import UsageError
from mlflow_batchai.terminal import fit, has_colors, printable, writable

# What JSON leaves as it is, and a terminal obeys: control characters, line separators, other directions of text.
_UNFIT = re.compile(r"[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
Column = tuple[str, str | Callable[[Mapping[str, Any]], object]]
"""A table's column: its title, and what stands in it: a path of keys (``executionInfo.exitCode``), or a function of the row."""


class Result(NamedTuple):
    """A command's result that is more than data.

    Attributes:
        table: draws the table, where that is not one of the data's rows; None: it is.
        complete: False: the command fails all the same: a part could not be had or has failed, which was told.
    """

    data: Any
    table: Callable[[], str] | None = None
    complete: bool = True


def check_query(query: str) -> Callable[[Any], Any]:
    """A ``--query`` ready to use. Raises UsageError: it is no JMESPath expression."""
    import jmespath
    from jmespath.exceptions import JMESPathError, JMESPathTypeError

    try:
        search = jmespath.compile(query).search
        # Some of what is wrong with it shows only when it is used, whatever on.
        with contextlib.suppress(JMESPathTypeError):
            search(None)
    except JMESPathError as error:
        raise UsageError(f"--query '{query}' is no JMESPath expression (jmespath.org): {_first_line(error)}") from error

    def run(data: Any) -> Any:
        try:
            return search(data)
        except JMESPathError as error:
            raise UsageError(f"--query '{query}' can't be used on this result: {_first_line(error)}") from error

    return run


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["it is empty"])[0].rstrip(":")


def render(data: Any, output: str, columns: Sequence[Column] | None = None, colored: bool = False) -> str:
    """A result as text, without the last line's end; empty if there is nothing to say.

    Args:
        output: json, jsonc, yaml, table, tsv or none.
        columns: the table's; None: the keys of its rows.
        colored: whether jsonc is coloured.
    """
    if data is None or output == "none":
        return ""
    if output == "table":
        return _table(data, columns)
    if output == "tsv":
        return "\n".join(_tsv(row) for row in (data if isinstance(data, list) else [data]))
    if output == "yaml":
        import yaml

        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, default_flow_style=False)
        return str(text).removesuffix("\n...\n").rstrip("\n")
    text = json.dumps(data, indent=2, ensure_ascii=False)
    return _UNFIT.sub(lambda found: f"\\u{ord(found[0]):04x}", _highlighted(text) if output == "jsonc" and colored else text)


def emit(result: Any, output: str, query: Callable[[Any], Any] | None = None, columns: Sequence[Column] | None = None) -> None:
    """Print a command's result."""
    data, table, _ = result if isinstance(result, Result) else Result(result)
    if query is not None:
        data, columns = query(data), None
    if table is not None and output == "table" and query is None:
        text = table()
    else:
        text = render(data, output, columns, colored=has_colors(sys.stdout))
    if text:
        echo(writable(text, sys.stdout))


def echo(text: str, err: bool = False) -> None:
    """Print text that may hold others' words."""
    click.echo(fit(text, sys.stderr if err else sys.stdout), err=err)


def _highlighted(text: str) -> str:
    from io import StringIO

    from rich.console import Console
    from rich.json import JSON

    console = Console(file=StringIO(), force_terminal=True, soft_wrap=True)
    with console.capture() as captured:
        console.print(JSON(text, indent=2))
    return captured.get().rstrip("\n")


def _table(data: Any, columns: Sequence[Column] | None) -> str:
    rows = data if isinstance(data, list) else [data]
    if not rows:
        return ""
    if columns is None or not all(isinstance(row, Mapping) for row in rows):
        rows, columns = _generic(rows)
    lines = [[title for title, _ in columns], *([_cell(_value(row, what)) for _, what in columns] for row in rows)]
    from rich.cells import cell_len

    widths = [max(cell_len(line[column]) for line in lines) for column in range(len(columns))]
    lines.insert(1, ["-" * width for width in widths])
    shown = []
    for line in lines:
        cells = (cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
        shown.append("  ".join(cells).rstrip())
    return "\n".join(shown)


def _generic(rows: Sequence[Any]) -> tuple[list[Mapping[str, Any]], list[Column]]:
    """Rows and columns of a result that no table was made for: what is plain in each row, as ``az`` does."""
    named: list[Mapping[str, Any]] = []
    for row in rows:
        if isinstance(row, Mapping):
            named.append({key: value for key, value in row.items() if not isinstance(value, (Mapping, list))})
        elif isinstance(row, list):
            named.append({f"column{index + 1}": value for index, value in enumerate(row)})
        else:
            named.append({"result": row})
    keys = dict.fromkeys(key for row in named for key in row)

    def column(key: str) -> Column:
        return key[:1].upper() + key[1:], lambda row: row.get(key)

    return named, [column(key) for key in keys]


def _value(row: Mapping[str, Any], what: str | Callable[[Mapping[str, Any]], object]) -> object:
    if callable(what):
        return what(row)
    value: Any = row
    for key in what.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _cell(value: object) -> str:
    """One line, whatever stands in it."""
    return printable(_plain(value))


def _plain(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, (Mapping, list, bool)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _tsv(row: Any) -> str:
    values = row.values() if isinstance(row, Mapping) else row if isinstance(row, list) else [row]
    return "\t".join(_plain(value).replace("\t", " ").replace("\r", " ").replace("\n", " ") for value in values)
