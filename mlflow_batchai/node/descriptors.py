"""How many file descriptors this process may open, where one is needed for each of many peers."""

import contextlib
import os
import resource
import sys
from typing import Iterator

# What the rest of the process may need meanwhile.
SPARE = 64


def free() -> int:
    """How many more may be open at once, at least 1."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, soft - _open() - SPARE)


@contextlib.contextmanager
def more(count: int) -> Iterator[None]:
    """Have that many ``free`` for a while, as far as the hard limit lets us; afterwards the limit is the old one again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _open() + SPARE + count
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or raised <= soft:
        yield
        return
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _open() -> int:
    return len(os.listdir("/proc/self/fd"))
