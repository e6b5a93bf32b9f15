"""This machine's IPv4 interfaces, and a TCP test between nodes.

Horovod needs IPv4: its rendezvous client knows nothing else (0.28.1, ``third_party/HTTPRequest``). Its gloo is given the name
of an interface and binds the first address in getifaddrs' order (``transport/tcp/device.cc``), which SIOCGIFADDR returns.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import socketserver
import struct
import threading
from typing import Any, NamedTuple

from mlflow_batchai.agent.processes import proc

Interface = dict[str, Any]

LOOPBACK: Interface = {"name": "lo", "address": "127.0.0.1"}
PROBE_SECONDS = 5.0
NO_ANSWER = "no answer"

# linux/if.h and linux/sockios.h
_UP, _LOOPBACK, _POINT_TO_POINT = 0x1, 0x8, 0x10
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_REASONS = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "refused",
    errno.ETIMEDOUT: NO_ANSWER,
    errno.ENETUNREACH: "no route",
    errno.EHOSTUNREACH: "no route",
}


class InterfaceError(Exception):
    """An interface can't be used; the message continues a sentence that begins with the node's name."""


def machine() -> str:
    """The id of this network stack: agents with the same id reach each other on loopback. An unknown id differs each time.

    Machines that were cloned while they ran share the boot id; their addresses differ.
    """
    addresses = [f"{name}={each.address}" for name, each in sorted(_all().items()) if not each.flags & _LOOPBACK]
    boot = proc.boot_id()
    try:
        stack = os.readlink("/proc/self/ns/net")
    except OSError:
        stack = ""
    return " ".join([boot, stack, *addresses]) if boot and stack else os.urandom(16).hex()


def port_range() -> str:
    """The ports that the kernel gives to listeners without a port of their own, gloo's for example, as ``32768-60999``."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            return "-".join(file.read().split())
    except OSError:
        return "1024-65535"


def interfaces(only: str | None = None) -> list[Interface]:
    """The interfaces that other nodes might reach, each ``{"name", "address"}`` with the address that gloo binds.

    They are up, have an IPv4 address and are not loopback; point-to-point interfaces (VPNs) come last.

    Args:
        only: the name of one interface: the result is this one, even if it is loopback.

    Raises:
        InterfaceError: there is no interface of that name, or it is down or has no IPv4 address.
    """
    found = _all()
    if only is None:
        usable = [name for name, each in found.items() if not each.trouble and not each.flags & _LOOPBACK]
        usable.sort(key=lambda name: bool(found[name].flags & _POINT_TO_POINT))
    elif only in found and not found[only].trouble:
        usable = [only]
    else:
        listed = ", ".join(f"{name} ({each.trouble or each.address})" for name, each in found.items()) or "none"
        verb = "can't use its" if only in found else "has no"
        raise InterfaceError(f"{verb} network interface {only}; it has {listed}")
    return [{"name": name, "address": found[name].address} for name in usable]


class _State(NamedTuple):
    flags: int
    address: str

    @property
    def trouble(self) -> str:
        if not self.flags & _UP:
            return "down"
        return "" if self.address else "no IPv4 address, which Horovod needs"


def _all() -> dict[str, _State]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:

        def ask(request: int, name: str) -> bytes:
            return fcntl.ioctl(any_socket.fileno(), request, struct.pack("256s", os.fsencode(name)))

        found = {}
        for _, name in socket.if_nameindex():
            try:
                flags = int(struct.unpack_from("H", ask(_SIOCGIFFLAGS, name), 16)[0])
            except OSError:  # the interface has just been removed
                continue
            try:
                address = socket.inet_ntoa(ask(_SIOCGIFADDR, name)[20:24])
            except OSError:
                address = ""
            found[name] = _State(flags, address)
        return found


class Listener(socketserver.TCPServer):
    """A thread that sends a token, as one line, to each client that connects to any IPv4 address of this machine.

    It reads nothing, so a stranger learns the token (which is no secret) and can do no more.

    Attributes:
        port: where it listens.
    """

    request_queue_size = 256

    def __init__(self, token: str) -> None:
        super().__init__(("0.0.0.0", 0), socketserver.BaseRequestHandler)
        self.port: int = self.server_address[1]
        self._line = _line(token)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="network listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer; the buffer of a new connection holds the line, so this never waits."""
        request.sendall(self._line)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that its client has closed already."""


def connect(address: str, port: int, token: str, seconds: float = PROBE_SECONDS) -> tuple[str, str]:
    """Connect to another node's ``Listener``.

    Returns:
        (why it can't be reached, in a few words, or empty; this machine's address of the connection, or empty).
    """
    line = _line(token)
    try:
        with socket.create_connection((address, port), seconds) as connection, connection.makefile("rb") as answer:
            if answer.readline(len(line)) != line:
                return "another program answers there", ""
            return "", str(connection.getsockname()[0])
    except socket.timeout:
        return NO_ANSWER, ""
    except OSError as error:
        return _REASONS.get(error.errno or 0) or (error.strerror or str(error)).lower(), ""


def _line(token: str) -> bytes:
    return (token + "\n").encode("utf-8", "backslashreplace")
