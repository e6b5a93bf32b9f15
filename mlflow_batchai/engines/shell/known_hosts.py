"""Files of known host keys, as ``sshd(8)`` describes them: patterns, hashed names, ``@revoked``."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    """One known key.

    Attributes:
        kind: ``ssh-ed25519``, ``ssh-rsa``, ...
        key: the key as it goes over the wire.
        revoked: this key must never be taken.
    """

    file: Path
    line: int
    kind: str
    key: bytes
    revoked: bool = False


def entries(files: Iterable[Path], name: str) -> list[Entry]:
    """All keys of a name (``host`` or ``[host]:port``), in the files' order.

    A file that doesn't exist has none; a line that can't be read is passed over, as ssh does, and so are certificate
    authorities, which paramiko doesn't know.

    Raises:
        OSError: a file can't be read (its ``filename``).
    """
    found = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            continue
        for number, line in enumerate(lines, 1):
            words = line.split()
            marker = words.pop(0) if words and words[0].startswith("@") else ""
            if len(words) < 3 or words[0].startswith("#") or marker not in ("", "@revoked") or not _names(words[0], name):
                continue
            try:
                key = base64.b64decode(words[2], validate=True)
            except binascii.Error:
                continue
            found.append(Entry(file, number, words[1], key, bool(marker)))
    return found


def _names(patterns: str, name: str) -> bool:
    """Whether a line's first word means a name."""
    if patterns.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part) for part in patterns.split("|")[2:4])
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(hmac.new(salt, name.lower().encode(), hashlib.sha1).digest(), digest)
    meant = False
    for pattern in patterns.lower().split(","):
        # Brackets stand for themselves here ([host]:port); only * and ? are special.
        if fnmatch.fnmatchcase(name.lower(), pattern.removeprefix("!").replace("[", "[[]")):
            if pattern.startswith("!"):
                return False
            meant = True
    return meant


def fingerprint(key: bytes) -> str:
    """The fingerprint as ``ssh-keygen -lf`` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")
