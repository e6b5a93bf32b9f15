"""Who a node is, for SSH: what the user wrote, what ``~/.ssh/config`` adds to it, and defaults."""

from __future__ import annotations

import getpass
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mlflow_batchai.engines.shell import config
from mlflow_batchai.errors import ClusterError

PASSPHRASE_VARIABLE = "BATCHAI_SSH_PASSPHRASE"
PASSWORD_VARIABLE = "BATCHAI_SSH_PASSWORD"
TIMEOUT = 10.0
SYSTEM_KNOWN_HOSTS = Path("/etc/ssh/ssh_known_hosts")
DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
# More than anybody chains; a circle in the config ends here.
LONGEST_CHAIN = 8

# What may stand in a ProxyCommand, which a shell reads: as OpenSSH since 9.6, and nothing that looks like an option.
_HOST = re.compile(r"[\w.:%][\w.:%-]*")
_USER = re.compile(r"[^\s'\"`$\\;&<>|(){}-][^\s'\"`$\\;&<>|(){}]*")


@dataclass(frozen=True)
class Target:
    """One machine to log in to.

    Attributes:
        name: as the user wrote it.
        host, port, user: where, and as whom.
        key_files: private keys to offer, in this order; ``explicit_keys``: the user named the one, so it must be usable.
        known_hosts: files with host keys; lines to add go to the first.
        host_key_alias: the name under which they hold this machine's key, if it isn't its host and port.
        jump: the machine through which it is reached.
        proxy_command: the user's shell line whose standard input and output lead there.
        password, passphrase: secrets, never shown; the passphrase opens key files.
        identities_only: of the keys in a running ssh-agent, offer only those of ``key_files``.
        timeout: seconds to connect, and again to log in.
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

    @property
    def address(self) -> str:
        """``user@host:port``, an IPv6 host in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.user}@{host}:{self.port}"

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
    given = _Given(key_file, known_hosts, timeout)
    return _resolve(host, user, port, jump, password, given, 0)


@dataclass(frozen=True)
class _Given:
    """The arguments that jump hosts take too."""

    key_file: str | os.PathLike[str] | None
    known_hosts: str | os.PathLike[str] | None
    timeout: float | None


class _Place(NamedTuple):
    host: str
    port: int
    user: str


def _resolve(
    text: str, user: str | None, port: int | None, jump: str | None, password: str | None, given: _Given, depth: int
) -> Target:
    if depth > LONGEST_CHAIN:
        raise ClusterError(
            f"node address {text!r}: more than {LONGEST_CHAIN} jump hosts; look for a circle of ProxyJump in {config.path()}"
        )
    place, found = _place(text, user, port)
    key_files = (given.key_file,) if given.key_file else tuple(found.all("identityfile"))
    through = _jump(text, place, found.get("proxyjump") if jump is None else jump, given, depth)
    command = found.get("proxycommand") if jump is None and not through else None
    return Target(
        name=text,
        host=place.host,
        port=place.port,
        user=place.user,
        key_files=tuple(_path(file) for file in key_files) or _default_keys(),
        explicit_keys=bool(given.key_file),
        known_hosts=_known_hosts(given.known_hosts, found),
        host_key_alias=found.get("hostkeyalias"),
        jump=through,
        proxy_command=command,
        password=password or os.environ.get(PASSWORD_VARIABLE) or None,
        passphrase=os.environ.get(PASSPHRASE_VARIABLE) or None,
        identities_only=(found.get("identitiesonly") or "no").lower() == "yes",
        timeout=given.timeout or _number(found, "connecttimeout", 86400) or TIMEOUT,
    )


def _place(text: str, user: str | None, port: int | None) -> tuple[_Place, config.Found]:
    """Where an address leads, and what else the config says of it."""
    own_user, name, own_port = _parse(text)
    found = config.lookup(name)
    place = _Place(
        found.get("hostname") or name,
        own_port or port or _number(found, "port", 65535) or 22,
        own_user or user or found.get("user") or getpass.getuser(),
    )
    for value, allowed in ((place.host, _HOST), (place.user, _USER)):
        if not allowed.fullmatch(value):
            raise ClusterError(f"node address {text!r}: {value!r} can't be a name there; write user@name:port")
    return place, found


def _jump(text: str, place: _Place, chain: str | None, given: _Given, depth: int) -> Target | None:
    """The last machine of a chain; the ones before it lead to it."""
    if chain is None or chain.lower() == "none":
        return None
    before, _, last = chain.rpartition(",")
    # ProxyJump takes ssh:// addresses too.
    last = last.strip().removeprefix("ssh://")
    if not last:
        raise ClusterError(f"node address {text!r}: the list of jump hosts {chain!r} has an empty place")
    if _place(last, None, None)[0] == place:
        # ``Host *`` with a ProxyJump means the jump host too: like ssh, we don't jump from it to itself.
        return None
    return _resolve(last, None, None, before.strip() or None, None, given, depth + 1)


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


def _number(found: config.Found, key: str, most: int) -> int | None:
    value = found.get(key)
    if value is None or (key == "connecttimeout" and value.lower() == "none"):
        return None
    if not (value.isascii() and value.isdigit() and 0 < int(value) <= most):
        raise ClusterError(f"{config.path()}: {key} {value!r} is not a number from 1 to {most}; correct it")
    return int(value)


def _path(text: str | os.PathLike[str]) -> Path:
    return Path(os.path.expandvars(text)).expanduser()


def _default_keys() -> tuple[Path, ...]:
    folder = Path.home() / ".ssh"
    return tuple(folder / name for name in DEFAULT_KEYS if (folder / name).is_file())


def _known_hosts(given: str | os.PathLike[str] | None, found: config.Found) -> tuple[Path, ...]:
    if given:
        return (_path(given),)
    files = found.get("userknownhostsfile")
    if files is None:
        return (Path.home() / ".ssh" / "known_hosts", SYSTEM_KNOWN_HOSTS)
    own = () if files.lower() == "none" else tuple(_path(file) for file in shlex.split(files))
    return (*own, SYSTEM_KNOWN_HOSTS)
