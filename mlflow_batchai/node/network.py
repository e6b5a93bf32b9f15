"""Addresses of this node, as its peers can reach it."""

import socket


def own_address() -> str:
    """The address that this machine uses towards others; loopback where it has no route anywhere.

    Asking the kernel for a route sends nothing; the hostname is not asked, since Debian maps it to 127.0.1.1.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address (RFC 5737)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
