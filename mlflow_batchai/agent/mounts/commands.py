"""Volumes that one command mounts: a table of SMB, NFS and a document's own command.

SMB's options: Microsoft's documentation "Mount SMB Azure file shares on Linux". ``closetimeo`` is left to the kernel's default
(1 s): older kernels refuse an option that they don't know.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from mlflow_batchai.agent.mounts import mountpoints
from mlflow_batchai.agent.mounts.mount import Mount
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.plan import Volume
from mlflow_batchai.agent.runtime import Runtime

# After a command that left the mounting to a process of its own.
APPEAR_SECONDS = 2.0

NEEDS_ROOT = (
    "mounting needs root: let the agent's user run mount by sudo without a password, or mount it beforehand (mount: bind)"
    "{instead}"
)
NO_HELPER = "mount.{system} is not installed there; install it (Debian: {package}){instead}"
NO_SYSTEM = "the kernel there knows no {name}{instead}"
UNREACHABLE = "{host} can't be reached from there (port {port}){instead}"

_NO_ROOT = (
    "a password is required|only root can|must be superuser|not in the sudoers|no new privileges|must be run as root",
    NEEDS_ROOT,
)
_UNKNOWN_NAME = "the name {host} is not known there; correct it, or mend the node's name service"


class Kind(NamedTuple):
    """Command and options that mount volumes of one kind.

    Attributes:
        command: its argv, a pure function of the volume, the mount point and the mount's own folder.
        said: what the command says, as a regular expression -> what it means and what to do.
        system: the kernel's name of such file systems, where ``mount.{system}`` has to be there.
        instead: what else could be done, as the end of a sentence.
    """

    command: Callable[[Volume, str, str], list[str]]
    host: Callable[[Volume], str] = lambda volume: ""
    said: tuple[tuple[str, str], ...] = (_NO_ROOT,)
    seconds: float = Mount.seconds
    system: str = ""
    name: str = ""
    package: str = ""
    port: int = 0
    instead: str = ""

    def explain(self, said: str, volume: Volume) -> str:
        return next((self.sentence(means, volume) for pattern, means in self.said if re.search(pattern, said)), "")

    def sentence(self, template: str, volume: Volume) -> str:
        return template.format(**{**self._asdict(), "host": self.host(volume)})


def credentials_file(folder: str) -> str:
    """Where the account key stands for mount.cifs while it mounts."""
    return os.path.join(folder, "smb")


def write_credentials(path: str, account: str, key: str) -> None:
    """A credentials file of mount.cifs (and smbclient -A), for its owner only."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        file.write(f"username={account}\npassword={key}\n")


def _as_root(argv: list[str]) -> list[str]:
    """A command that needs root: by sudo if we are not, which must not ask for a password."""
    return argv if os.geteuid() == 0 else ["sudo", "-n", *argv]


def _cifs(volume: Volume, target: str, folder: str) -> list[str]:
    names = [urlsplit(volume.endpoint).hostname or "", volume.container, volume.folder.strip("/")]
    options = [
        "vers=3.1.1",
        f"credentials={credentials_file(folder)}",
        "serverino",
        "nosharesock",
        "mfsymlinks",
        "nobrl",
        "actimeo=30",
        f"file_mode={volume.file_mode or '0777'}",
        f"dir_mode={volume.directory_mode or '0777'}",
        f"uid={os.geteuid()}",
        f"gid={os.getegid()}",
    ]
    return _as_root(["mount", "-t", "cifs", "-o", ",".join(options), "--", "//" + "/".join(filter(None, names)), target])


def _nfs(volume: Volume, target: str, folder: str) -> list[str]:
    # All of the document's mountOptions are one word; an option of ours would go before them, with a comma.
    return _as_root(["mount", "-t", "nfs", *(["-o", volume.options] if volume.options else []), "--", volume.source, target])


def _shell(volume: Volume, target: str, folder: str) -> list[str]:
    """``mountCommand`` is shell text, as on Batch AI; the path is an argument and never becomes any."""
    # YAML's block texts end with a newline, which would end the command before its path.
    return ["bash", "-c", volume.command.rstrip() + ' "$1"', "mount", target]


