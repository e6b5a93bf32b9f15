"""A small cluster of real agents on a directory share or an Azure file share, and waiting for what real processes do."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from azure_server import AzureServer
from booking import reserve
from closed_file import read_closed

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.environment import allowed
from mlflow_batchai.agent.plan import read_plan
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.reservation import locks
from mlflow_batchai.agent.share import mountfiles

PlanMaker = Callable[..., dict[str, Any]]

# Stands for a training interpreter with Horovod: a rendezvous server that only says its port.
FAKE_PYTHON = """#!/bin/bash
if [ "$2" = rendezvous ]; then echo '{"port": 1}'; exec cat; fi
exit 0
"""


def python39() -> str | None:
    """A Python 3.9 of this machine, or None."""
    names = ["python3.9", *sorted(str(path) for path in Path("~/.pyenv/versions").expanduser().glob("3.9*/bin/python"))]
    for name in names:
        try:
            done = subprocess.run([name, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, check=False)
        except OSError:
            continue
        if done.stdout.strip() == b"(3, 9)":
            return name
    return None


# A program below its shell, which dies of SIGTERM at once: it saves for a second, and says so when it has.
SAVES = """
cat > saves.py <<'END'
import signal, sys, time
def save(*_):
    print("saving", flush=True)
    time.sleep(1.0)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("started", flush=True)
while True:
    time.sleep(0.05)
END
python3 saves.py
echo after
"""


class Job:
    """One job with its real agents.

    Attributes:
        agents: their processes, by node.
    """

    def __init__(self, share: Path, plan: dict[str, Any], reservation: dict[str, Any]) -> None:
        self.share = share
        self.plan = read_plan(plan)
        self.reservation = reservation
        self.paths = protocol.JobPaths(plan["folder"])
        self.agents: list[subprocess.Popen[bytes]] = []
        self.logs: list[Path] = []
        self.mark = protocol.job_mark(plan["job"], 1)

    def verdict(self) -> dict[str, Any] | None:
        return read_closed(str(self.share / self.paths.verdict_file))

    def wait(self, seconds: float = 60.0) -> dict[str, Any]:
        """The verdict, when all agents have gone."""
        for agent in self.agents:
            try:
                agent.wait(seconds)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"an agent still runs after {seconds} s\n{self.said()}") from None
        verdict = self.verdict()
        assert verdict is not None, self.said()
        return verdict

    def said(self) -> str:
        """Logs of the agents, and the job's."""
        files = [*self.logs, *sorted((self.share / self.paths.stdouterr).glob("*"))]
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')}" for file in files if file.exists())

    def log(self, name: str) -> str:
        path = self.share / self.paths.stdouterr / name
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def exit(self, node: int) -> dict[str, Any] | None:
        return read_closed(str(self.share / self.paths.exit(node)))

    def records(self, kind: str) -> list[dict[str, Any]]:
        """All records of a kind that lie on the share, writer by writer."""
        found = []
        for file in sorted((self.share / self.paths.events).glob("*/*.jsonl")):
            with contextlib.suppress(protocol.TornFileError):  # it is just being written
                found += [record for record in protocol.decode(file.read_bytes()) if record["k"] == kind]
        return found

    def cancel(self, who: str, why: str) -> None:
        self.ask(protocol.CANCEL, who, why)

    def ask(self, kind: str, who: str, why: str, attempt: int = 1) -> None:
        """Make a request, as clients do."""
        identity = uuid.uuid4().hex
        path = self.paths.request(identity)
        mountfiles.write_closed(str(self.share), path, [protocol.request_record(kind, attempt, who, why)])
        self.add_marker(f"request-{identity}")

    def add_marker(self, name: str) -> None:
        """Have agents that look at the index see what was written."""
        if self.plan.board:
            (self.share / self.paths.marker(name)).mkdir(exist_ok=True)

    def processes(self) -> set[int]:
        return proc.marked(self.mark)

    def running(self, word: str) -> list[int]:
        """Those of them that have a word in their arguments."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):  # it has just ended
                if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found


def _own(reservation: dict[str, Any], name: str) -> dict[str, Any]:
    """What one node's agent is told of it."""
    taken = time.time() - reservation["age"]
    return {"number": reservation["number"], "taken": taken, "after": reservation["after"][name]}


# What may be waited for: nobody in a test waits for the paces of days.
QUICK = """
from mlflow_batchai.agent.share.index import Pace
for phase in index.PACES:
    index.PACES[phase] = (Pace(0.3, 1.0), Pace(0.3, 1.0))
rest.LOG_SECONDS = 0.3
"""


