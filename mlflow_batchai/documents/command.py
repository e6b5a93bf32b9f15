"""An entry point's command, with its parameters as shell variables: values never become shell text.

MLflow puts shell-quoted values into the command, which fails where the project's author has quoted the placeholder himself
(``--note "{note}"``). Here ``{note}`` becomes a reference to a variable, quoted as the place where it stands needs it.
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterable, Mapping

from mlflow_batchai.documents.plain_line import NotPlainError, check
from mlflow_batchai.errors import ProjectError

PREFIX = "BATCHAI_PARAM_"


def variable_names(parameters: Iterable[str]) -> dict[str, str]:
    """Parameter -> variable, distinct even where two names differ only in characters that no variable may have."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for parameter in parameters:
        name = base = PREFIX + re.sub(r"[^A-Za-z0-9_]", "_", parameter)
        number = 2
        while name in taken:
            name, number = f"{base}_{number}", number + 1
        taken.add(name)
        names[parameter] = name
    return names


def translate(template: str, variables: Mapping[str, str], source: str, numbers: Collection[str] = ()) -> str:
    """The shell line of a command template.

    Args:
        template: the MLproject's command: ``{name}`` placeholders, ``{{`` and ``}}`` for braces.
        variables: parameter -> variable.
        source: names the entry point in messages.
        numbers: parameters that were checked to be numbers, and so may stand in arithmetic.

    Raises:
        ProjectError: a placeholder without a parameter, one where no value can be put, or braces that don't match.
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ProjectError(f"{source}: command: {error}; write {{{{ and }}}} for braces of the shell") from error
    quoting = _Quoting()
    parts: list[str] = []
    texts: dict[str, str] = {}
    for text, name, format_spec, conversion in pieces:
        parts.append(text)
        quoting.feed(text)
        if name is None:
            continue
        if format_spec or conversion or name not in variables:
            known = ", ".join(f"{{{known}}}" for known in variables) or "none"
            raise ProjectError(
                f"{source}: command has the placeholder {{{name}}}, which is no parameter ({known});"
                " write {{ and }} for braces of the shell"
            )
        if quoting.here_document:
            raise ProjectError(
                f"{source}: command has the placeholder {{{name}}} in a here-document; use ${variables[name]} there"
            )
        if fault := quoting.fault():
            raise ProjectError(f"{source}: command has the placeholder {{{name}}} {fault}")
        parts.append(quoting.reference(variables[name]))
        if name not in numbers:
            texts[variables[name]] = name
    line = "".join(parts)
    try:
        check(line, list(texts))
    except NotPlainError as error:
        raise ProjectError(
            f"{source}: command has the placeholder {{{texts[error.variable]}}} {error.place}; declare the parameter as int,"
            f" or have the program read the environment variable {error.variable}"
        ) from None
    return line


class _Quoting:
    """Follows a shell line to know how a place is quoted: a stack, since ``"$(..."...")"`` nests."""

    def __init__(self) -> None:
        self._stack = ["plain"]
        self._escaped = False
        self._previous = ""
        self._angles = 0
        self._escape_in_backquotes = False
        self.here_document = False

    def feed(self, text: str) -> None:
        for character in text:
            special = not self._escaped
            self._one(character)
            # An escaped character, and the second of "$$", begins nothing: it stands there as a letter would.
            pair = character == "$" == self._previous
            self._previous = character if special and not pair else "x"

    def _one(self, character: str) -> None:
        state = self._stack[-1]
        if self._escaped:
            self._escaped = False
            return
        if state == "single":
            if character == "'":
                self._stack.pop()
            return
        if state == "comment":
            if character == "\n" or (character == "`" and "backquote" in self._stack):
                self._stack.pop()
            if character == "\n" or self._stack[-1] == "comment":
                return
            state = self._stack[-1]
        if character == "\\":
            self._escaped = True
            self._escape_in_backquotes |= "backquote" in self._stack
        elif state == "ansi":
            if character == "'":
                self._stack.pop()
        elif character == "(" and self._previous == "$":
            self._stack.append("plain")
        elif character == "`":
            if "backquote" in self._stack:
                while self._stack.pop() != "backquote":
                    pass
                self._escape_in_backquotes = False
            else:
                self._stack.append("backquote")
        elif character == '"':
            if state == "double":
                self._stack.pop()
            else:
                self._stack.append("double")
        elif state == "double":
            return
        elif character == "'":
            self._stack.append("ansi" if self._previous == "$" else "single")
        elif character == "(":
            self._stack.append("arithmetic" if self._previous == "(" or state == "arithmetic" else "plain")
        elif character == ")" and state in ("plain", "arithmetic") and len(self._stack) > 1:
            self._stack.pop()
        elif character == "#" and (not self._previous or self._previous in " \t\n;&|(`"):
            self._stack.append("comment")
        elif character == "<":
            self._angles = self._angles + 1 if self._previous == "<" else 1
            if self._angles == 2:
                self.here_document = True
            elif self._angles == 3:  # <<< is a here-string: one word, quoted like any other
                self.here_document = False

    def fault(self) -> str | None:
        """Why no value can be put at this place, or None."""
        if self._escaped:
            return "after a backslash; drop the backslash"
        if self._previous == "$" and self._stack[-1] not in ("single", "ansi", "comment"):
            return "after a $; write it without the $"
        if self._escape_in_backquotes:
            return "in backquotes that hold a backslash; write $(...) instead"
        return None

    def reference(self, variable: str) -> str:
        """The text that gives the variable's value as one word, or part of one, at this place."""
        self._previous = "x"
        state = self._stack[-1]
        if state == "double":
            return f"${{{variable}}}"
        if state in ("single", "ansi"):
            opening = "$'" if state == "ansi" else "'"
            return f'\'"${{{variable}}}"{opening}'
        return f'"${{{variable}}}"'
