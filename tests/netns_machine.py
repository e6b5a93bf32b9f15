"""One machine of ``netns.py``: its namespaces, cables and programs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import sshd
from netns_links import Network, ip
from waiting import wait_for

HOME = "/srv/home"
BIN = "/srv/bin"
PATH = f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin"
SHARE = "/mnt/share"
NOBODY = "02:77:00:00:00:00"
STILL = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)

# The first process of a machine: it ends, and all with it, when its standard input does.
INIT = """\
set -eu
cd "$1"; hostname=$2 share=$3 var_tmp=$4
read -r network_is_there
echo "$hostname" > /proc/sys/kernel/hostname
mount -t sysfs sysfs /sys
for folder in /run /mnt /srv /dev/shm; do mount -t tmpfs -o mode=755 tmpfs $folder; done
chmod 1777 /dev/shm
mkdir /run/sshd /srv/home /srv/bin
mount --bind home /srv/home
mount --bind bin /srv/bin
for file in hosts passwd shadow; do mount --bind $file /etc/$file; done
if [ "$var_tmp" = disk ]; then mount --bind var_tmp /var/tmp; else mount -t tmpfs -o mode=1777,size=$var_tmp tmpfs /var/tmp; fi
if [ -n "$share" ]; then mkdir /mnt/share; mount --bind "$share" /mnt/share; fi
if [ -n "$(ls hidden)" ]; then mount -t overlay -o lowerdir=hidden:/usr/bin overlay /usr/bin; fi
cd /
"$5" -D -f "$1/sshd_config" -E "$1/sshd.log" < /dev/null &
read -r power_off || true
"""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a machine is like.

    Attributes:
        share: the folder mounted at /mnt/share; None: there is no such folder.
        var_tmp: the size in bytes of /var/tmp, which is then lost when the power goes; None: it is on the disk and outlives that.
        without: programs of /usr/bin that it lacks (``python3``).
        hosts: further lines of its /etc/hosts.
    """

    share: Path | None = None
    var_tmp: int | None = None
    without: tuple[str, ...] = ()
    hosts: str = ""


