"""``~/.ssh/config``, read by paramiko; files it includes are put in its place first, which paramiko doesn't do."""

from __future__ import annotations

import glob
import re
import shlex
from pathlib import Path

from mlflow_batchai.errors import ClusterError

# As OpenSSH's READCONF_MAX_DEPTH.
DEEPEST = 16
_KEYWORD = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+)(.*?)\s*")


class Found:
    """What the config says of one name; keys in lower case."""

    def __init__(self, options: dict[str, object]) -> None:
        self._options = options

    def get(self, key: str) -> str | None:
        """A value, or None if the config has none."""
        value = self._options.get(key)
        return value if isinstance(value, str) else None

    def all(self, key: str) -> list[str]:
        """The values of a key that may stand several times; ``none`` is no value."""
        values = self._options.get(key)
        return [value for value in values if value.lower() != "none"] if isinstance(values, list) else []


def path() -> Path:
    """Where the user's config is."""
    return Path.home() / ".ssh" / "config"


def lookup(name: str) -> Found:
    """What the user's config says of a name; nothing if there is no config.

    Raises:
        ClusterError: it can't be read.
    """
    file = path()
    if not file.exists():
        return Found({})
    text = "\n".join(_lines(file, 0))
    import paramiko

    try:
        return Found(dict(paramiko.SSHConfig.from_text(text).lookup(name)))
    # Odd text brings many kinds of errors out of paramiko's parser, and of the library with which it runs Match exec.
    except Exception as error:
        raise ClusterError(
            f"{file} can't be understood: {error}; correct it (ssh -G {shlex.quote(name)} tells more)"
        ) from error


def _lines(file: Path, depth: int) -> list[str]:
    """The lines of a config with those of included files; a block goes on after what was included in it."""
    if depth > DEEPEST:
        raise ClusterError(f"{file}: files include each other more than {DEEPEST} deep; take the circle out")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ClusterError(f"{file} can't be read: {reason}; correct it, or make it readable") from error
    lines = []
    block = "Host *"
    for number, line in enumerate(text.splitlines(), 1):
        match = _KEYWORD.fullmatch(line)
        keyword = match[1].lower() if match else ""
        if match and keyword == "include":
            try:
                patterns = shlex.split(match[2])
            except ValueError as error:
                raise ClusterError(f"{file}, line {number}: {error}; correct it") from error
            for pattern in patterns:
                # Relative names are those of ~/.ssh, as for ssh.
                full = path().parent / Path(pattern).expanduser()
                for included in sorted(glob.glob(str(full))):  # noqa: PTH207 (pathlib has no absolute patterns)
                    lines += _lines(Path(included), depth + 1)
            lines.append(block)
            continue
        if keyword in ("host", "match"):
            block = line
        lines.append(line)
    return lines
