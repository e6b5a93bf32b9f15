"""One sentence for each way in which a node can't be reached: which node, what was wrong, what to do."""

from __future__ import annotations

import errno
import shlex
import socket
from pathlib import Path

from mlflow_batchai.engines.shell.errors import HostKeyError
from mlflow_batchai.engines.shell.known_hosts import Entry, fingerprint
from mlflow_batchai.engines.shell.targets import Target
from mlflow_batchai.errors import ClusterError


def label(target: Target, noun: str = "node") -> str:
    """How a sentence names a machine."""
    return f"{noun} {target.name} ({target.address})"


def unresolved(target: Target, noun: str) -> ClusterError:
    """Its name has no address."""
    return ClusterError(
        f"{label(target, noun)}: the name {target.host} can't be resolved; correct it, or give it an address with HostName "
        "in ~/.ssh/config"
    )


def timed_out(target: Target, noun: str, seconds: float) -> ClusterError:
    """Nothing answers at its address."""
    return ClusterError(
        f"{label(target, noun)} did not answer within {seconds:g} s; check that the machine is up and port {target.port} is "
        "open"
    )


def silent(target: Target, noun: str, seconds: float) -> ClusterError:
    """It takes connections and says nothing."""
    return ClusterError(
        f"{label(target, noun)} takes connections but did not answer as an SSH server within {seconds:g} s; check that port "
        f"{target.port} is sshd's and that the machine is not overloaded"
    )


def hung_up(target: Target, noun: str, detail: str) -> ClusterError:
    """It closed the connection before anybody could log in."""
    said = f" ({detail})" if detail else ""
    return ClusterError(
        f"{label(target, noun)} closed the connection before the login{said}; check that port {target.port} is sshd's, and "
        "its log there (MaxStartups, a deny list)"
    )


def incompatible(target: Target, noun: str, detail: str) -> ClusterError:
    """No algorithms in common, or not the SSH protocol."""
    return ClusterError(
        f"{label(target, noun)} can't be talked to: {detail}; check that port {target.port} is sshd's and that OpenSSH there "
        "is not older than 7.2"
    )


def not_connected(target: Target, noun: str, error: OSError, seconds: float) -> ClusterError:
    """What the socket's error means."""
    if isinstance(error, socket.gaierror):
        return unresolved(target, noun)
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return timed_out(target, noun, seconds)
    if error.errno == errno.ECONNREFUSED:
        return ClusterError(
            f"{label(target, noun)} refused the connection; check that sshd runs there and listens on port {target.port}"
        )
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return hung_up(target, noun, "")
    return ClusterError(
        f"{label(target, noun)} can't be reached: {error.strerror or error}; check that the machine is up and port "
        f"{target.port} is open"
    )


def through_proxy_command(target: Target, noun: str, detail: str) -> ClusterError:
    """The user's ProxyCommand doesn't lead there."""
    said = f" ({detail})" if detail else ""
    return ClusterError(
        f"{label(target, noun)} can't be reached through its ProxyCommand{said}; try that command by hand: "
        f"{target.proxy_command}"
    )


def through_jump(target: Target, noun: str, error: ClusterError) -> ClusterError:
    """The machine before it failed."""
    return type(error)(f"{label(target, noun)} can't be reached: {error}")


def not_forwarded(target: Target, noun: str, jump: Target, code: int, text: str) -> ClusterError:
    """The machine before it is fine, but its way on is not."""
    through = f"{label(target, noun)} can't be reached from {label(jump, 'jump host')}"
    if code == 1:
        return ClusterError(f"{through}: it doesn't forward connections; set AllowTcpForwarding yes in its sshd_config")
    return ClusterError(
        f"{through}: {text}; check that {target.host} is right as seen from there, is up and has port {target.port} open"
    )


def unreadable_known_hosts(target: Target, noun: str, error: OSError) -> HostKeyError:
    """Whether its key is known can't be found out."""
    return HostKeyError(
        f"{label(target, noun)}: the file of known host keys {error.filename} can't be read: {error.strerror}; make it "
        "readable, or name another"
    )


def unknown_host_key(target: Target, noun: str, kind: str, key: bytes, others: list[Entry]) -> HostKeyError:
    """No file holds its key."""
    also = f" (another type of key of it stands in {others[0].file}, line {others[0].line})" if others else ""
    return HostKeyError(
        f"{label(target, noun)}: its host key {_short(kind)} {fingerprint(key)} is not known{also}; after comparing the "
        f"fingerprint with the machine's own (ssh-keygen -lf {_server_file(kind)} there), add it: {_learn(target)}"
    )


def changed_host_key(target: Target, noun: str, kind: str, key: bytes, known: Entry) -> HostKeyError:
    """A file holds another key of it."""
    forget = f"ssh-keygen -R {shlex.quote(target.host_key_name)} -f {shlex.quote(str(known.file))}"
    return HostKeyError(
        f"{label(target, noun)}: its host key has changed: {known.file}, line {known.line}, holds {_short(known.kind)} "
        f"{fingerprint(known.key)}, but it offers {_short(kind)} {fingerprint(key)}; if the machine was set up anew, forget "
        f"the old key: {forget} and, after comparing the fingerprint, add the new one: {_learn(target)} (if it was not, "
        "somebody may be in between)"
    )


def revoked_host_key(target: Target, noun: str, kind: str, known: Entry) -> HostKeyError:
    """A file says that its key must not be taken."""
    return HostKeyError(
        f"{label(target, noun)}: its host key {_short(kind)} {fingerprint(known.key)} is revoked in {known.file}, line "
        f"{known.line}; give the machine a new host key"
    )


def known_host_key(known: Entry) -> str:
    """Its key, and where it stands."""
    return f"{_short(known.kind)} {fingerprint(known.key)} ({known.file}, line {known.line})"


def _short(kind: str) -> str:
    """ED25519, RSA or ECDSA."""
    return kind.removeprefix("ssh-").split("-")[0].upper()


def _server_file(kind: str) -> str:
    return f"/etc/ssh/ssh_host_{_short(kind).lower()}_key.pub"


def _learn(target: Target) -> str:
    """The line that adds its host keys to the user's file."""
    scan = f"ssh-keyscan -p {target.port} {shlex.quote(target.host)}"
    if target.jump:
        scan = f"ssh -p {target.jump.port} {shlex.quote(f'{target.jump.user}@{target.jump.host}')} {scan}"
    if target.host_key_alias:
        scan += " | sed " + shlex.quote(f"s/^[^ ]*/{target.host_key_alias}/")
    file = target.known_hosts[0] if target.known_hosts else Path.home() / ".ssh" / "known_hosts"
    folder = "" if file.parent.is_dir() else f"mkdir -p {shlex.quote(str(file.parent))} && "
    return f"{folder}{scan} >> {shlex.quote(str(file))}"
