"""The mount of one volume on one node: its mount point, its errors without secrets, and symbolic links as mounts."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import parse_qs, quote, unquote

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.environment import allowed
from mlflow_batchai.agent.mounts import mountpoints
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.plan import Volume
from mlflow_batchai.agent.processes.tasks import Output, Task
from mlflow_batchai.agent.protocol import MARK_VARIABLE, NODE_VARIABLE
from mlflow_batchai.agent.runtime import Runtime

LAST_LINES = 10

# Kind of volume -> (error code, exit code; None: the command's own). The exit codes are those that Batch AI's users saw.
_CODES = {
    "link": (protocol.NODE_SETUP_FAILED, None),
    "azureFiles": (protocol.AZURE_FILES_MOUNT, -1),
    "azureBlob": (protocol.AZURE_BLOB_MOUNT, 1),
    "nfs": (protocol.NFS_MOUNT, None),
    "command": (protocol.UNMANAGED_MOUNT, None),
}

_SIGNATURE = re.compile(r"(\bsig=)[^&\s\"']+")


class Mask:
    """Takes secrets out of what commands say; what is shorter than ``shortest`` stays: it would be parts of words."""

    def __init__(self, secrets: Iterable[str], shortest: int = 6) -> None:
        found: set[str] = set()
        for secret in secrets:
            found |= {secret, *parse_qs(secret).get("sig", [])}
        spelled = {
            form for secret in found for form in (secret, quote(secret, safe=""), unquote(secret)) if len(form) >= shortest
        }
        self._spelled = sorted(spelled, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._spelled:
            text = text.replace(secret, "***")
        return _SIGNATURE.sub(r"\1***", text)


class Mount:
    """One volume on this node: ``start``, then ``poll`` until it is there, in the end ``undo``.

    Attributes:
        folder: its own folder on the node's disk.
        seconds: for how long ``poll`` may say that it isn't there yet.
        task: the process that mounts it; None: none was started.
    """

    seconds = 15.0

    def __init__(self, runtime: Runtime, index: int, volume: Volume, credentials: Mapping[str, str]) -> None:
        self.runtime, self.layout = runtime, runtime.layout
        self.index = index
        self.volume = volume
        self.credentials = credentials
        self.target = self.layout.mount_path(volume)
        self.folder = os.path.join(self.layout.job, "volumes", str(index))
        self.mask = Mask(text for name, text in credentials.items() if name != "endpoint")
        self.task: Task | None = None
        self.argv: list[str] = []
        self._begun = False

    def start(self) -> None:
        """Begin to mount. Raises Failure: it can't be."""
        raise NotImplementedError

    def poll(self) -> bool:
        """Whether it is there. Raises Failure: it will not be."""
        raise NotImplementedError

    def late(self) -> Failure:
        raise NotImplementedError

    def undo(self) -> str:
        """Undo it as far as it was done; why it is still there, empty: it is gone."""
        if not self._begun:
            return ""  # what is there is somebody else's
        why = mountpoints.unmount(self.target)
        if not why:
            with contextlib.suppress(OSError):  # it never was, or holds what was written when nothing was mounted
                os.rmdir(self.target)
        return why

    def failure(self, why: str, said: Sequence[str] = (), command: Sequence[str] = (), exit_code: int | None = None) -> Failure:
        """A failure to mount, as a sentence without secrets; ``said``: last lines of the command's output."""
        code, fixed = _CODES[self.volume.kind]
        node = f"{self.layout.node_id} ({socket.gethostname()})"
        sentence = f"{self.volume.title} can't be mounted on {node}: {why}"
        if command:
            sentence += f"; the command was: {' '.join(command)}"
        lines = [self.mask(line) for text in said for line in text.splitlines() if line.strip(" -\ufeff")][-LAST_LINES:]
        code_of_exit = fixed if fixed is not None else exit_code
        return Failure(code, self.mask(sentence), node=self.layout.node, exit_code=code_of_exit, tail=lines)

    def tail(self) -> list[str]:
        return list(self.task.tail) if self.task else []

    def note(self, text: str) -> None:
        self.runtime.shipper.note(f"{self.volume.title}: {self.mask(text)}")

    def check_unmounted(self) -> None:
        """Raise a failure if somebody has mounted something there: looking at a path whose server hangs would hang us, too."""
        mounted = mountpoints.at(self.target)
        if mounted is not None:
            raise self.failure(
                f"{self.target} is taken: somebody has mounted {mounted.source} ({mounted.kind}) there; unmount it, or give the"
                " volume another relativeMountPath"
            )

    def make_target(self) -> None:
        """The directory that is mounted over, empty; a link that an earlier job left there goes."""
        self.check_unmounted()
        if os.path.islink(self.target):
            os.unlink(self.target)
        try:
            os.makedirs(self.target, exist_ok=True)
            taken = bool(os.listdir(self.target))
        except (FileExistsError, NotADirectoryError):
            taken = True
        if taken:
            raise self.failure(
                f"{self.target} is taken by files that would be hidden; move them away, or give the volume another"
                " relativeMountPath"
            )
        mountpoints.note_mount(self.layout.root, self.target)
        self._begun = True

    def make_folder(self) -> None:
        """The mount's own folder on the node's disk, for no other user's eyes; it goes with the job's."""
        os.makedirs(os.path.dirname(self.folder), exist_ok=True)
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        os.chmod(self.folder, 0o700)

    def run(self, argv: list[str], variables: Mapping[str, str], output: Output) -> None:
        """Start the process that mounts, with the node's variables that a job may see, the job's mark and these."""
        environment = dict(allowed(os.environ), **variables)
        environment["LC_ALL"] = "C"  # its words are looked at
        environment[MARK_VARIABLE] = self.layout.mark
        environment[NODE_VARIABLE] = str(self.layout.node)
        task = Task(f"mount of {self.volume.path}", None, output)
        self.argv = argv
        try:
            self.runtime.start(task, argv, environment, cwd=self.folder, helper=True, inside=False)
        except OSError as error:
            raise self.failure(f"{argv[0]} can't be started: {error.strerror or error}", command=argv) from None
        self.task = task


class LinkMount(Mount):
    """A symbolic link to a folder of the node, which needs no right to mount.

    A directory of the cluster's stays linked after the job, as its mounts did on Batch AI.
    """

    def start(self) -> None:
        source = self.volume.source
        if not os.path.isdir(source):
            raise self.failure(f"{source} is not a directory there; create it, mount the share at it, or correct the path")
        self.check_unmounted()
        os.makedirs(os.path.dirname(self.target), exist_ok=True)
        self._begun = True
        if os.path.islink(self.target):
            if os.readlink(self.target) == source:
                return
            os.unlink(self.target)
        with contextlib.suppress(OSError):
            os.rmdir(self.target)  # what another kind of mount has left
        try:
            os.symlink(source, self.target, target_is_directory=True)
        except FileExistsError:
            raise self.failure(f"{self.target} is taken by something that is not a mount of ours; move it away") from None

    def poll(self) -> bool:
        return True

    def undo(self) -> str:
        goes = self.volume.scope == "job" or self.volume.mounted_by == "bind"
        if self._begun and goes and os.path.islink(self.target):
            os.unlink(self.target)
        return ""
