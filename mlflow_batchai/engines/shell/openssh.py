"""The command ``ssh`` for a target: where a terminal or a forwarded port is wanted, it does better than we could.

It is told all that ``targets`` has found out and reads no configuration of its own, so that it gets where our own connections
get. Host keys are checked as always. A password it asks for itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from mlflow_batchai.engines.shell.targets import Target


def command_line(
    target: Target, line: str | None, forwards: Sequence[str] = (), terminal: bool = False, program: str = "ssh"
) -> list[str]:
    """What runs a shell line there, and forwards ports meanwhile.

    Args:
        line: for the login's shell; None: only ports are forwarded.
        forwards: ``[address:]port:host:port`` each, as for ``ssh -L``.
        terminal: whether the line gets a terminal.
    """
    options = ["-t"] if terminal and line is not None else []
    options += [word for forward in forwards for word in ("-L", forward)]
    if forwards:
        options += ["-o", "ExitOnForwardFailure=yes"]
    return [*_to(target, [*options, *(["-N"] if line is None else [])], program), *([line] if line is not None else [])]


def _to(target: Target, options: Sequence[str], program: str) -> list[str]:
    settings = {
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": " ".join(_quoted(str(file)) for file in target.known_hosts) or "/dev/null",
        "GlobalKnownHostsFile": "/dev/null",
        "HostKeyAlias": target.host_key_alias,
        "IdentitiesOnly": "yes" if target.identities_only else None,
        "ConnectTimeout": f"{target.timeout:.0f}",
        "LogLevel": "ERROR",
        "ProxyCommand": _through(target.jump, program) if target.jump else target.proxy_command,
    }
    words = [word for name, value in settings.items() if value is not None for word in ("-o", f"{name}={value}")]
    keys = [word for file in target.key_files for word in ("-i", str(file).replace("%", "%%"))]
    return [program, "-F", "/dev/null", "-p", str(target.port), "-l", target.user, *keys, *words, *options, "--", target.host]


def _through(jump: Target, program: str) -> str:
    """A shell line that leads to ``%h:%p`` by way of another machine; ``-J`` would not hand on keys and known hosts."""
    line = _to(jump, [], program)
    # Whatever has a % in it is meant for the ssh that this line starts.
    escaped = [word.replace("%", "%%") for word in line]
    return shlex.join([*escaped[:1], "-W", "[%h]:%p", *escaped[1:]])


def _quoted(text: str) -> str:
    """A word of a list in ssh's configuration, which takes % for a placeholder."""
    return '"' + text.replace("%", "%%") + '"'
