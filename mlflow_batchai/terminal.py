"""Make text of jobs, shares and servers safe for a terminal: only colours are obeyed, all else is shown."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import TextIO

# Colours and the like (ECMA-48: SGR). Beside each of them GCC and grep erase the rest of the line, which does nothing here.
_COLOUR = r"\x1b\[[0-9;:]{0,64}m"
_ERASE = r"\x1b\[[0-2]?K"
# Control characters (C0 but tab, line feed and carriage return; DEL; C1), line separators, and what turns text around.
_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
# Keras goes back over a bar letter by letter, too, before it returns to the line's start.
_TOKEN = re.compile(rf"(?P<colour>{_COLOUR})|(?P<erase>{_ERASE})|\x08+(?P<back>\r?)|(?P<control>{_CONTROL})|(?P<end>\n)")
_RESET = "\x1b[0m"
_IS_RESET = re.compile(r"\x1b\[0*m")
# A sequence that may go on in the next piece, and how many backspaces may.
_BEGUN = re.compile(r"\x1b(?:\[[0-9;:]{0,64})?")
LONGEST_SEQUENCE, MOST_BACK = 70, 4096
# Databases' passwords may hold "/" and "#" as they are.
_USER = re.compile(r"(?<=://)(?:[^/?#]*|[^:/@]*:[^@]*)@")
_OPTION = re.compile(r"(?P<name>[?&][^=&#]*=)[^&#]*")
_HIDDEN = re.compile(r"passw|pwd|secret|token|credential|key=|[?&]sig=", re.IGNORECASE)


class Notice(str):
    """A sentence about a document or a cluster, which a user is told once (``config.untold``)."""


def printable(text: str) -> str:
    """Text inside of a sentence or a table: on one line, and of letters that every terminal takes."""
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def safe(text: str) -> str:
    """Text of whole lines: other control characters than tab, line feed and those of colours become ``\\x1b`` and the like.

    Of a line that redraws itself with carriage returns the last state is left, and what sets a colour ends with its line.
    """
    return "".join(safe_pieces(["\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))]))


def safe_pieces(pieces: Iterable[str]) -> Iterator[str]:
    """The same for text that comes in pieces, whose carriage returns go through: a bar redraws itself as it grows."""
    coloured, held = False, ""

    def replaced(found: re.Match[str]) -> str:
        nonlocal coloured
        if found["colour"]:
            coloured = not _IS_RESET.fullmatch(found[0])
            return found[0]
        if found["end"]:
            reset, coloured = (_RESET if coloured else ""), False
            return f"{reset}\n"
        if found["erase"] or found["back"]:
            return found["back"] or ""
        return "".join(map(_escaped, found[0]))

    for piece in pieces:
        whole = held + piece
        held = _begun(whole)
        if shown := _TOKEN.sub(replaced, whole[: len(whole) - len(held)]):
            yield shown
    if rest := _TOKEN.sub(replaced, held) + (_RESET if coloured else ""):
        yield rest


def fit(text: str, stream: TextIO) -> str:
    """Text as a stream may have it: ``safe`` for a terminal, without colours if so wanted; for anything else as it is."""
    return "".join(_coloured([safe(text)], stream)) if stream.isatty() else text


def fit_pieces(pieces: Iterable[str], stream: TextIO) -> Iterator[str]:
    """The same for text that comes in pieces."""
    return _coloured(safe_pieces(pieces), stream) if stream.isatty() else iter(pieces)


def _coloured(pieces: Iterable[str], stream: TextIO) -> Iterator[str]:
    return (piece if has_colors(stream) else re.sub(_COLOUR, "", piece) for piece in pieces)


def has_colors(stream: TextIO) -> bool:
    """Whether colours may go to a stream: to a terminal, unless NO_COLOR is set, as ``batchai --no-color`` does."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def is_quiet() -> bool:
    """Whether results and errors are all that a person wants to see: BATCHAI_QUIET is set (``batchai --quiet`` sets it)."""
    return bool(os.environ.get("BATCHAI_QUIET"))


def writable(text: str, stream: TextIO) -> str:
    """Text in which what the stream's encoding lacks is escaped."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def silence(stream: TextIO) -> None:
    """Send what is left in a stream that can't be written (``| head``) nowhere: it must not fail once more at the end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _begun(text: str) -> str:
    """Unfinished control sequence at the end of a text."""
    start = text.rfind("\x1b", max(0, len(text) - LONGEST_SEQUENCE))
    if start >= 0 and _BEGUN.fullmatch(text, start):
        return text[start:]
    backs = len(text) - len(text.rstrip("\x08"))
    return text[-min(backs, MOST_BACK) :] if backs else ""


def _escaped(letter: str) -> str:
    """``\\x1b``, ``\\u202e``."""
    return letter.encode("unicode_escape").decode("ascii")


def shown(uri: str) -> str:
    """An address without user and password, and without the values of options that are named like a secret, for messages."""
    return _OPTION.sub(lambda found: found["name"] + "***" if _HIDDEN.search(found["name"]) else found[0], _USER.sub("", uri))
