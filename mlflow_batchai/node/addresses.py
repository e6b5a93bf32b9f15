"""The addresses of this machine's interfaces, in the order in which the C library lists them."""

import fcntl
import os
import socket
import struct
from typing import Any, Iterator, List, NamedTuple, Optional

# linux/if.h and linux/sockios.h
_UP, _LOOPBACK, _POINT_TO_POINT = 0x1, 0x8, 0x10
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915


class Found(NamedTuple):
    """An interface and one of its IP addresses, or None for a line that has none."""

    name: str
    flags: int
    address: Optional[str]

    @property
    def is_loopback(self) -> bool:
        return bool(self.flags & _LOOPBACK)

    @property
    def is_point_to_point(self) -> bool:
        return bool(self.flags & _POINT_TO_POINT)

    @property
    def trouble(self) -> Optional[str]:
        """Why nobody can be reached through it (a few words), or None."""
        if not self.flags & _UP:
            return "down"
        if self.address is None:
            return "no address"
        if ":" in self.address and self.address.lower().startswith(("fe8", "fe9", "fea", "feb")):
            # It means nothing without the number that an interface has on its own node, which gloo doesn't translate.
            return "only the link-local address %s" % self.address
        return None


def all_addresses() -> List[Found]:
    """Every address of every interface in getifaddrs' order, and interfaces that have none.

    Where Python has no ctypes: the first IPv4 address of each interface, which is the same one, and IPv6 ones in the
    kernel's order, which needn't be.
    """
    try:
        import ctypes
    except ImportError:
        return list(_by_ioctl())
    return list(_by_getifaddrs(ctypes))


def _by_getifaddrs(ctypes: Any) -> Iterator[Found]:
    class IfAddrs(ctypes.Structure):  # type: ignore[misc]
        """``struct ifaddrs`` as far as it is read (getifaddrs(3))."""

    IfAddrs._fields_ = [
        ("next", ctypes.POINTER(IfAddrs)),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    ]

    def text(address: Optional[int]) -> Optional[str]:
        if not address:
            return None
        family = ctypes.c_ushort.from_address(address).value
        if family == socket.AF_INET:  # struct sockaddr_in
            return socket.inet_ntop(family, ctypes.string_at(address + 4, 4))
        if family == socket.AF_INET6:  # struct sockaddr_in6
            return socket.inet_ntop(family, ctypes.string_at(address + 8, 16))
        return None

    library = ctypes.CDLL(None, use_errno=True)
    start = ctypes.POINTER(IfAddrs)()
    if library.getifaddrs(ctypes.byref(start)) != 0:
        raise OSError(ctypes.get_errno(), "network interfaces can't be listed")
    try:
        at = start
        while at:
            yield Found(os.fsdecode(at.contents.name), at.contents.flags, text(at.contents.address))
            at = at.contents.next
    finally:
        library.freeifaddrs(start)


def _by_ioctl() -> Iterator[Found]:
    names = [name for _, name in socket.if_nameindex()]
    flags = {name: int(struct.unpack_from("H", _ioctl(_SIOCGIFFLAGS, name), 16)[0]) for name in names}
    for name in names:
        try:
            yield Found(name, flags[name], socket.inet_ntoa(_ioctl(_SIOCGIFADDR, name)[20:24]))
        except OSError:
            yield Found(name, flags[name], None)
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except FileNotFoundError:  # IPv6 is switched off
        return
    for digits, _, _, _, _, name in sorted(lines, key=lambda line: int(line[3], 16)):  # the wider scope first
        yield Found(name, flags[name], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))


def _ioctl(request: int, name: str) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return fcntl.ioctl(any_socket.fileno(), request, struct.pack("256s", os.fsencode(name)))