# How a volume is mounted -> its row.
KINDS = {
    "cifs": Kind(
        _cifs,
        lambda volume: urlsplit(volume.endpoint).hostname or "",
        (
            _NO_ROOT,
            ("bad option|need a /sbin/mount|helper program", NO_HELPER),
            (r"error\(19\)|not supported by the system|unknown filesystem type", NO_SYSTEM),
            (
                r"error\(13\)|Permission denied",
                "{host} refused the account key (or asks for what this kernel can't do); give the account's own",
            ),
            (r"error\([26]\)", "there is no such share or folder in the account; create it, or correct the address"),
            (r"error\(22\)", "the kernel there does not take these options (SMB 3.1.1 needs 4.17 or newer){instead}"),
            ("could not resolve", _UNKNOWN_NAME),
            (r"error\((101|103|104|110|111|112|113|115)\)", UNREACHABLE),
        ),
        system="cifs",
        name="SMB",
        package="cifs-utils",
        port=445,
        instead="; mount: rclone goes over port 443, which fewer networks close, and needs no root",
    ),
    "nfs": Kind(
        _nfs,
        lambda volume: volume.source.partition(":")[0],
        (
            _NO_ROOT,
            ("bad option|need a /sbin/mount", NO_HELPER),
            ("unknown filesystem type|not supported by the system|No such device", NO_SYSTEM),
            ("access denied", "{host} does not export the directory to this node"),
            ("No such file", "{host} exports no such directory"),
            ("resolve|Name or service not known", _UNKNOWN_NAME),
            ("timed out|refused|No route|unreachable", UNREACHABLE),
        ),
        seconds=60.0,  # file servers wake disks
        system="nfs",
        name="NFS",
        package="nfs-common",
        port=2049,
    ),
    "command": Kind(_shell, seconds=60.0),
}


class CommandMount(Mount):
    """A mount that one command makes; there when the command has ended well and, if it is to be one, is a mount."""

    def __init__(self, runtime: Runtime, index: int, volume: Volume, credentials: Mapping[str, str]) -> None:
        super().__init__(runtime, index, volume, credentials)
        self.kind = KINDS[volume.mounted_by]
        self.seconds = self.kind.seconds

    def start(self) -> None:
        by_smb = self.kind.system == "cifs"
        if by_smb and not self.credentials.get("key"):
            raise self.failure(
                "SMB needs the account key, and a SAS can't do it: give the key, or mount it by rclone (mount: rclone)"
            )
        if by_smb and "," in self.folder:
            raise self.failure(f"mount.cifs can't read a credentials file in {self.layout.root}: its path has a comma")
        self.make_target()
        self.make_folder()
        if by_smb:
            write_credentials(credentials_file(self.folder), self.volume.account, self.credentials["key"])
        self.run(self.kind.command(self.volume, self.target, self.folder), {}, lambda task, stream, lines: None)

    def poll(self) -> bool:
        if self.task is None or self.task.status is None:
            return False
        self._forget()
        self.runtime.drain([self.task], 0.5)
        if self.task.exit_code == 0:
            if mountpoints.at(self.target) is not None:
                return True
            if time.monotonic() - (self.task.ended or 0.0) < APPEAR_SECONDS:
                return False  # its own process mounts in the background
        what = f"the command {self.task.verdict}" if self.task.exit_code else "the command ended well, yet nothing is mounted"
        raise self._failed(what, self.task.exit_code)

    def late(self) -> Failure:
        if self.kind.port:
            return self._failed(self.kind.sentence(UNREACHABLE, self.volume))
        return self._failed(f"the command had not ended after {self.seconds:.0f} s")

    def _failed(self, otherwise: str, exit_code: int | None = None) -> Failure:
        said = self.tail()
        return self.failure(self.kind.explain("\n".join(said), self.volume) or otherwise, said, self.argv, exit_code)

    def undo(self) -> str:
        self._forget()
        if self.task is not None and self.task.status is None:
            with contextlib.suppress(OSError):
                os.killpg(self.task.pid, signal.SIGKILL)
        return super().undo()

    def _forget(self) -> None:
        """Remove the account key from the node's disk."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(credentials_file(self.folder))
