"""Resolve an SSH address to a machine: what the user wrote, then ``~/.ssh/config``, then defaults."""

from __future__ import annotations

import getpass
import glob
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mlflow_batchai.errors import ClusterError

PASSPHRASE_VARIABLE = "BATCHAI_SSH_PASSPHRASE"
PASSWORD_VARIABLE = "BATCHAI_SSH_PASSWORD"
TIMEOUT = 10.0
SYSTEM_KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")
DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
# More than anybody chains; a circle in the config ends here.
LONGEST_CHAIN = 8
# As OpenSSH's READCONF_MAX_DEPTH.
DEEPEST_INCLUDE = 16

# What may stand in a ProxyCommand, which a shell reads: as OpenSSH since 9.6, and nothing that looks like an option.
_HOST = re.compile(r"[\w.:%][\w.:%-]*")
_USER = re.compile(r"[^\s'\"`$\\;&<>|(){}-][^\s'\"`$\\;&<>|(){}]*")
_BLOCK = re.compile(r"\s*(include|host|match)\b\s*=?\s*(.*)", re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """One machine to log in to.

    Attributes:
        key_files: private keys to offer, in this order; ``explicit_keys``: the user named the one, so it must be usable.
        known_hosts: files with host keys; lines to add go to the first.
        host_key_alias: the name under which they hold this machine's key, if it isn't its host and port.
        proxy_command: the user's shell line whose standard input and output lead there.
        password, passphrase: secrets, never shown; the passphrase opens key files.
        identities_only: of the keys in a running ssh-agent, offer only those of ``key_files``.
        timeout: seconds to connect, again to negotiate, and again to log in.
        noun: what messages call it.
    """

    name: str
    host: str
    port: int
    user: str
    key_files: tuple[Path, ...] = ()
    explicit_keys: bool = False
    known_hosts: tuple[Path, ...] = ()
    host_key_alias: str | None = None
    jump: Target | None = None
    proxy_command: str | None = None
    password: str | None = field(default=None, repr=False)
    passphrase: str | None = field(default=None, repr=False)
    identities_only: bool = False
    timeout: float = TIMEOUT
    noun: str = "node"

    @property
    def address(self) -> str:
        """``user@host:port``, an IPv6 host in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.user}@{host}:{self.port}"

    @property
    def label(self) -> str:
        """Name of the machine in messages: ``node gpu1 (me@10.0.0.4:22)``."""
        return f"{self.noun} {self.name} ({self.address})"

    @property
    def host_key_name(self) -> str:
        """The name that known_hosts files use: ``host``, or ``[host]:port`` for a port other than 22."""
        if self.host_key_alias:
            return self.host_key_alias
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"


def resolve(
    host: str,
    *,
    user: str | None = None,
    port: int | None = None,
    key_file: str | os.PathLike[str] | None = None,
    known_hosts: str | os.PathLike[str] | None = None,
    jump: str | None = None,
    password: str | None = None,
    timeout: float | None = None,
) -> Target:
    """The target of an address, as ``ssh`` would find it.

    Precedence: what ``host`` itself says, arguments, ``~/.ssh/config`` (HostName, Port, User, IdentityFile, IdentitiesOnly,
    UserKnownHostsFile, HostKeyAlias, ProxyJump, ProxyCommand, ConnectTimeout, Include), defaults. StrictHostKeyChecking is not
    heeded: host keys are always checked. Nothing is connected to.

    Args:
        host: ``name``, ``user@name``, ``name:port``, ``[v6]:port`` or a bare IPv6 address.
        jump: the same form; several, separated by commas, are passed through in that order; ``none`` overrules the config.
            Jump hosts take ``key_file`` and ``known_hosts`` from here, the rest from the config.
        password: for this machine; without it ``BATCHAI_SSH_PASSWORD``. A key's passphrase comes from
            ``BATCHAI_SSH_PASSPHRASE`` only.
        timeout: seconds; 10 unless the config says otherwise.

    Raises:
        ClusterError: the address can't be read, or the config is broken.
    """
    return _resolve(host, user, port, jump, password, _Shared(key_file, known_hosts, timeout), 0)


def ssh_command(target: Target, line: str | None, forwards: Sequence[str] = (), terminal: bool = False) -> list[str]:
    """The command ``ssh`` that runs a shell line there, with a terminal, and forwards ports meanwhile.

    It reads no configuration of its own, so it gets where our own connections get; it asks for a password itself.

    Args:
        line: for the login's shell; None: only ports are forwarded.
        forwards: ``[address:]port:host:port`` each, as for ``ssh -L``.
    """
    options = ["-t"] if terminal and line is not None else []
    options += [word for forward in forwards for word in ("-L", forward)]
    if forwards:
        options += ["-o", "ExitOnForwardFailure=yes"]
    if line is None:
        options.append("-N")
    return [*_ssh(target, options), *([line] if line is not None else [])]


def _ssh(target: Target, options: Sequence[str]) -> list[str]:
    through = target.proxy_command
    if target.jump:
        # -J would not hand on keys and known hosts. Whatever has a % in it is meant for the ssh that this line starts.
        words = [word.replace("%", "%%") for word in _ssh(target.jump, [])]
        through = shlex.join([words[0], "-W", "[%h]:%p", *words[1:]])
    known_hosts = " ".join('"{}"'.format(str(file).replace("%", "%%")) for file in target.known_hosts)
    settings = {
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": known_hosts or "/dev/null",
        "GlobalKnownHostsFile": "/dev/null",
        "HostKeyAlias": target.host_key_alias,
        "IdentitiesOnly": "yes" if target.identities_only else None,
        "ConnectTimeout": f"{target.timeout:.0f}",
        "LogLevel": "ERROR",
        "ProxyCommand": through,
    }
    words = [word for name, value in settings.items() if value is not None for word in ("-o", f"{name}={value}")]
    keys = [word for file in target.key_files for word in ("-i", str(file).replace("%", "%%"))]
    return ["ssh", "-F", "/dev/null", "-p", str(target.port), "-l", target.user, *keys, *words, *options, "--", target.host]


@dataclass(frozen=True)
class _Shared:
    """The arguments that jump hosts take too."""

    key_file: str | os.PathLike[str] | None
    known_hosts: str | os.PathLike[str] | None
    timeout: float | None


class _Place(NamedTuple):
    host: str
    port: int
    user: str


def _resolve(
    text: str, user: str | None, port: int | None, jump: str | None, password: str | None, shared: _Shared, depth: int
) -> Target:
    if depth > LONGEST_CHAIN:
        raise ClusterError(
            f"node address {text!r}: more than {LONGEST_CHAIN} jump hosts; look for a circle of ProxyJump in {_config_file()}"
        )
    config, place = _place(text, user, port)
    key_files = (
        [shared.key_file] if shared.key_file else [file for file in config.get("identityfile", []) if file.lower() != "none"]
    )
    through = _jump(text, place, config.get("proxyjump") if jump is None else jump, shared, depth)
    return Target(
        name=text,
        host=place.host,
        port=place.port,
        user=place.user,
        key_files=tuple(map(_path, key_files)) or _default_keys(),
        explicit_keys=bool(shared.key_file),
        known_hosts=(_path(shared.known_hosts),) if shared.known_hosts else _known_hosts(config.get("userknownhostsfile")),
        host_key_alias=config.get("hostkeyalias"),
        jump=through,
        proxy_command=config.get("proxycommand") if jump is None and not through else None,
        password=password or os.environ.get(PASSWORD_VARIABLE) or None,
        passphrase=os.environ.get(PASSPHRASE_VARIABLE) or None,
        identities_only=config.get("identitiesonly", "no").lower() == "yes",
        timeout=shared.timeout or _number(config, "connecttimeout", 86400) or TIMEOUT,
        noun="jump host" if depth else "node",
    )


def _place(text: str, user: str | None, port: int | None) -> tuple[Mapping[str, Any], _Place]:
    own_user, name, own_port = _parse(text)
    config = _lookup(name)
    host = config.get("hostname") or name
    user = own_user or user or config.get("user") or getpass.getuser()
    for value, allowed in ((host, _HOST), (user, _USER)):
        if not allowed.fullmatch(value):
            raise ClusterError(f"node address {text!r}: {value!r} can't be a name there; write user@name:port")
    return config, _Place(host, own_port or port or _number(config, "port", 65535) or 22, user)


def _jump(text: str, place: _Place, chain: str | None, shared: _Shared, depth: int) -> Target | None:
    """The last machine of a chain; the ones before it lead to it."""
    if chain is None or chain.lower() == "none":
        return None
    before, _, last = chain.rpartition(",")
    # ProxyJump takes ssh:// addresses too.
    last = last.strip().removeprefix("ssh://")
    if not last:
        raise ClusterError(f"node address {text!r}: the list of jump hosts {chain!r} has an empty place")
    if _place(last, None, None)[1] == place:
        # ``Host *`` with a ProxyJump means the jump host too: like ssh, we don't jump from it to itself.
        return None
    return _resolve(last, None, None, before.strip() or None, None, shared, depth + 1)


def _parse(text: str) -> tuple[str | None, str, int | None]:
    """(user, name, port) of an address."""
    user, _, rest = text.strip().rpartition("@")
    port: str | None = None
    bracketed = re.fullmatch(r"\[([^\]]+)\](?::(.*))?", rest)
    if bracketed:
        name, port = bracketed[1], bracketed[2]
    elif rest.count(":") == 1:
        name, port = rest.split(":")
    else:
        name = rest
    if not name or ("@" in text and not user):
        raise ClusterError(f"node address {text!r} is not an address; write name, user@name, name:port or [IPv6 address]:port")
    if port is not None and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ClusterError(f"node address {text!r}: the port must be a number from 1 to 65535")
    return user or None, name, int(port) if port else None


def _path(text: str | os.PathLike[str]) -> Path:
    return Path(os.path.expandvars(text)).expanduser()


def _default_keys() -> tuple[Path, ...]:
    files = [Path.home() / ".ssh" / name for name in DEFAULT_KEYS]
    return tuple(file for file in files if file.is_file())


def _known_hosts(files: str | None) -> tuple[Path, ...]:
    if files is None:
        return (Path.home() / ".ssh" / "known_hosts", SYSTEM_KNOWN_HOSTS)
    return (*(() if files.lower() == "none" else map(_path, shlex.split(files))), SYSTEM_KNOWN_HOSTS)


def _config_file() -> Path:
    return Path.home() / ".ssh" / "config"


def _lookup(name: str) -> Mapping[str, Any]:
    """Look a name up in the user's config; keys in lower case, values text, those of IdentityFile a list."""
    file = _config_file()
    if not file.exists():
        return {}
    import paramiko

    try:
        return paramiko.SSHConfig.from_text("\n".join(_lines(file))).lookup(name)
    # Odd text brings many kinds of errors out of paramiko's parser, and of the library with which it runs Match exec.
    except Exception as error:
        raise ClusterError(
            f"{file} can't be understood: {error}; correct it (ssh -G {shlex.quote(name)} tells more)"
        ) from error


def _lines(file: Path, depth: int = 0) -> Iterator[str]:
    """The lines of a config with those of included files in their place, which paramiko doesn't read."""
    if depth > DEEPEST_INCLUDE:
        raise ValueError(f"files include each other more than {DEEPEST_INCLUDE} deep")
    block = "Host *"
    for line in file.read_text(encoding="utf-8").splitlines():
        match = _BLOCK.fullmatch(line)
        if not match or match[1].lower() != "include":
            block = line if match else block
            yield line
            continue
        for pattern in shlex.split(match[2]):
            # Relative names are those of ~/.ssh, as for ssh.
            full = _config_file().parent / Path(pattern).expanduser()
            for included in sorted(glob.glob(str(full))):  # noqa: PTH207 (pathlib has no absolute patterns)
                yield from _lines(Path(included), depth + 1)
        # The block goes on after what was included in it.
        yield block


def _number(config: Mapping[str, Any], key: str, most: int) -> int | None:
    value = config.get(key)
    if value is None or (key == "connecttimeout" and value.lower() == "none"):
        return None
    if not (value.isascii() and value.isdigit() and 0 < int(value) <= most):
        raise ClusterError(f"{_config_file()}: {key} {value!r} is not a number from 1 to {most}; correct it")
    return int(value)