class Machine:
    """One machine; it is off until ``Machines`` starts it.

    Attributes:
        hostname: ``bnode1``, ...; Debian's ``127.0.1.1`` line in its /etc/hosts names it.
        address, address6, port: where its sshd listens (on all its interfaces).
        known_hosts_lines: its host key under both addresses.
        folder: its part of the disk: ``home/``, ``bin/``, ``var_tmp/``, ``hosts``, ``sshd.log``, ``init.log``.
        network: that of its ``eth0``.
        share: where it sees the shared folder; ``home``: where its logins start.
    """

    port, share, home = 22, SHARE, HOME

    def __init__(self, folder: Path, number: int, network: Network, setup: Setup, key_file: Path) -> None:
        self.folder, self.hostname, self.setup, self._host = folder, f"bnode{number}", setup, 10 + number
        self.network = network
        self.address, self.address6 = network.address(self._host), network.address6(self._host)
        self._unshare: subprocess.Popen[str] | None = None
        for name in ("home", "bin", "var_tmp", "hidden"):
            (folder / name).mkdir(parents=True)
        (folder / "var_tmp").chmod(0o1777)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {self.hostname}\n{setup.hosts}")
        _accounts(folder)
        for name in setup.without:  # what hides a file of the layer below in an overlay
            os.mknod(folder / "hidden" / name, stat.S_IFCHR, os.makedev(0, 0))
        host_key = sshd.make_key(folder / "host_ed25519")
        kind, text = Path(f"{host_key}.pub").read_text().split()[:2]
        self.known_hosts_lines = "".join(f"{address} {kind} {text}\n" for address in (self.address, self.address6))
        settings = sshd.settings_of(self.port, f"{key_file}.pub", HOME, {"PATH": PATH, "HOME": HOME})
        config = sshd.config_text({"ListenAddress": "0.0.0.0", **settings}, [host_key])
        (folder / "sshd_config").write_text(f"ListenAddress ::\n{config}")

    # Power

    def power_on(self) -> None:
        """Start it; sshd listens when this returns. After ``power_off``: same addresses and host key, nothing running."""
        self._unshared()
        self._boot()
        self._wait()

    def power_off(self) -> None:
        """Cut the power: everything on it dies at once, and nobody hears of it."""
        if self._unshare is None:
            return
        # First the cables: dying processes would close their connections properly.
        ip([f"link delete {self.network.port(self._host)}"], force=True)
        with contextlib.suppress(ProcessLookupError, IndexError, FileNotFoundError):
            os.kill(self.pid, signal.SIGKILL)
        self._unshare.wait(timeout=60)
        assert self._unshare.stdin
        with contextlib.suppress(BrokenPipeError):
            self._unshare.stdin.close()
        self._unshare = None

    def freeze(self) -> None:
        """It hangs: its kernel takes connections, and nothing answers."""
        # Again, for children that came meanwhile.
        while running := [process for process in self._all() if _status(process) not in STILL]:
            _signal(running, signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        _signal(self._all(), signal.SIGCONT)

    def _unshared(self) -> None:
        """Its namespaces, and a first process that waits for the network."""
        assert self._unshare is None, f"{self.hostname} is on"
        namespaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        setup = self.setup
        arguments = [str(self.folder), self.hostname, str(setup.share or ""), str(setup.var_tmp or "disk"), sshd.SSHD]
        with (self.folder / "init.log").open("a") as log:
            self._unshare = subprocess.Popen(
                ["unshare", *namespaces, "bash", "-c", INIT, "init", *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                env={"PATH": PATH},
                cwd="/",
                start_new_session=True,
            )

    def _boot(self) -> None:
        wait_for(lambda: self._children(), what=f"{self.hostname} has its namespaces", pause=0.002)
        ip(["link set lo up"], self.pid)
        self._plug_in()
        assert self._unshare and self._unshare.stdin
        self._unshare.stdin.write("go\n")
        self._unshare.stdin.flush()

    def _wait(self) -> None:
        wait_for(self._listens, what=f"sshd of {self.hostname} listens; its logs are in {self.folder}", pause=0.005)

    def _listens(self) -> bool:
        assert self._unshare
        if self._unshare.poll() is not None:
            logs = [(self.folder / name).read_text() for name in ("init.log", "sshd.log") if (self.folder / name).exists()]
            raise RuntimeError(f"{self.hostname} did not start: {' '.join(logs)}")
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex((self.address, self.port)) == 0

    # Network

    def unplug(self) -> None:
        """Pull the cable: the interface keeps its addresses and has no carrier; connections hang."""
        ip([f"link set {self.network.port(self._host)} down"])

    def plug(self) -> None:
        """Put the cable back."""
        ip([f"link set {self.network.port(self._host)} up"])

    def block(self, other: Machine) -> None:
        """A firewall between it and another machine: what it sends there vanishes, so no connection is made either way."""
        addresses = (other.address, other.address6)
        ip([f"neighbour replace {address} lladdr {NOBODY} dev eth0 nud permanent" for address in addresses], self.pid)

    def unblock(self, other: Machine) -> None:
        """Undo ``block``; a reboot does too."""
        ip([f"neighbour delete {address} dev eth0" for address in (other.address, other.address6)], self.pid)

    def _plug_in(self) -> None:
        network, host = self.network, self._host
        port = network.port(host)
        ip(
            [
                f"link add {port} type veth peer name eth0 address {network.mac(host)} netns {self.pid}",
                f"link set {port} master {network.bridge} up",
            ]
        )
        ip(
            [
                f"address add {self.address}/24 dev eth0",
                f"address add {self.address6}/64 dev eth0 nodad",
                "link set eth0 up",
            ],
            self.pid,
        )

    # Programs

    @property
    def pid(self) -> int:
        """Its first process, as seen from here; IndexError if it is off."""
        return self._children()[0]

    def inside(self, argv: Sequence[str | Path]) -> list[str]:
        """The argv that runs another one on it as a login would: its folder, its environment, nothing of ours."""
        environment = ["env", "-i", "-C", HOME, f"HOME={HOME}", f"PATH={PATH}", "USER=root", "LOGNAME=root"]
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", *environment, *map(str, argv)]

    def run(self, argv: Sequence[str | Path], timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program on it, without SSH, to its end."""
        return subprocess.run(
            self.inside(argv),
            capture_output=True,
            text=True,
            timeout=timeout,
            env={"PATH": os.defpath + ":/usr/sbin"},
            **options,
        )

    def processes(self) -> list[psutil.Process]:
        """What runs on it besides its first process and sshd; pids as seen from here."""
        found = []
        for process in self._all():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() != "sshd" and _status(process) != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _all(self) -> list[psutil.Process]:
        if self._unshare is None:
            return []
        first = self.pid
        tree = os.readlink(f"/proc/{first}/ns/pid")
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if pid != first and os.readlink(f"/proc/{pid}/ns/pid") == tree:
                    found.append(psutil.Process(pid))
        return found

    def _children(self) -> list[int]:
        if self._unshare is None:
            return []
        pid = self._unshare.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _accounts(folder: Path) -> None:
    """The accounts of this machine, with root's home the machine's own and its password login not locked."""
    lines = Path("/etc/passwd").read_text().splitlines()
    others = [line for line in lines if not line.startswith("root:")]
    (folder / "passwd").write_text("\n".join([f"root:x:0:0:root:{HOME}:/bin/bash", *others]) + "\n")
    (folder / "shadow").write_text("root:*:19000:0:99999:7:::\nsshd:!:19000::::::\n")
