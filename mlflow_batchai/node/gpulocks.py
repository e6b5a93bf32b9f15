"""GPUs are taken, never double-booked: whoever has one holds its name, and the kernel lets a name be had once.

A node's lock keeps jobs of one cluster apart. Other clusters, clients and users of the same machine have other nodes, and
the same GPUs. A name is an abstract Unix socket: it needs no file that all users may write, and goes with the last process
that holds it, however that ends; ranks inherit it.
"""

import contextlib
import os
import pwd
import socket
import struct
from typing import Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set

_PREFIX = "\0batchai-gpu-"
_GATE = "\0batchai-gpus"
# Askers are never answered; each takes a place until the holder is gone.
_ASKERS = 64


class Taken(NamedTuple):
    """GPUs that were taken, and the descriptors that hold them."""

    ids: List[str]
    descriptors: List[int]


def held(ids: Iterable[str]) -> Set[str]:
    """Those of some GPUs that somebody holds."""
    return {name for name in ids if _is_held(_PREFIX + name)}


def take(ids: Sequence[str], others: Sequence[str], node: str, gang: Mapping[str, int]) -> Optional[Taken]:
    """Take as many GPUs as ``ids`` are, rather those than others.

    A node takes none while not all nodes of its job on this machine, as far as they have none yet, could have theirs: two jobs
    that each had half of the GPUs would wait for each other for ever.

    Args:
        node: names this node of the job, among all jobs of the machine.
        gang: node -> GPUs that it wants, of the job's nodes on this machine.

    Returns:
        None if that can't be now: to be tried again.
    """
    with contextlib.ExitStack() as closing:
        if not _enter(closing, _GATE):
            return None
        free = {name: bound for name in [*ids, *others] if (bound := _enter(closing, _PREFIX + name))}
        need = sum(count for name, count in gang.items() if not _is_held(_PREFIX + name))
        flag = _enter(closing, _PREFIX + node)
        if len(free) < need or flag is None:
            return None
        chosen = list(free)[: len(ids)]
        descriptors = []
        for bound in [flag, *(free[name] for name in chosen)]:
            bound.listen(_ASKERS)
            kept = os.dup(bound.fileno())
            os.set_inheritable(kept, True)
            descriptors.append(kept)
        return Taken(chosen, descriptors)


def holders(ids: Iterable[str]) -> List[str]:
    """Who holds some GPUs, for people: ``pid 4711 of ann`` each."""
    found = {who for name in ids if (who := _holder(_PREFIX + name))}
    return sorted(found)


def _enter(closing: contextlib.ExitStack, name: str) -> Optional[socket.socket]:
    """Hold a name until ``closing`` ends; None if somebody has it."""
    bound = closing.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)))
    try:
        bound.bind(name)
    except OSError:
        return None
    return bound


def _is_held(name: str) -> bool:
    with contextlib.ExitStack() as closing:
        return _enter(closing, name) is None


def _holder(name: str) -> str:
    """Who made a name listen; empty if that can't be told."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as asking:
        asking.setblocking(False)
        try:
            asking.connect(name)
            pid, uid, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        except OSError:
            return ""
    try:
        return "pid %d of %s" % (pid, pwd.getpwuid(uid).pw_name)
    except KeyError:
        return "pid %d of uid %d" % (pid, uid)
