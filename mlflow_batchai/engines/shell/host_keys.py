"""Check a machine's host key against the user's known_hosts files."""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import paramiko
import paramiko.hostkeys

from mlflow_batchai.engines.shell.target import Target
from mlflow_batchai.errors import HostKeyError


class KnownKey(NamedTuple):
    """A key of a known_hosts file; ``revoked``: it must never be taken."""

    file: Path
    line: int
    key: paramiko.PKey
    revoked: bool

    def __str__(self) -> str:
        return f"{_described(self.key)} ({self.file}, line {self.line})"


def find(target: Target) -> list[KnownKey]:
    """All known keys of a machine, in the files' order: by its alias, or its host and port, else by its host alone.

    A file that doesn't exist has none. A line that can't be read is passed over, as ssh does, and so are certificate
    authorities, which paramiko doesn't know.

    Raises:
        HostKeyError: a file can't be read.
    """
    names = [target.host_key_name]
    if target.host_key_alias is None and target.port != 22:
        # Like ssh: a key that is known for the machine's port 22 will do.
        names.append(target.host)
    try:
        found = ([known for file in target.known_hosts for known in _read(file, name)] for name in names)
        return next(filter(None, found), [])
    except OSError as error:
        raise HostKeyError(
            f"{target.label}: the file of known host keys {error.filename} can't be read: {error.strerror}; make it "
            "readable, or name another"
        ) from error


def prefer_known(transport: paramiko.Transport, target: Target) -> None:
    """Ask the server first for the types of host key that the known_hosts files hold; raises as ``find``."""
    kinds = {known.key.get_name() for known in find(target) if not known.revoked}
    if "ssh-rsa" in kinds:
        kinds |= {"rsa-sha2-512", "rsa-sha2-256"}
    options = transport.get_security_options()
    options.key_types = sorted(options.key_types, key=lambda kind: kind not in kinds)


def check(transport: paramiko.Transport, target: Target) -> KnownKey:
    """Where the server's key is known from. Raises HostKeyError: it is unknown, another one, or revoked."""
    key = transport.get_remote_server_key()
    known = find(target)
    for entry in known:
        if entry.revoked and entry.key == key:
            raise HostKeyError(
                f"{target.label}: its host key {_described(key)} is revoked in {entry.file}, line {entry.line}; give the "
                "machine a new host key"
            )
    taken = [entry for entry in known if not entry.revoked]
    for entry in taken:
        if entry.key == key:
            return entry
    for entry in taken:
        if entry.key.get_name() == key.get_name():
            forget = f"ssh-keygen -R {shlex.quote(target.host_key_name)} -f {shlex.quote(str(entry.file))}"
            raise HostKeyError(
                f"{target.label}: its host key has changed: {entry.file}, line {entry.line}, holds {_described(entry.key)}, "
                f"but it offers {_described(key)}; if the machine was set up anew, forget the old key: {forget} and, after "
                f"comparing the fingerprint, add the new one: {_learn(target)} (if it was not, somebody may be in between)"
            )
    also = f" (another type of key of it stands in {taken[0].file}, line {taken[0].line})" if taken else ""
    server_file = f"/etc/ssh/ssh_host_{key.algorithm_name.lower()}_key.pub"
    raise HostKeyError(
        f"{target.label}: its host key {_described(key)} is not known{also}; after comparing the fingerprint with the "
        f"machine's own (ssh-keygen -lf {server_file} there), add it: {_learn(target)}"
    )


def _read(file: Path, name: str) -> Iterator[KnownKey]:
    if not file.exists():
        return
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        words = line.split()
        revoked = words[:1] == ["@revoked"]
        words = words[revoked : revoked + 3]
        # A comment (#old,gpu1 ...) and a line with another marker name no machine.
        if len(words) < 3 or words[0].startswith(("#", "@")) or not _match(words[0].split(","), name):
            continue
        try:
            entry = paramiko.hostkeys.HostKeyEntry.from_line(" ".join(words), number)
        # Odd keys bring many kinds of errors out of paramiko and cryptography.
        except Exception:
            continue
        if entry and entry.key:
            yield KnownKey(file, number, entry.key, revoked)


def _match(patterns: list[str], name: str) -> bool:
    """Whether a line's names mean a name: hashed ones, ``*``, ``?`` and ``!`` as in sshd(8)."""
    name = name.lower()
    if patterns[0].startswith("|1|"):
        try:
            return paramiko.HostKeys.hash_host(name, patterns[0]) == patterns[0]
        except Exception:  # a damaged hash
            return False
    # Brackets stand for themselves here ([host]:port).
    met = [pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern.lower().lstrip("!").replace("[", "[[]"))]
    return bool(met) and not any(pattern.startswith("!") for pattern in met)


def _described(key: paramiko.PKey) -> str:
    """``ED25519 SHA256:...``, as ``ssh-keygen -lf`` prints it."""
    return f"{key.algorithm_name} {key.fingerprint}"


def _learn(target: Target) -> str:
    scan = f"ssh-keyscan -p {target.port} {shlex.quote(target.host)}"
    if target.jump:
        scan = f"ssh -p {target.jump.port} {shlex.quote(f'{target.jump.user}@{target.jump.host}')} {scan}"
    if target.host_key_alias:
        scan += " | sed " + shlex.quote(f"s/^[^ ]*/{target.host_key_alias}/")
    file = target.known_hosts[0] if target.known_hosts else Path.home() / ".ssh" / "known_hosts"
    folder = "" if file.parent.is_dir() else f"mkdir -p {shlex.quote(str(file.parent))} && "
    return f"{folder}{scan} >> {shlex.quote(str(file))}"
