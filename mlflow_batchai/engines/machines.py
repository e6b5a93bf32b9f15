"""What a node's verbs (``node/host.py``) are asked through: a call on this machine, a kept-open connection to another."""

from __future__ import annotations

import json
import re
import shlex
import sys
import threading
from pathlib import Path
from typing import Any, Protocol

from mlflow_batchai.engines import archive
from mlflow_batchai.errors import ClusterError
from mlflow_batchai.node import host

Answer = dict[str, Any]

ASK_SECONDS = 30.0
# What a login shell may print before our first line.
GREETING_LINES = 200


class Machine(Protocol):
    """One machine that verbs can be asked of."""

    @property
    def title(self) -> str:
        """How messages call it: ``node gpu1``."""

    @property
    def command(self) -> list[str] | None:
        """What runs the agent there; None: whatever answers us."""

    def shown(self, arguments: list[str]) -> tuple[str, ...]:
        """What would be run there, for people."""

    def ask(self, verb: str, timeout: float = ASK_SECONDS, **arguments: Any) -> Answer:
        """Ask a verb of ``node/host.py``; ClusterError, with the machine in it, if it can't be done or asked."""

    def close(self) -> None:
        """Let go of the connection; the next question opens another."""


class LocalMachine:
    """This machine.

    Args:
        agents: the folder that the agent's archive is kept in.
    """

    title = "this machine"

    def __init__(self, agents: Path) -> None:
        self._agents = agents
        self._command: list[str] | None = None

    @property
    def command(self) -> list[str]:
        """The agent's command, its archive built once for all nodes."""
        if self._command is None:
            # -I: the submitter's PYTHON* variables and user site don't leak in; -S: a tenth of the start.
            self._command = [sys.executable, "-I", "-S", str(archive.stored(self._agents))]
        return self._command

    def shown(self, arguments: list[str]) -> tuple[str, ...]:
        return (*self.command, *arguments)

    def ask(self, verb: str, timeout: float = ASK_SECONDS, **arguments: Any) -> Answer:
        try:
            return host.answer(verb, arguments)
        except host.HostError as error:
            raise ClusterError(str(error)) from error

    def close(self) -> None:
        pass


class SshMachine:
    """A machine that is reached over SSH.

    One ``serve`` process answers all questions of a connection. A question whose answer was lost with the connection is asked
    again over a new one, once: every verb may be asked twice.

    Args:
        name: in messages.
        target: where and how.
        agents: the folder on it for the agent's archive: absolute, or below the login's home.
        python: the interpreter on it that runs the agent.
    """

    command = None

    def __init__(self, name: str, target: Any, agents: str, python: str) -> None:
        from mlflow_batchai.shell.ssh import Connection

        self.title = f"node {name}"
        self.address: str = target.address
        self._connection = Connection(target)
        # Commands and SFTP both start in the login's home.
        self._agents = agents.removeprefix("~/")
        self._python = python
        self._stream: Any = None
        self._lock = threading.Lock()

    def connect(self) -> str:
        """Connect and log in, if that isn't done; which of its host keys we know from where, for people."""
        return self._connection.host_key()

    def shown(self, arguments: list[str]) -> tuple[str, ...]:
        return ("ssh", self.address, shlex.join([*self._serve_argv(archive.build())[:-1], *arguments]))

    def ask(self, verb: str, timeout: float = ASK_SECONDS, **arguments: Any) -> Answer:
        from mlflow_batchai.shell.ssh import ConnectionLostError

        line = json.dumps({"verb": verb, "arguments": arguments}).encode()
        with self._lock:
            fresh = self._stream is None
            try:
                said = self._served().ask(line, timeout)
            except ConnectionLostError:
                self._drop()
                if fresh:
                    raise
                said = self._again(line, timeout)
            except ClusterError:
                # Its answer may still come; it must not be taken for that to another question.
                self._drop()
                raise
        answer: Answer = json.loads(said)
        if "error" in answer:
            raise ClusterError(f"{self.title}: {answer['error']}")
        found: Answer = answer["ok"]
        return found

    def _again(self, line: bytes, timeout: float) -> bytes:
        try:
            said: bytes = self._served().ask(line, timeout)
            return said
        except ClusterError:
            self._drop()
            raise

    def _served(self) -> Any:
        if self._stream is None:
            self._stream = self._serve()
        return self._stream

    def _serve(self) -> Any:
        """Start what answers us; the archive is sent if it isn't there."""
        data = archive.build()
        argv = self._serve_argv(data)
        stream, trouble = self._greeted(argv)
        if stream is None and "can't open file" in trouble:
            self._connection.put(argv[-2], data)
            stream, trouble = self._greeted(argv)
        if stream is None:
            raise ClusterError(self._explained(trouble))
        return stream

    def _serve_argv(self, data: bytes) -> list[str]:
        return [self._python, "-I", "-S", f"{self._agents}/{archive.name_of(data)}", "serve"]

    def _greeted(self, argv: list[str]) -> tuple[Any, str]:
        """(stream, "") once it has said that it is there, else (None, what it said instead)."""
        from mlflow_batchai.shell.ssh import ConnectionLostError

        stream = self._connection.stream(argv)
        try:
            for _ in range(GREETING_LINES):
                if stream.read_line(ASK_SECONDS).startswith(host.READY.encode()):
                    return stream, ""
        except ConnectionLostError as error:
            if not self._connection.alive:
                raise
            stream.close()
            return None, str(error)
        stream.close()
        return None, "its login prints more than can be read over"

    def _explained(self, trouble: str) -> str:
        if "not found" in trouble or "No such file" in trouble:
            return f"{self.title}: there is no {self._python}; install python3 (3.8 or newer), or name one (agentPython)"
        asked = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
        found = self._connection.run([self._python, "-I", "-S", "-c", asked]).out.strip()
        old = re.fullmatch(r"(\d+)\.(\d+)\.\d+", found)
        if old and (int(old[1]), int(old[2])) < (3, 8):
            return f"{self.title}: {self._python} is Python {found}; install 3.8 or newer, or name one (agentPython)"
        return f"{self.title}: the agent can't be run: {trouble}"

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def close(self) -> None:
        with self._lock:
            self._drop()
            self._connection.close()
