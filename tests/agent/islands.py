"""Network stacks of their own made of Linux namespaces, joined by bridges that stand in one more: nothing shows on this machine.

Each has its own interfaces, hostname and /etc/hosts, and ends with the tests, even if they are killed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

HOSTS = "127.0.0.1 localhost\n127.0.1.1 {host}\n::1 localhost\n"  # as Debian's installer writes it


class Island:
    """One network stack.

    Attributes:
        enter: what to put before an argument list to run it there.
    """

    def __init__(self, host: str, folder: Path) -> None:
        hosts = folder / f"hosts-{host}"
        hosts.write_text(HOSTS.format(host=host))
        script = 'hostname "$1"; mount --bind "$2" /etc/hosts; ip link set lo up; echo; exec cat'
        self.host = host
        # It ends when its input closes: with the process that made it, at the latest.
        self._process = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", script, "sh", host, str(hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout and self._process.stdout.readline() == b"\n"
        self.pid = self._process.pid
        self.enter = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount"]

    def run(self, *argv: str) -> str:
        """Run a program there; what it wrote."""
        done = subprocess.run([*self.enter, *argv], capture_output=True, text=True)
        assert done.returncode == 0, f"{self.host}: {argv}: {done.stderr}"
        return done.stdout

    def ip(self, line: str) -> None:
        """Run ``ip`` there."""
        self.run("ip", *line.split())

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


class Islands:
    """Some islands, ``island-0`` and so on, not connected yet."""

    def __init__(self, folder: Path, count: int) -> None:
        self._switch = Island("switch", folder)
        self._all = [Island(f"island-{number}", folder) for number in range(count)]
        self._networks = 0

    def __getitem__(self, number: int) -> Island:
        return self._all[number]

    def connect(self, device: str, addresses: list[str], cut: bool = False) -> None:
        """Give every island an interface with an address (``10.0.0.1/24``) on one more network.

        Args:
            cut: the network doesn't connect: nothing comes through.
        """
        number, self._networks = self._networks, self._networks + 1
        self._switch.ip(f"link add name br{number} type bridge mcast_snooping 0")
        self._switch.ip(f"link set br{number} up")
        for index, (island, address) in enumerate(zip(self._all, addresses, strict=True)):
            self._switch.ip(f"link add name p{number}-{index} type veth peer name {device} netns {island.pid}")
            if not cut:
                self._switch.ip(f"link set p{number}-{index} master br{number}")
            self._switch.ip(f"link set p{number}-{index} up")
            island.ip(f"address add {address} dev {device}" + (" nodad" if ":" in address else ""))
            island.ip(f"link set {device} up")

    def close(self) -> None:
        for island in [*self._all, self._switch]:
            island.close()
