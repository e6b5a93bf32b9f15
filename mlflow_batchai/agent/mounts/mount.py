"""What all kinds of volumes have in common: their place on the node, their sentences, and commands that mount."""

import contextlib
import os
import re
import signal
import socket
import time
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set
from urllib.parse import parse_qs, quote, unquote

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.environment import allowed
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.mounts import table, undo
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.plan import Volume
from mlflow_batchai.agent.protocol import MARK_VARIABLE, NODE_VARIABLE
from mlflow_batchai.agent.runtime import Runtime
from mlflow_batchai.agent.shipper import Shipper
from mlflow_batchai.agent.tasks import Task

# A mount that doesn't come within so many seconds fails.
MOUNT_SECONDS = 15.0
# A shell command of the document's, and file servers: they wake disks and ask around.
COMMAND_SECONDS = 60.0
APPEAR_SECONDS = 2.0
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
    """Takes secrets out of what commands say."""

    def __init__(self, secrets: Iterable[str]) -> None:
        found: Set[str] = set()
        for secret in secrets:
            found |= {secret, *parse_qs(secret).get("sig", [])}
        spelled = {form for secret in found for form in (secret, quote(secret, safe=""), unquote(secret)) if len(form) > 5}
        self._spelled = sorted(spelled, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._spelled:
            text = text.replace(secret, "***")
        return _SIGNATURE.sub(r"\1***", text)


class Place(NamedTuple):
    """What a mount is given: this node's layout, its processes and its log."""

    layout: NodeLayout
    runtime: Runtime
    shipper: Shipper


class Mount:
    """One volume on this node: ``start``, then ``poll`` until it is there, in the end ``undo``.

    Attributes:
        target: where it is mounted.
        seconds: for how long ``poll`` may say that it isn't there yet.
    """

    seconds = MOUNT_SECONDS

    def __init__(self, place: Place, index: int, volume: Volume, credentials: Mapping[str, str]) -> None:
        self.place = place
        self.index = index
        self.volume = volume
        self.credentials = credentials
        self.target = place.layout.mount_path(volume)
        self.folder = os.path.join(place.layout.job, "volumes", str(index))
        self.mask = Mask(text for name, text in credentials.items() if name != "endpoint")
        self._begun = False

    @property
    def title(self) -> str:
        """The volume in a sentence."""
        return self.volume.title

    def start(self) -> None:
        """Begin to mount.

        Raises:
            Failure: it can't be.
        """
        raise NotImplementedError

    def poll(self) -> bool:
        """Whether it is there.

        Raises:
            Failure: it will not be.
        """
        raise NotImplementedError

    def late(self) -> Failure:
        """It was not there in time."""
        return self.failure("nothing came of it within %d s" % self.seconds)

    def undo(self) -> str:
        """Undo it as far as it was done; why it is still there, empty: it is gone."""
        if not self._begun:
            return ""  # what is there is somebody else's
        why = undo.unmount(self.target)
        if not why:
            with contextlib.suppress(OSError):  # it never was, or holds what was written when nothing was mounted
                os.rmdir(self.target)
        return why

    # For those that mount.

    def failure(
        self, why: str, said: Sequence[str] = (), command: Sequence[str] = (), exit_code: Optional[int] = None
    ) -> Failure:
        """A failure to mount, as a sentence without secrets.

        Args:
            why: the cause, and what to do.
            said: last lines of the command's output.
            command: its argv, to be shown.
        """
        code, fixed = _CODES[self.volume.kind]
        node = "%s (%s)" % (self.place.layout.node_id, socket.gethostname())
        sentence = "%s can't be mounted on %s: %s" % (self.title, node, why)
        if command:
            sentence += "; the command was: %s" % " ".join(command)
        lines = [self.mask(line) for text in said for line in text.splitlines() if line.strip(" -\ufeff")][-LAST_LINES:]
        code_of_exit = fixed if fixed is not None else exit_code
        return Failure(code, self.mask(sentence), node=self.place.layout.node, exit_code=code_of_exit, tail=lines)

    def make_target(self) -> None:
        """The directory that is mounted over, empty; a link that an earlier job left there goes.

        Raises:
            Failure: something else is there.
        """
        # The table first: looking at a path whose server hangs would hang us, too.
        mounted = table.at(self.target)
        if mounted is not None:
            raise self.failure(
                "%s is taken: somebody has mounted %s (%s) there; unmount it, or give the volume another relativeMountPath"
                % (self.target, mounted.source, mounted.kind)
            )
        if os.path.islink(self.target):
            os.unlink(self.target)
        try:
            os.makedirs(self.target, exist_ok=True)
            taken = bool(os.listdir(self.target))
        except (FileExistsError, NotADirectoryError):
            taken = True
        if taken:
            raise self.failure(
                "%s is taken by files that would be hidden; move them away, or give the volume another relativeMountPath"
                % self.target
            )
        undo.note_mount(self.place.layout.root, self.target)
        self._begun = True

    def make_folder(self) -> str:
        """The mount's own folder on the node's disk, for no other user's eyes; it goes with the job's."""
        os.makedirs(os.path.dirname(self.folder), exist_ok=True)
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        os.chmod(self.folder, 0o700)
        return self.folder

    def environment(self, extra: Mapping[str, str]) -> Dict[str, str]:
        """What a mounting process is told: the node's variables that a job may see, and the job's mark."""
        layout = self.place.layout
        found = dict(allowed(os.environ), **extra)
        found["LC_ALL"] = "C"  # its words are looked at
        found[MARK_VARIABLE] = layout.mark
        found[NODE_VARIABLE] = str(layout.node)
        return found

    def note(self, text: str) -> None:
        """A line in the job's execution log."""
        self.place.shipper.note("%s: %s" % (self.title, self.mask(text)))


class CommandMount(Mount):
    """A mount that one command makes; there when the command has ended well and, if it is to be one, is a mount."""

    def __init__(self, place: Place, index: int, volume: Volume, credentials: Mapping[str, str]) -> None:
        super().__init__(place, index, volume, credentials)
        self.task: Optional[Task] = None
        self.argv: List[str] = []

    def command(self) -> List[str]:
        """The argv, a pure function of plan and node."""
        raise NotImplementedError

    def variables(self) -> Dict[str, str]:
        """What its process finds in its environment besides."""
        return {}

    def explain(self, said: str) -> str:
        """What the command's output means, and what to do; empty: the output has to speak for itself."""
        return ""

    def start(self) -> None:
        self.make_target()
        folder = self.make_folder()
        self.argv = self.command()
        task = Task("mount %s" % self.volume.path, None, lambda task, stream, lines: None)
        try:
            self.place.runtime.start(task, self.argv, self.environment(self.variables()), cwd=folder, helper=True, inside=False)
        except OSError as error:
            raise self.failure("%s can't be started: %s" % (self.argv[0], error.strerror or error), command=self.argv) from None
        self.task = task

    def poll(self) -> bool:
        if self.task is None or self.task.status is None:
            return False
        self.place.runtime.drain([self.task], 0.5)
        if self.task.exit_code == 0:
            if table.at(self.target) is not None:
                return True
            if time.monotonic() - (self.task.ended or 0.0) < APPEAR_SECONDS:
                return False  # its own process mounts in the background
        said = list(self.task.tail)
        why = self.explain("\n".join(said))
        if not why:
            why = (
                "the command %s" % self.task.verdict
                if self.task.exit_code
                else "the command ended well, yet nothing is mounted"
            )
        raise self.failure(why, said, self.argv, self.task.exit_code)

    def late(self) -> Failure:
        said = list(self.task.tail) if self.task else []
        why = self.explain("\n".join(said)) or "the command had not ended after %d s" % self.seconds
        return self.failure(why, said, self.argv, None)

    def undo(self) -> str:
        if self.task is not None and self.task.status is None:
            with contextlib.suppress(OSError):
                os.killpg(self.task.pid, signal.SIGKILL)
        return super().undo()


def as_root(argv: List[str]) -> List[str]:
    """A command that needs root: by sudo if we are not, which must not ask for a password."""
    return argv if os.geteuid() == 0 else ["sudo", "-n", *argv]


NEEDS_ROOT = (
    "mounting needs root: let the agent's user run mount by sudo without a password, or mount it beforehand (mount: bind)"
)


def needs_root(said: str) -> bool:
    """Whether a command's output means that it is not allowed to mount."""
    words = (
        "a password is required",
        "only root can",
        "must be superuser",
        "not in the sudoers",
        "no new privileges",
        "must be run as root",
    )
    return any(word in said for word in words)
