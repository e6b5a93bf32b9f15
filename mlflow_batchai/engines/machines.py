"""Call a node's verbs (``agent/api/host.py``): in this process, or over a connection that is kept open."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mlflow_batchai.agent.api import host
from mlflow_batchai.engines import archive
from mlflow_batchai.errors import ClusterError, ConnectionLostError

if TYPE_CHECKING:
    from mlflow_batchai.engines.shell.connection import Stream
    from mlflow_batchai.engines.shell.target import Target

Answer = dict[str, Any]

ASK_SECONDS = 30.0
CLOSE_SECONDS = 1.0
# What a login shell may print before our first line.
GREETING_LINES = 200
# What agent/boot.py says when it has made the folder and the archive isn't in it.
SEND = "the archive is to be sent to "


class ShellCommand(NamedTuple):
    """Command here that runs a person's shell line on a machine, and its working directory."""

    argv: list[str]
    cwd: str | None


class Machine(Protocol):
    """One machine that verbs can be asked of."""

    @property
    def title(self) -> str:
        """Name of the machine in messages: ``node gpu1``."""

    @property
    def address(self) -> str | None:
        """Where it is reached; None: it is this machine."""

    @property
    def command(self) -> list[str] | None:
        """Command that runs the agent there; None: whatever answers us."""

    @property
    def archive(self) -> str:
        """Path of the agent's archive there, present or not."""

    def shown(self, arguments: list[str]) -> tuple[str, ...]:
        """The command that would run there, for people."""

    def connect(self) -> Mapping[str, str]:
        """Connect and log in, if that isn't done: what ``doctor`` shows of it, by the name of its check; or ClusterError."""

    def ask(self, verb: str, timeout: float = ASK_SECONDS, **arguments: Any) -> Answer:
        """Ask a verb of ``agent/api/host.py``; ClusterError, with the machine in it, if it can't be done or asked."""

    def shell(self, line: str | None, folder: str | None, root: str, forwards: Sequence[str], terminal: bool) -> ShellCommand:
        """Command that runs a shell line on the node whose own folder is ``root`` (see ``cli/node.py``)."""

    def close(self) -> None:
        """Let go of the connection; the next question opens another."""


class Node(NamedTuple):
    """One node of the cluster.

    Attributes:
        root: its own folder, on its own disk.
        part: ``I/N/M``: the I-th of the N nodes that its machine is cut into, and of the M among which the GPUs are divided.
        id: who it is, whatever it is called: in the queue.
    """

    name: str
    machine: Machine
    root: str
    part: str = "0/1/1"
    id: str = ""


class LocalMachine:
    """This machine; ``agents``: the folder that the agent's archive is kept in."""

    title = "this machine"
    address = None
    # -I: the submitter's PYTHON* variables and user site don't leak in; -S: a tenth of the start.
    _start = (sys.executable, "-I", "-S")

    def __init__(self, agents: Path) -> None:
        self._agents = agents
        self._command: list[str] | None = None

    @property
    def command(self) -> list[str]:
        if self._command is None:
            archive.stored(self._agents)
            self._command = [*self._start, self.archive]
        return self._command

    @property
    def archive(self) -> str:
        return str(self._agents / archive.name_of(archive.build()))

    def shown(self, arguments: list[str]) -> tuple[str, ...]:
        return (*self._start, self.archive, *arguments)

    def connect(self) -> Mapping[str, str]:
        return {"reachable": self.title}

    def ask(self, verb: str, timeout: float = ASK_SECONDS, **arguments: Any) -> Answer:
        try:
            return host.answer(verb, arguments)
        except host.HostError as error:
            raise ClusterError(str(error)) from error

    def shell(self, line: str | None, folder: str | None, root: str, forwards: Sequence[str], terminal: bool) -> ShellCommand:
        # A node that has had no job yet has no folder.
        return ShellCommand(["bash", "-c", line or ""], folder or self.ask("place", root=root)["root"])

    def close(self) -> None:
        pass


