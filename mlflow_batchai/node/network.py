"""This machine's network interfaces, as Horovod's gloo would use them.

gloo is told an interface by name and binds its first address in getifaddrs' order (gloo, ``transport/tcp/device.cc``, as in
Horovod 0.28.1). Nothing here knows of jobs or plans.
"""

import os
from typing import Any, Dict, List, Optional

from mlflow_batchai.node import processes
from mlflow_batchai.node.addresses import Found, all_addresses

Interface = Dict[str, Any]

LOOPBACK: Interface = {"name": "lo", "address": "127.0.0.1", "family": 4}


class InterfaceError(Exception):
    """An interface can't be used; the message continues a sentence that begins with the node's name."""


def machine() -> str:
    """Names this network stack: agents that say the same reach each other on loopback. What can't be told differs always.

    Machines that were cloned while they ran share the boot id; their addresses differ.
    """
    addresses = sorted("%s=%s" % (each.name, each.address) for each in all_addresses() if not each.is_loopback)
    boot = processes.boot_id()
    try:
        stack = os.readlink("/proc/self/ns/net")
    except OSError:
        stack = ""
    return " ".join([boot, stack, *addresses]) if boot and stack else os.urandom(16).hex()


def port_range() -> str:
    """The ports that the kernel gives to who asks for just any, as ``32768-60999``: gloo's listeners are among them."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            return "-".join(file.read().split())
    except OSError:
        return "1024-65535"


def interfaces(only: Optional[str] = None) -> List[Interface]:
    """Interfaces that other nodes might reach, each ``{"name", "address", "family": 4 or 6}`` with the address gloo binds.

    Those that are up, not loopback, and have more than a link-local IPv6 address; point-to-point ones (VPNs) come last.

    Args:
        only: the name of one: just that, be it loopback.

    Raises:
        InterfaceError: there is no interface of that name, or it is down or without an address.
    """
    found = _first_addresses()
    if only is None:
        usable = [each for each in found if not each.is_loopback and not each.trouble]
        return [_interface(each) for each in sorted(usable, key=lambda each: each.is_point_to_point)]
    named = [each for each in found if each.name == only]
    if named and not named[0].trouble:
        return [_interface(named[0])]
    all_of_them = ", ".join("%s (%s)" % (each.name, each.trouble or each.address) for each in found) or "none"
    if named:
        raise InterfaceError("can't use its network interface %s; it has %s" % (only, all_of_them))
    raise InterfaceError("has no network interface %s; it has %s" % (only, all_of_them))


def _interface(found: Found) -> Interface:
    return {"name": found.name, "address": found.address, "family": 6 if ":" in str(found.address) else 4}


def _first_addresses() -> List[Found]:
    """Every interface once, in the order of getifaddrs."""
    found: Dict[str, Found] = {}
    for each in all_addresses():
        if each.name not in found or found[each.name].address is None:
            found[each.name] = each
    return list(found.values())
