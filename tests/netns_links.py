"""Bridges of this machine, on which the machines of ``netns.py`` hang."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

OWNER = "mlflow-batchai-tests"


def ip(lines: Sequence[str], pid: int | None = None, force: bool = False) -> None:
    """Run lines of ``ip -batch`` here or in a process's network; ``force`` goes on after a line that fails."""
    inside = ["nsenter", f"--net=/proc/{pid}/ns/net"] if pid else []
    argv = [*inside, "ip", *(["-force"] if force else []), "-batch", "-"]
    result = subprocess.run(argv, input="\n".join(lines) + "\n", capture_output=True, text=True)
    if result.returncode and not force:
        raise RuntimeError(f"ip: {result.stderr.strip()}, of {list(lines)}")


class Network:
    """A bridge of this machine with its own addresses: ``10.77.N.0/24`` and ``fd00:77:N::/64``, N not in use before.

    Attributes:
        bridge: its interface here.
        client: this machine's address on it.
    """

    def __init__(self) -> None:
        _remove_dead()
        taken = [address.address for addresses in psutil.net_if_addrs().values() for address in addresses]
        for number in random.SystemRandom().sample(range(1, 255), 254):
            if any(address.startswith(f"10.77.{number}.") for address in taken):
                continue
            self.bridge, self._number = f"bn{number}", number
            with contextlib.suppress(RuntimeError):  # of two who want the same name, one gets it
                ip([f"link add {self.bridge} type bridge mcast_snooping 0"])
                break
        else:
            raise RuntimeError("no free network among 10.77.1.0 to 10.77.254.0")
        self.client = self.address(1)
        ip(
            [
                f"link set {self.bridge} alias {OWNER}:{os.getpid()}",
                f"address add {self.client}/24 dev {self.bridge}",
                f"address add {self.address6(1)}/64 dev {self.bridge} nodad",
                f"link set {self.bridge} up",
            ]
        )

    def address(self, host: int) -> str:
        return f"10.77.{self._number}.{host}"

    def address6(self, host: int) -> str:
        return f"fd00:77:{self._number}::{host}"

    def mac(self, host: int) -> str:
        return f"02:77:00:00:{self._number:02x}:{host:02x}"

    def port(self, host: int) -> str:
        """The bridge's end of a machine's cable."""
        return f"{self.bridge}p{host}"

    def remove(self) -> None:
        ip([f"link delete {self.bridge}"], force=True)


def _remove_dead() -> None:
    """Remove bridges whose tests were killed."""
    for path in Path("/sys/class/net").glob("bn*/ifalias"):
        with contextlib.suppress(OSError):
            owner, _, pid = path.read_text().strip().partition(":")
            if owner == OWNER and not psutil.pid_exists(int(pid)):
                ip([f"link delete {path.parent.name}"], force=True)
