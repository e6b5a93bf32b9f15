"""Four real OpenSSH servers on this machine, each a node with its own address, home folder and host key.

    @pytest.fixture(scope="module")
    def nodes(tmp_path_factory):
        with ssh_nodes(tmp_path_factory.mktemp("ssh")) as made:
            yield made

    nodes[0].address, nodes.port, nodes.user, nodes.key_file, nodes.known_hosts

They log in the user who runs the tests, with ``HOME`` (and the folder in which commands start) set to the node's own empty one.
A test that stops or freezes a node starts or thaws it again.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest
from waiting import freeze, wait_for

SSHD = "/usr/sbin/sshd"
ADDRESSES = ("127.0.0.11", "127.0.0.12", "127.0.0.13", "127.0.0.14")


def missing() -> str | None:
    """Why no server can be started on this machine, or None."""
    if not Path(SSHD).is_file():
        return f"no {SSHD} (apt-get install openssh-server)"
    return None if shutil.which("ssh-keygen") else "no ssh-keygen (apt-get install openssh-client)"


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """A new key pair: ``path`` and ``path``.pub."""
    size = ["-b", "2048"] if kind == "rsa" else []
    subprocess.run(["ssh-keygen", "-q", "-t", kind, *size, "-N", passphrase, "-C", path.name, "-f", str(path)], check=True)
    return path


# A server that has not started yet holds its port by this.
_given: set[int] = set()


def free_port(addresses: Sequence[str] = ADDRESSES) -> int:
    """A port below the ephemeral range that is free on all the addresses; another one each time."""
    for port in random.SystemRandom().sample(sorted({*range(20000, 32000)} - _given), 50):
        try:
            with contextlib.ExitStack() as stack:
                for address in addresses:
                    probe = stack.enter_context(socket.socket())
                    # As sshd does, so that connections that have ended don't count.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((address, port))
        except OSError:
            continue
        _given.add(port)
        return port
    raise AssertionError(f"no free port on {addresses}")


def settings_of(port: int, authorized_keys: Path | str, home: Path | str, environment: Mapping[str, str]) -> dict[str, str]:
    """The lines of a server's sshd_config that all our servers have."""
    return {
        "Port": str(port),
        "AuthorizedKeysFile": str(authorized_keys),
        "PidFile": "none",
        "LogLevel": "VERBOSE",
        "UsePAM": "no",
        "StrictModes": "no",
        "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "MaxStartups": "200:30:300",
        "MaxSessions": "100",
        "PrintMotd": "no",
        "Subsystem": f"sftp internal-sftp -d {home}",
        # One line: of several sshd heeds the first.
        "SetEnv": " ".join(f'"{name}={value}"' for name, value in environment.items()),
    }


def config_text(settings: Mapping[str, str | None], host_keys: Iterable[Path]) -> str:
    """An sshd_config."""
    lines = [f"{name} {value}" for name, value in settings.items() if value is not None]
    return "\n".join([*lines, *(f"HostKey {key}" for key in host_keys)]) + "\n"


