"""Machines of their own made of Linux namespaces: each has its hostname, address, process tree, mounts, home folder and sshd.

    with Machines(tmp_path, [Setup(share=folder)] * 4) as machines:
        machines[0].address, machines.user, machines.key_file, machines.known_hosts
        machines[2].power_off()

They hang on a bridge of this machine, which is the client (``machines.network.client``). They share its disk, so any interpreter is
found under its path (and ``/tmp`` is one folder), its clock and its boot id; nothing else. A machine is a child of the tests: it ends
with them, even if they are killed. What stays then is an empty bridge, which the next run removes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import sshd
from netns_links import Network
from netns_machine import BIN, HOME, PATH, SHARE, Machine, Setup

__all__ = ["BIN", "HOME", "PATH", "SHARE", "Machine", "Machines", "Network", "Setup", "unavailable"]


@functools.cache
def unavailable() -> str | None:
    """Why this machine can't have machines in it, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if reason := sshd.missing():
        return reason
    for program, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")):
        if shutil.which(program) is None:
            return f"no {program} (apt-get install {package})"
    links = "ip link add name bn0 type bridge && ip link add name bn0p1 type veth && ip address add fd00:77::1/64 dev bn0"
    probe = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", links]
    result = subprocess.run(probe, capture_output=True, text=True)
    return f"namespaces, bridges or IPv6 are refused here: {result.stderr.strip()}" if result.returncode else None


class Machines:
    """Machines on one network; on inside ``with``, gone after it.

    Attributes:
        network: the one of ``eth0``.
        user, key_file: who may log in everywhere.
        known_hosts: a file that holds all host keys.
    """

    user = "root"

    def __init__(self, root: Path, setups: Sequence[Setup] = (Setup(),) * 4) -> None:
        self._root, self._setups = root.resolve() / "machines", setups

    def __enter__(self) -> Machines:
        self._root.mkdir(parents=True)
        self.key_file = sshd.make_key(self._root / "id_ed25519")
        with contextlib.ExitStack() as stack:
            self._stack = stack
            self.network = Network()
            stack.callback(self.network.remove)
            self._machines = []
            for number, setup in enumerate(self._setups, 1):
                folder = self._root / f"bnode{number}"
                self._machines.append(Machine(folder, number, self.network, setup, self.key_file))
            self.known_hosts = self._root / "known_hosts"
            self.known_hosts.write_text("".join(machine.known_hosts_lines for machine in self))
            for machine in self:
                stack.callback(machine.power_off)
                machine._unshared()
            for machine in self:
                machine._boot()
            for machine in self:
                machine._wait()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, index: int) -> Machine:
        return self._machines[index]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines)

    def __len__(self) -> int:
        return len(self._machines)