class SshMachine:
    """A machine that is reached over SSH.

    One ``serve`` process answers all questions of a connection. A question whose answer was lost with the connection is asked
    again over a new one, once: every verb may be asked twice.

    Args:
        root: the node's own folder: absolute, or below the login's home (``~/``).
        python: the interpreter on it that runs the agent.
    """

    command = None

    def __init__(self, name: str, target: Target, root: str, python: str) -> None:
        from mlflow_batchai.engines.shell.connection import Connection

        self.title = f"node {name}"
        self.address: str | None = target.address
        self.connection = Connection(target)
        self._root = root
        # Commands start in the login's home; quoted as it is, ~ would stay a ~.
        self._python = f"./{python[2:]}" if python.startswith("~/") else python
        self._stream: Stream | None = None
        self._lock = threading.Lock()

    def connect(self) -> Mapping[str, str]:
        started = time.monotonic()
        key = self.connection.open()
        return {"reachable": f"{self.address} in {(time.monotonic() - started) * 1000:.0f} ms", "host key": key}

    @property
    def archive(self) -> str:
        return f"{self._root}/agents/{archive.name_of(archive.build())}"

    def shown(self, arguments: list[str]) -> tuple[str, ...]:
        return ("ssh", f"ssh://{self.address}", shlex.join([self._python, "-I", "-S", self.archive, *arguments]))

    def ask(self, verb: str, timeout: float = ASK_SECONDS, **arguments: Any) -> Answer:
        line = json.dumps({"verb": verb, "arguments": arguments}).encode()
        with self._lock:
            again = self._stream is not None
            while True:
                try:
                    self._stream = self._stream or self._serve()
                    said = self._stream.ask(line, timeout)
                    break
                except ClusterError as error:
                    # Its answer may still come; it must not be taken for that to another question.
                    self._drop()
                    if not (again and isinstance(error, ConnectionLostError)):
                        raise
                    again = False
        answer: Answer = json.loads(said)
        if "error" in answer:
            raise ClusterError(f"{self.title}: {answer['error']}")
        found: Answer = answer["ok"]
        return found

    def shell(self, line: str | None, folder: str | None, root: str, forwards: Sequence[str], terminal: bool) -> ShellCommand:
        from mlflow_batchai.engines.shell.target import ssh_command

        if line is not None and folder:
            line = f"cd {shlex.quote(folder)} && {line}"
        return ShellCommand(ssh_command(self.connection.target, line, forwards, terminal), None)

    def _serve(self) -> Stream:
        """Start what answers us; the archive is sent if it isn't there."""
        data = archive.build()
        boot = [
            self._python,
            "-I",
            "-S",
            "-c",
            archive.boot(),
            self._root,
            archive.name_of(data),
            archive.hash_of(data),
            "serve",
        ]
        said = self._greeted(boot)
        if isinstance(said, str) and SEND in said:
            # Into a folder that is ours alone by now.
            self.connection.put(said.rpartition(SEND)[2], data)
            said = self._greeted(boot)
        if isinstance(said, str):
            raise ClusterError(f"{self.title}: {self._explained(said)}")
        return said

    def _greeted(self, argv: list[str]) -> Stream | str:
        """The stream after its greeting, else the last line that came instead."""
        stream = self.connection.stream(argv)
        try:
            for _ in range(GREETING_LINES):
                # A login may print without ending its line (a terminal's title): anywhere in it.
                if host.READY.encode() in stream.read_line(ASK_SECONDS):
                    return stream
        except ConnectionLostError:
            stream.close()
            if not self.connection.alive:
                raise
            return stream.last_error
        except BaseException:
            stream.close()
            raise
        stream.close()
        return "its login prints more than can be read over; silence it for shells without a terminal"

    def _explained(self, reason: str) -> str:
        if reason.endswith(("another user", "is not a folder", "other users can write")) or "can't be made" in reason:
            return f"{reason}; mend that, or name another folder (root in the cluster document)"
        if reason.endswith("install 3.9 or newer"):
            return f"{reason}, or name one (agentPython in the cluster document)"
        if "not found" in reason or "No such file" in reason:
            return f"there is no {self._python}; install python3 (3.9 or newer), or name one (agentPython)"
        return f"the agent can't be run: {reason or 'it said nothing'}"

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def close(self) -> None:
        # A question that hangs is not waited for: this is called where the program is to end.
        if self._lock.acquire(timeout=CLOSE_SECONDS):
            try:
                self._drop()
                self.connection.close()
            finally:
                self._lock.release()
