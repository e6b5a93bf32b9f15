"""Logging in: host key, key files, agent, password, in this order."""

from __future__ import annotations

import base64
import contextlib
import functools
import shlex
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import paramiko
from paramiko.pkey import UnknownKeyType

from mlflow_batchai.engines.shell import sentences
from mlflow_batchai.engines.shell.errors import LoginError
from mlflow_batchai.engines.shell.known_hosts import Entry, entries
from mlflow_batchai.engines.shell.targets import PASSPHRASE_VARIABLE, PASSWORD_VARIABLE, Target

_LOADING = threading.Lock()
# One type of key, several signature algorithms: the ones to ask for.
_ALGORITHMS = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}


class LockedKeyError(Exception):
    """A key file has a passphrase that we don't have, or not the right one."""


def prefer_known_types(transport: paramiko.Transport, target: Target, noun: str) -> None:
    """Ask the server for a type of host key that the known_hosts files hold, if they hold one.

    Raises:
        HostKeyError: a file can't be read.
    """
    options = transport.get_security_options()
    offered = list(options.key_types)
    known = [name for entry in _known(target, noun) for name in _ALGORITHMS.get(entry.kind, (entry.kind,)) if not entry.revoked]
    first = [name for name in dict.fromkeys(known) if name in offered]
    options.key_types = [*first, *(name for name in offered if name not in first)]


def check_host_key(transport: paramiko.Transport, target: Target, noun: str) -> Entry:
    """Refuse a server that isn't known; where it is known from.

    Raises:
        HostKeyError: its key is unknown, another one, or revoked.
    """
    key = transport.get_remote_server_key()
    kind, blob = key.get_name(), key.asbytes()
    known = _known(target, noun)
    for entry in known:
        if entry.revoked and entry.key == blob:
            raise sentences.revoked_host_key(target, noun, kind, entry)
    taken = [entry for entry in known if not entry.revoked]
    for entry in taken:
        if entry.key == blob:
            return entry
    for entry in taken:
        if entry.kind == kind:
            raise sentences.changed_host_key(target, noun, kind, blob, entry)
    raise sentences.unknown_host_key(target, noun, kind, blob, taken)


def _known(target: Target, noun: str) -> list[Entry]:
    try:
        found = entries(target.known_hosts, target.host_key_name)
        if not found and target.host_key_alias is None and target.port != 22:
            # Like ssh: a key that is known for the machine's port 22 will do.
            found = entries(target.known_hosts, target.host)
    except OSError as error:
        raise sentences.unreadable_known_hosts(target, noun, error) from error
    return found


@dataclass
class _Tried:
    """What was offered, for the sentence that says so."""

    opened: list[Path] = field(default_factory=list)
    locked: list[Path] = field(default_factory=list)
    unusable: list[Path] = field(default_factory=list)
    agents: int = 0


def log_in(transport: paramiko.Transport, target: Target, noun: str) -> None:
    """Offer what there is until the server is content.

    Raises:
        LoginError: it isn't, or the key file that the user named can't be used.
    """
    until = time.monotonic() + target.timeout
    tried = _Tried()
    allowed: list[str] = []
    with contextlib.closing(paramiko.Agent()) as agent:
        for key in _offers(target, noun, agent, tried):
            transport.auth_timeout = max(0.1, until - time.monotonic())
            try:
                allowed = transport.auth_publickey(target.user, key)
            except paramiko.BadAuthenticationType as error:
                allowed = error.allowed_types
                break
            except paramiko.AuthenticationException:
                _still_there(transport, target, noun, until)
                if transport.is_active():
                    continue
                # Too many keys (MaxAuthTries): it has hung up.
                break
            if not allowed:
                return
            # The server wants a second factor besides.
            break
    if target.password and transport.is_active():
        transport.auth_timeout = max(0.1, until - time.monotonic())
        try:
            if not transport.auth_password(target.user, target.password):
                return
        except paramiko.BadAuthenticationType as error:
            allowed = error.allowed_types
        except paramiko.AuthenticationException:
            _still_there(transport, target, noun, until)
    raise _refused(target, noun, tried, allowed)


def _still_there(transport: paramiko.Transport, target: Target, noun: str, until: float) -> None:
    """A refusal is one answer, silence another."""
    if transport.is_active() and time.monotonic() >= until:
        raise LoginError(
            f"{sentences.label(target, noun)} did not answer the login within {target.timeout:g} s; check that the machine "
            "is not overloaded and that its user database answers"
        ) from None


