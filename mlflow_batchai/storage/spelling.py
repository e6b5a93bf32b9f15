"""rclone's spelling of names that Azure Files refuses: ``a:b.h5``, written on a mount, is ``a：b.h5`` on the share.

Its rules: https://rclone.org/overview/#encoding, with what the backend ``azurefiles`` encodes.
"""

from __future__ import annotations

QUOTE = "\u201b"
_SPELLED = {letter: chr(ord(letter) + 0xFEE0) for letter in '"*:<>?\\|'}
_SPELLED |= {chr(code): chr(0x2400 + code) for code in range(1, 32)} | {"\x7f": "\u2421"}
_MEANT = {spelled: letter for letter, spelled in _SPELLED.items()}
_DOT, _SPELLED_DOT = ".", "\uff0e"
# What rclone takes for a spelling, and so quotes where it is meant itself.
_QUOTED = frozenset((*_MEANT, _SPELLED_DOT, QUOTE))


def on_share(path: str) -> str:
    """A path on a mount as it is spelled on the share."""
    return "/".join(map(_spell, path.split("/")))


def on_mount(path: str) -> str:
    """A share's path as its writer on a mount spelled it; one that would lead elsewhere stays as it is."""
    return "/".join(map(_read, path.split("/")))


def _spell(name: str) -> str:
    spelled = "".join(QUOTE + letter if letter in _QUOTED else _SPELLED.get(letter, letter) for letter in name)
    return spelled[:-1] + _SPELLED_DOT if spelled.endswith(_DOT) else spelled


def _read(name: str) -> str:
    found = []
    letters = iter(name)
    for letter in letters:
        following = next(letters, "") if letter == QUOTE else ""
        if letter == QUOTE and following not in _QUOTED:
            found.append(letter + following)  # a byte that is no text, as two hexadecimal digits
        else:
            found.append(following or _MEANT.get(letter, letter))
    if found and found[-1] == _SPELLED_DOT and not name.endswith(QUOTE + _SPELLED_DOT):
        found[-1] = _DOT
    read = "".join(found)
    return name if read in (".", "..") else read
