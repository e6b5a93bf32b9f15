"""A script's command line arguments as parameters of a run: what MLflow shows and compares, not what is run."""

from __future__ import annotations

import posixpath
import re
import shlex

# MLflow 3 (``mlflow/utils/validation.py``): what a parameter's name may hold, and how long name and value may be.
_UNFIT = re.compile(r"[^/\w.\- :]")
LONGEST_NAME, LONGEST_VALUE = 250, 6000

WHOLE = "commandLineArgs"

# Shell text: what redirects, what joins commands, and words, of which quotes, $(...) and `...` are parts.
_PIECE = re.compile(
    r"""\s+
    | (?P<end> \d*[<>] | [;&|()] )
    | (?P<word> (?: \\. | '[^']*' | "(?:\\.|[^"\\])*" | \$\([^()]*\) | `[^`]*` | \$(?!\() | [^\s\\'"`;&|()<>$] )+ )""",
    re.VERBOSE | re.DOTALL,
)
_NEGATIVE = re.compile(r"-\.?\d")


def parameters(text: str) -> dict[str, str]:
    """Parameter -> value of a line of arguments: ``--lr 0.1``, ``--lr=0.1``, ``-x 3``, flags (``true``), and others in their
    order (``arg1``, ``arg2``, ...).

    Variables stay as they are written. A name that is given several times has all values, joined. What comes behind the first
    ``;``, ``|`` or redirection is no argument. A line that can't be taken apart is one parameter, ``commandLineArgs``.
    """
    words = _words(text)
    if words is None:
        return {WHOLE: text.strip()[:LONGEST_VALUE]}
    found: dict[str, list[str]] = {}
    positional, only_positional = 0, False
    while words:
        word = words.pop(0)
        if word == "--" and not only_positional:
            only_positional = True
        elif only_positional or not word.startswith("-") or word == "-" or _NEGATIVE.match(word):
            positional += 1
            found.setdefault(f"arg{positional}", []).append(word)
        else:
            name, equals, value = word.lstrip("-").partition("=")
            if not equals:
                value = words.pop(0) if words and (not words[0].startswith("-") or _NEGATIVE.match(words[0])) else "true"
            found.setdefault(_fit(name), []).append(value)
    return {name: ", ".join(values)[:LONGEST_VALUE] for name, values in found.items()}


def _words(text: str) -> list[str] | None:
    """The words of the first command in a line of shell text, without their quotes; None if it can't be told."""
    words: list[str] = []
    position = 0
    # Lines may be continued.
    text = text.strip().replace("\\\n", " ")
    while position < len(text):
        piece = _PIECE.match(text, position)
        if piece is None:
            return None
        if piece["end"]:
            return words
        if piece["word"]:
            if piece["word"].startswith("#"):
                return words
            words.append(_unquoted(piece["word"]))
        elif "\n" in piece[0]:
            return words
        position = piece.end()
    return words


def _unquoted(word: str) -> str:
    """A word without its quotes; one with a command in it stays as it is."""
    if "$(" in word or "`" in word:
        return word
    return "".join(shlex.split(word))


def _fit(name: str) -> str:
    """A name that MLflow takes: as a path it must be one already, and lead nowhere else."""
    name = _UNFIT.sub("_", name)[:LONGEST_NAME] or "_"
    if name != posixpath.normpath(name) or name == "." or name.startswith(("/", "..")):
        name = name.replace("/", "_").strip(".") or "_"
    return name
