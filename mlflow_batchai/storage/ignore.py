"""Which project files ``.gitignore`` and ``.batchaiignore`` leave out, by git's own rules (gitignore(5)).

Not by a library: those match a path through the folders that it lies in, and so differ from git where ignore files are nested.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from mlflow_batchai.errors import ProjectError

# The later one has the last word.
NAMES = (".gitignore", ".batchaiignore")
CLASSES = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": r" \t",
    "digit": "0-9",
    "lower": "a-z",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\s",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}


class Rule(NamedTuple):
    """One line of an ignore file.

    Attributes:
        regex: of the whole path from the file's folder, or of the name alone.
        whole: which of the two.
        folders_only: whether it speaks of folders only.
        leaves_out: False for a line that takes back.
    """

    regex: re.Pattern[str]
    whole: bool
    folders_only: bool
    leaves_out: bool


class IgnoreRules:
    """The rules that hold in one folder of a project: its own, and those of the folders above it up to the project's.

    Raises:
        ProjectError: an ignore file can't be read.
    """

    def __init__(self, folder: Path, above: IgnoreRules | None = None, name: str = "") -> None:
        self._above = above
        self._name = name
        self._rules = [(rule, file) for file, line in _lines(folder) if (rule := parse(line)) is not None]
        self._rules.reverse()

    def leave_out(self, name: str, is_directory: bool) -> str:
        """The kind of ignore file that excludes a name in this folder; empty: the name belongs to the project.

        Of a folder that is none nothing is.
        """
        path, place = name, self
        while True:
            # The nearest file that speaks of a path decides, and in it the last line that does.
            for rule, file in place._rules:
                if (is_directory or not rule.folders_only) and rule.regex.fullmatch(path if rule.whole else name):
                    return file if rule.leaves_out else ""
            if place._above is None:
                return ""
            path, place = f"{place._name}/{path}", place._above


def _lines(folder: Path) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for name in NAMES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
        except OSError as error:
            raise ProjectError(f"'{path}' can't be read: {error.strerror}") from error
        lines += [(name, line.removesuffix("\r")) for line in text.split("\n")]
    return lines


def parse(line: str) -> Rule | None:
    """The rule that a line is; None for an empty one, a comment, and one that git passes over, such as a lone "!"."""
    if line.startswith("#"):
        return None
    # Spaces at the end count only after a backslash.
    while line.endswith(" ") and not re.search(r"(?<!\\)(\\\\)*\\ $", line):
        line = line[:-1]
    leaves_out = not line.startswith("!")
    line = line.removeprefix("!") if not leaves_out else line
    folders_only = line.endswith("/")
    line = line.removesuffix("/")
    whole = "/" in line
    text = _translate(line.removeprefix("/"))
    if not text:
        return None
    try:
        return Rule(re.compile(text, re.DOTALL), whole, folders_only, leaves_out)
    except re.error:  # a range that ends before it begins
        return None


def _translate(pattern: str) -> str | None:
    """A regular expression of the same paths; None if the pattern has none."""
    parts: list[str] = []
    at = 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "*":
            end = at + len(pattern[at:]) - len(pattern[at:].lstrip("*"))
            alone = (at == 0 or pattern[at - 1] == "/") and (end == len(pattern) or pattern[end] == "/")
            if end - at < 2 or not alone:
                parts.append("[^/]*")
            elif end == len(pattern):
                parts.append(".+")
            else:
                parts.append("(?:.*/)?")
                end += 1
            at = end
        elif letter == "?":
            parts.append("[^/]")
            at += 1
        elif letter == "[":
            found = _translate_class(pattern, at + 1)
            if found is None:
                return None
            parts.append(found[0])
            at = found[1]
        else:
            at += letter == "\\"
            if at == len(pattern):
                return None
            parts.append(re.escape(pattern[at]))
            at += 1
    return "".join(parts)


def _translate_class(pattern: str, at: int) -> tuple[str, int] | None:
    """(regular expression of a class of letters, where it ends); None if it doesn't."""
    negated = pattern[at : at + 1] in ("!", "^")
    at += negated
    parts: list[str] = []
    while at < len(pattern):
        if pattern[at] == "]" and parts:
            return (f"[^/{''.join(parts)}]" if negated else f"(?!/)[{''.join(parts)}]"), at + 1
        named = re.compile(r"\[:(\w+):\]").match(pattern, at)
        if named:
            if named[1] not in CLASSES:
                return None
            parts.append(CLASSES[named[1]])
            at = named.end()
        elif pattern[at] == "-" and parts and pattern[at + 1 : at + 2] not in ("]", ""):
            parts.append("-")
            at += 1
        else:
            at += pattern[at] == "\\"
            parts.append(re.escape(pattern[at : at + 1]))
            at += 1
    return None