class SshNode:
    """One server.

    Attributes:
        name: ``node0``, ...
        address, port, user: where and as whom to log in.
        key_file: a private key that it lets in; ``known_hosts``: a file that holds its host keys.
        home: ``$HOME`` of what runs there; ``log``: the server's log.
        host_keys: its host keys, by type; ``authorized_keys``: whom it lets in (a file to append to).

    Args:
        options: lines of its sshd_config in place of ours; None takes one out.
        prefix: a command that starts the server (``unshare --mount ...``).
    """

    def __init__(
        self,
        root: Path,
        address: str,
        port: int,
        key_file: Path,
        known_hosts: Path,
        kinds: Sequence[str] = ("ed25519",),
        environment: Mapping[str, str] | None = None,
        options: Mapping[str, str | None] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        root.mkdir(parents=True)
        root = root.resolve()
        self.name, self.address, self.port, self.user = root.name, address, port, getpass.getuser()
        self.key_file, self.known_hosts = key_file, known_hosts
        self.home, self.log = root / "home", root / "sshd.log"
        self.home.mkdir(mode=0o700)
        # Debian's bash reads this for commands over SSH: they start where a login of this node would.
        (self.home / ".bashrc").write_text('cd "$HOME"\n')
        self.host_keys = {kind: make_key(root / f"host_{kind}", kind) for kind in kinds}
        self.authorized_keys = root / "authorized_keys"
        shutil.copy(f"{key_file}.pub", self.authorized_keys)
        self._config = root / "sshd_config"
        variables = {"HOME": str(self.home), **(environment or {})}
        settings: dict[str, str | None] = {
            "ListenAddress": address,
            **settings_of(port, self.authorized_keys, self.home, variables),
            **(options or {}),
        }
        self._config.write_text(config_text(settings, self.host_keys.values()))
        self._prefix = list(prefix)
        self._server: subprocess.Popen[bytes] | None = None
        self.learn()
        self.start()

    def learn(self) -> None:
        """Write its host keys to the known_hosts file."""
        with self.known_hosts.open("a") as file:
            for key in self.host_keys.values():
                kind, text = Path(f"{key}.pub").read_text().split()[:2]
                file.write(f"[{self.address}]:{self.port} {kind} {text}\n")

    def start(self) -> None:
        """Start the server, or start it again at the same address; it listens when this returns."""
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        # The server ends with the tests, even if they are killed.
        setpriv = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        self._server = subprocess.Popen(
            [*setpriv, *self._prefix, SSHD, "-D", "-f", str(self._config), "-E", str(self.log)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_for(self._listens, what=f"sshd of {self.name} listens; its log is {self.log}")

    def _listens(self) -> bool:
        assert self._server
        if self._server.poll() is not None:
            raise AssertionError(f"sshd of {self.name} ended: {self.log.read_text()}")
        with contextlib.suppress(OSError), socket.create_connection((self.address, self.port), 1):
            return True
        return False

    def sessions(self) -> list[psutil.Process]:
        """The server's processes for its connections (not what runs in them)."""
        if self._server is None:
            return []
        found = []
        for process in psutil.Process(self._server.pid).children(recursive=True):
            try:
                if process.name().startswith("sshd"):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def drop(self) -> None:
        """Drop every connection, as a broken network does: no goodbye; commands without a terminal go on."""
        _kill(self.sessions())

    def stop(self) -> None:
        """The node goes away: its connections are dropped, new ones are refused."""
        if self._server is None:
            return
        sessions = self.sessions()
        # KILL: a frozen server would not heed TERM.
        self._server.kill()
        self._server.wait()
        _kill(sessions)
        self._server = None

    def freeze(self) -> None:
        """The node hangs: connections are taken by its kernel, and nothing answers."""
        assert self._server
        for pid in (self._server.pid, *(process.pid for process in self.sessions())):
            with contextlib.suppress(ProcessLookupError):
                freeze(pid)

    def thaw(self) -> None:
        """The node goes on."""
        assert self._server
        for pid in (self._server.pid, *(process.pid for process in self.sessions())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_for(lambda: all(_gone(process) for process in processes), what="sshd's processes end")


def _gone(process: psutil.Process) -> bool:
    # A zombie counts: whoever inherits it may take seconds to notice.
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class SshNodes:
    """Several servers on one port: one key lets in everywhere, one known_hosts file knows them all.

    Attributes:
        nodes: the servers; ``nodes[0]`` is ``self[0]``.
        port, user, key_file, known_hosts: the same for all.
    """

    def __init__(self, root: Path, count: int = 4, environment: Mapping[str, str] | None = None) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.user = getpass.getuser()
        self.key_file = make_key(root / "id_ed25519")
        self.known_hosts = root / "known_hosts"
        self.nodes: list[SshNode] = []
        try:
            for number, address in enumerate(ADDRESSES[:count]):
                folder = root / f"node{number}"
                self.nodes.append(SshNode(folder, address, self.port, self.key_file, self.known_hosts, environment=environment))
        except BaseException:
            self.stop()
            raise

    def __getitem__(self, number: int) -> SshNode:
        return self.nodes[number]

    def __iter__(self) -> Iterator[SshNode]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def stop(self) -> None:
        """Stop all; nothing of them is left running."""
        for node in self.nodes:
            node.stop()


@contextlib.contextmanager
def ssh_nodes(root: Path, count: int = 4, environment: Mapping[str, str] | None = None) -> Iterator[SshNodes]:
    """Running nodes for a fixture; skips the test where there is no sshd.

    Args:
        environment: variables that every command on the nodes gets (``PATH``, to put stand-in programs on it).
    """
    reason = missing()
    if reason:
        pytest.skip(reason)
    nodes = SshNodes(root, count, environment)
    try:
        yield nodes
    finally:
        nodes.stop()
