"""A node of a Slurm cluster as a ``Machine``: asked, and given shell lines, by steps beside those of a job that has it."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mlflow_batchai.agent.api.host import READY
from mlflow_batchai.engines.machines import ASK_SECONDS, Answer, ShellCommand
from mlflow_batchai.engines.shell.target import Target, ssh_command
from mlflow_batchai.errors import ClusterError

# A step that doesn't wait for the job's own.
STEP = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--quiet")
# What programs are found by in a job: a profile may say more before, or end the shell.
_LOGIN = ("-u", "PATH", "sh", "-c", """bash -l -c 'printf "\\nbatchai-path %s %s\\n" "$SLURMD_NODENAME" "$PATH"'; true""")


class Commands(NamedTuple):
    """What a node is asked with.

    Attributes:
        ask: runs a command of Slurm's: its output, or ClusterError.
        serve: the command on the node that answers verbs.
        remove: the command on the node that removes what ``serve`` has left.
        login: where Slurm's commands run; None: on this machine.
    """

    ask: Callable[..., str]
    serve: Sequence[str]
    remove: Sequence[str]
    login: Target | None


class SlurmNode:
    """A node of a job.

    Args:
        name: the node; empty: the job has no other.
        job: its number; None: of one that ``take`` starts at the first question, and ``close`` ends.
    """

    command = None
    archive = ""

    def __init__(self, commands: Commands, name: str = "", job: int | None = None, take: Callable[[], int] | None = None):
        self.title = f"node {name}" if name else "the node that Slurm gives"
        # None: nothing of ours stays there that ``gc`` could remove, and no other node is to reach it.
        self.address: str | None = name or None
        self._commands, self._name, self._job, self._take = commands, name, job, take
        self._path = "PATH"

    def shown(self, arguments: list[str]) -> tuple[str, ...]:
        return tuple(arguments)

    def connect(self) -> Mapping[str, str]:
        started = time.monotonic()
        name, _, path = self._run(_LOGIN).partition("\nbatchai-path ")[2].partition("\n")[0].partition(" ")
        if not path:
            raise ClusterError(f"{self.title}: the login shell (bash -l) has said nothing: does ~/.bash_profile end it?")
        # srun splits what is not quoted as a whole.
        self._path = f"'PATH={path}'" if "," in path else f"PATH={path}"
        return {"reachable": f"Slurm gave {name} in {time.monotonic() - started:.1f} s"}

    def ask(self, verb: str, timeout: float = ASK_SECONDS, **arguments: Any) -> Answer:
        asked = json.dumps({"verb": verb, "arguments": arguments}).encode() + b"\n"
        answer = json.loads(self._run(self._commands.serve, asked, timeout).partition(READY)[2].partition("\n")[2])
        if "error" in answer:
            raise ClusterError(f"{self.title}: {answer['error']}")
        found: Answer = answer["ok"]
        return found

    def shell(self, line: str | None, folder: str | None, root: str, forwards: Sequence[str], terminal: bool) -> ShellCommand:
        if forwards or line is None:
            raise ClusterError(f"{self.title}: Slurm forwards no ports to its nodes; leave out -L")
        argv = [*self._step(), *["--pty"] * terminal, "bash", "-c", line]
        login = self._commands.login
        return ShellCommand(ssh_command(login, shlex.join(argv), (), terminal) if login else argv, None)

    def close(self) -> None:
        if self._take and self._job:
            try:
                self._run(self._commands.remove)
            finally:
                self._commands.ask(["scancel", str(self._job)])
                self._job = None

    def _run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float = ASK_SECONDS) -> str:
        if self._job is None and self._take:
            self._job = self._take()
        # By ``env``: srun itself would look for the program where it runs, by its own PATH.
        return self._commands.ask([*self._step(), "env", *argv], stdin, timeout)

    def _step(self) -> list[str]:
        return [
            *STEP,
            f"--export=HOME,LANG,TERM,{self._path}",
            f"--jobid={self._job}",
            *[f"--nodelist={self._name}"] * bool(self._name),
        ]