def _offers(target: Target, noun: str, agent: paramiko.Agent, tried: _Tried) -> Iterator[paramiko.PKey]:
    """Keys of files, then the agent's; each once."""
    seen = set()
    for file in target.key_files:
        try:
            key = _load(file, target.passphrase)
        except LockedKeyError:
            tried.locked.append(file)
            continue
        except (OSError, ValueError, paramiko.SSHException, UnknownKeyType) as error:
            if target.explicit_keys:
                raise _unusable(target, noun, file, error) from error
            tried.unusable.append(file)
            continue
        tried.opened.append(file)
        seen.add(key.asbytes())
        yield key
    wanted = {_public_part(file) for file in [*tried.locked, *tried.unusable]}
    for key in agent.get_keys():
        if key.asbytes() not in seen and (key.asbytes() in wanted or not target.identities_only):
            tried.agents += 1
            yield key


def _load(file: Path, passphrase: str | None) -> paramiko.PKey:
    """A key file's key; one thread opens it for all, since that is slow on purpose if it has a passphrase."""
    with _LOADING:
        return _loaded(file, file.stat().st_mtime_ns, passphrase)


@functools.lru_cache(maxsize=32)
def _loaded(file: Path, changed: int, passphrase: str | None) -> paramiko.PKey:
    try:
        return paramiko.PKey.from_path(file)
    except TypeError:
        # cryptography's way to say: encrypted.
        if passphrase is None:
            raise LockedKeyError from None
    try:
        # from_path hands the passphrase on to cryptography, which takes bytes.
        return paramiko.PKey.from_path(file, cast(str, passphrase.encode()))
    except (ValueError, paramiko.SSHException):
        raise LockedKeyError from None


def _public_part(file: Path) -> bytes | None:
    """The public key of a key file: its own, if it is one, or that of the ``.pub`` beside it."""
    try:
        words = (file if file.suffix == ".pub" else Path(f"{file}.pub")).read_text(encoding="utf-8").split()
        return base64.b64decode(words[1])
    except (OSError, ValueError, IndexError):
        return None


def _unusable(target: Target, noun: str, file: Path, error: Exception) -> LoginError:
    if isinstance(error, FileNotFoundError):
        what = "is not there; correct the path"
    elif isinstance(error, OSError):
        what = f"can't be read: {error.strerror}; correct the path, or make it readable: chmod 600 {shlex.quote(str(file))}"
    elif file.suffix == ".pub":
        what = f"is the public half; name the private one, {file.with_suffix('')}"
    else:
        what = "holds no private key that can be used (RSA, ECDSA or Ed25519); name one that ssh-keygen has made"
    return LoginError(f"{sentences.label(target, noun)}: the key file {file} {what}")


def _refused(target: Target, noun: str, tried: _Tried, allowed: list[str]) -> LoginError:
    """Which of our offers were refused, and what would help."""
    where = sentences.label(target, noun)
    if tried.locked and not tried.opened:
        file = tried.locked[0]
        add = f"ssh-add {shlex.quote(str(file))}"
        if target.passphrase:
            return LoginError(
                f"{where}: the passphrase in {PASSPHRASE_VARIABLE} doesn't open the key file {file}; correct it, or hand the "
                f"key to your agent: {add}"
            )
        return LoginError(
            f"{where}: the key file {file} has a passphrase; hand it to your agent: {add}, or set {PASSPHRASE_VARIABLE}"
        )
    if not (tried.opened or tried.agents or target.password):
        missing = f" ({', '.join(map(str, tried.unusable))} can't be used)" if tried.unusable else ""
        return LoginError(
            f"{where}: there is no key to log in with{missing}: no key file in ~/.ssh, none in an agent; make one with "
            f"ssh-keygen, name one, or set {PASSWORD_VARIABLE}"
        )
    offers = [f"the key file {file}" for file in tried.opened]
    offers.append(f"{tried.agents} of the agent's keys" if tried.agents else "no key of an agent")
    if target.password:
        offers.append("the password")
    takes = f"; it takes {' or '.join(allowed)}" if allowed else ""
    identity = f" -i {shlex.quote(str(tried.opened[0]))}" if tried.opened else ""
    jump = f" -o {shlex.quote(f'ProxyJump={target.jump.address}')}" if target.jump else ""
    copy = f"ssh-copy-id{identity} -p {target.port}{jump} {shlex.quote(f'{target.user}@{target.host}')}"
    return LoginError(
        f"{where} refused the login (tried {', '.join(offers)}{takes}); check the user name, or let a key in: {copy}"
    )
