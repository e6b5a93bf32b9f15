"""Log in to a machine: key files, the agent's keys, a password, in this order."""

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
from cryptography.exceptions import InvalidTag

from mlflow_batchai.engines.shell.target import PASSPHRASE_VARIABLE, PASSWORD_VARIABLE, Target
from mlflow_batchai.errors import LoginError

_LOADING = threading.Lock()


class LockedKeyError(Exception):
    """A key file has a passphrase that we don't have, or not the right one."""


@dataclass
class _Tried:
    """Login methods that were tried, for the error sentence."""

    opened: list[Path] = field(default_factory=list)
    locked: list[Path] = field(default_factory=list)
    unusable: list[Path] = field(default_factory=list)
    agents: int = 0


def log_in(transport: paramiko.Transport, target: Target) -> None:
    """Offer what there is until the server is content.

    Raises:
        LoginError: it isn't, or the key file that the user named can't be used.
        paramiko.SSHException, EOFError, OSError: the connection has ended.
    """
    until = time.monotonic() + target.timeout
    tried = _Tried()
    allowed: list[str] = []
    with contextlib.closing(paramiko.Agent()) as agent:
        for key in _offers(target, agent, tried):
            transport.auth_timeout = max(0.1, until - time.monotonic())
            try:
                allowed = transport.auth_publickey(target.user, key)
            except paramiko.BadAuthenticationType as error:
                allowed = error.allowed_types
                break
            except paramiko.AuthenticationException:
                _check_answered(transport, target, until)
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
            _check_answered(transport, target, until)
    raise LoginError(f"{target.label}{_refused(target, tried, allowed)}")


def _check_answered(transport: paramiko.Transport, target: Target, until: float) -> None:
    """Tell silence, which paramiko reports as a refusal, from a refusal."""
    if transport.is_active() and time.monotonic() >= until:
        raise LoginError(
            f"{target.label} did not answer the login within {target.timeout:g} s; check that the machine is not overloaded "
            "and that its user database answers"
        ) from None


def _offers(target: Target, agent: paramiko.Agent, tried: _Tried) -> Iterator[paramiko.PKey]:
    """Keys of files, then the agent's; each once."""
    seen = set()
    for file in target.key_files:
        try:
            key = _load(file, target.passphrase)
        except LockedKeyError:
            tried.locked.append(file)
            continue
        # Odd keys (of a security key, with an unknown cipher) bring many kinds of errors out of paramiko and cryptography.
        except Exception as error:
            if target.explicit_keys:
                raise LoginError(f"{target.label}: the key file {file} {_unusable(file, error)}") from error
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
    except (ValueError, InvalidTag, paramiko.SSHException):
        raise LockedKeyError from None


def _public_part(file: Path) -> bytes | None:
    """The public key of a key file: its own, if it is one, or that of the ``.pub`` beside it."""
    try:
        words = (file if file.suffix == ".pub" else Path(f"{file}.pub")).read_text(encoding="utf-8").split()
        return base64.b64decode(words[1])
    except (OSError, ValueError, IndexError):
        return None


def _unusable(file: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "is not there; correct the path"
    if isinstance(error, OSError):
        return f"can't be read: {error.strerror}; correct the path, or make it readable: chmod 600 {shlex.quote(str(file))}"
    if file.suffix == ".pub":
        return f"is the public half; name the private one, {file.with_suffix('')}"
    return "holds no private key that can be used (RSA, ECDSA or Ed25519); name one that ssh-keygen has made"


def _refused(target: Target, tried: _Tried, allowed: list[str]) -> str:
    if tried.locked and not tried.opened:
        file = tried.locked[0]
        add = f"ssh-add {shlex.quote(str(file))}"
        if target.passphrase:
            return (
                f": the passphrase in {PASSPHRASE_VARIABLE} doesn't open the key file {file}; correct it, or hand the key to "
                f"your agent: {add}"
            )
        return f": the key file {file} has a passphrase; hand it to your agent: {add}, or set {PASSPHRASE_VARIABLE}"
    if not (tried.opened or tried.agents or target.password):
        missing = f" ({', '.join(map(str, tried.unusable))} can't be used)" if tried.unusable else ""
        return (
            f": there is no key to log in with{missing}: no key file in ~/.ssh, none in an agent; make one with ssh-keygen, "
            f"name one, or set {PASSWORD_VARIABLE}"
        )
    offers = [f"the key file {file}" for file in tried.opened]
    offers.append(f"{tried.agents} of the agent's keys" if tried.agents else "no key of an agent")
    if target.password:
        offers.append("the password")
    takes = f"; it takes {' or '.join(allowed)}" if allowed else ""
    identity = f" -i {shlex.quote(str(tried.opened[0]))}" if tried.opened else ""
    jump = f" -o {shlex.quote(f'ProxyJump={target.jump.address}')}" if target.jump else ""
    copy = f"ssh-copy-id{identity} -p {target.port}{jump} {shlex.quote(f'{target.user}@{target.host}')}"
    return f" refused the login (tried {', '.join(offers)}{takes}); check the user name, or let a key in: {copy}"