class Cluster:
    """N node folders on this machine and a share; starts jobs the way ``engines/hosts.py`` does.

    Args:
        server: where agents reach the share by REST; ranks see it as a directory all the same. Default: so do agents.
        share: a directory that is there to be the share.
    """

    def __init__(
        self,
        folder: Path,
        make_plan: PlanMaker,
        agent: Path,
        nodes: int = 2,
        server: AzureServer | None = None,
        share: Path | None = None,
    ) -> None:
        self.folder = folder
        self.server = server
        if server is None:
            self.share = share or folder / "share"
            self.share.mkdir(exist_ok=True)
            self.address = str(self.share)
        else:
            name = f"jobs-{uuid.uuid4().hex[:8]}"
            self.share = server.share(name) / "in a folder"
            self.share.mkdir()
            self.address = server.url(name, self.share.name)
            self.sas = server.sas(name)
        self.roots = [folder / "nodes" / str(index) for index in range(nodes)]
        self.book = folder / "book"
        self._make_plan = make_plan
        self._agent = agent
        self._fake = folder / "bin" / "python"
        self._fake.parent.mkdir()
        self._fake.write_text(FAKE_PYTHON)
        self._fake.chmod(0o755)
        self._jobs: list[Job] = []
        # Python code that every agent runs first.
        self.patch = ""

    def submit(
        self,
        command: str,
        nodes: int = 1,
        python: str = sys.executable,
        patch: str = "",
        secrets: dict[str, str] | None = None,
        told: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        enter: list[list[str]] | None = None,
        parts: bool = False,
        python_env: dict[str, Any] | None = None,
        trainer: str | None = None,
        called: str = "",
        absent: Collection[int] = (),
        granted: bool = False,
        **changes: Any,
    ) -> Job:
        """Start a job; one rank a node.

        Args:
            patch: Python code that each agent runs first (``agent`` and its modules are imported).
            secrets: variables that the ranks are told.
            told: what else the agents are told on their standard input.
            environment: more variables of the agents themselves.
            enter: for each node, what stands before its agent's arguments to run it elsewhere.
            parts: whether the nodes are told that each is a part of this machine.
            python_env: the plan's ``environment``.
            called: what the cluster calls the nodes.
            absent: nodes whose agents are never started: the submitter died.
            granted: whether a scheduler has given the nodes to the job: nobody reserves them.
            trainer: the plan's ``python``; default: a stand-in with Horovod for several nodes, else none.
        """
        number = len(self._jobs) + 1
        plan = self._make_plan(
            self.share,
            **{
                "job": f"{os.getpid():x}j{number}",  # agents end all that carries a job's mark: no two sessions may share one
                "command": command,
                "nodeCount": nodes,
                "ranks": nodes,
                "python": trainer or (str(self._fake) if nodes > 1 else None),
                "environment": python_env,
                **({"board": True, "lossSeconds": 90.0} if self.server else {}),
                **changes,
            },
        )
        paths = protocol.JobPaths(plan["folder"])
        mountfiles.write_closed(str(self.share), paths.plan, [plan])
        if granted:
            reservation = {"nodes": [str(index) for index in range(nodes)]}
        else:
            reservation = reserve(str(self.book), [str(root) for root in self.roots], plan["job"], nodes)
        job = Job(self.share, plan, reservation)
        self._jobs.append(job)
        for node, name in enumerate(reservation["nodes"]):
            if node in absent:
                continue
            root = self.roots[int(name)]
            root.mkdir(parents=True, exist_ok=True)
            argv = [python, "-I", "-S", str(self._agent)]
            if self.patch or patch:
                lines = [
                    "import sys",
                    f"sys.path.insert(0, {str(self._agent)!r})",
                    "from mlflow_batchai.agent import __main__, agent, peers, protocol, runtime, staging",
                    "from mlflow_batchai.agent.attempt import ending, phases",
                    "from mlflow_batchai.agent.reservation import agents",
                    "from mlflow_batchai.agent.transport import inbox, shipper",
                    "from mlflow_batchai.agent.share import index, mounted, mountfiles, rest, sharefiles, wire",
                    self.patch,
                    patch,
                    "sys.exit(__main__.main(sys.argv[1:]))",
                ]
                argv = [python, "-I", "-S", "-c", "\n".join(lines)]
            argv += [
                "agent",
                f"--share={self.address}",
                f"--folder={plan['folder']}",
                "--attempt=1",
                f"--node={node}",
                f"--root={root}",
                "--granted" if granted else f"--reservation={json.dumps(_own(reservation, name))}",
                *([f"--part={node}/{nodes}/{nodes}"] if parts else []),
                *([f"--name={called}"] if called else []),
            ]
            log = root / f"agent-{plan['job']}.log"
            job.logs.append(log)
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [*(enter[node] if enter else []), *argv],
                    cwd="/",
                    env={**allowed(os.environ), **(environment or {})},
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            assert process.stdin
            share = {"share": self.sas} if self.server else {}
            process.stdin.write(
                json.dumps({"variables": secrets or {}, "plan": protocol.digest(plan), **share, **(told or {})}).encode()
            )
            process.stdin.close()
            job.agents.append(process)
        return job

    def close(self) -> None:
        """End all that tests have started here."""
        for job in self._jobs:
            for agent in job.agents:
                if agent.poll() is None:
                    agent.kill()
                agent.wait()
            proc.sweep(job.processes, grace=0.0)
        for root in self.roots:
            proc.sweep(lambda root=root: proc.lock_holders(locks.lock_path(str(root))), grace=0.0)
