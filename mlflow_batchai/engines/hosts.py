"""The engine for machines without a scheduler: this one, cut into N nodes.

On the local cluster a node is one folder and the process tree of its agent. Which job has which node stands in the ticket book
(``node/tickets.py``); agents start at submit and wait for their turn.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from mlflow_batchai import shell
from mlflow_batchai.engines import archive
from mlflow_batchai.engines.base import Handle, NodeCommand, Poll, PollState, StartRequest
from mlflow_batchai.errors import ClusterError
from mlflow_batchai.node import processes
from mlflow_batchai.node.environment import for_agents

CANCEL_SECONDS = 40.0


class LocalHosts:
    """N nodes on this machine.

    Args:
        home: the client's folder (``$BATCHAI_HOME``).
        cluster: the cluster's name.
        nodes: how many.
        share: the control share's directory.
    """

    def __init__(self, home: Path, cluster: str, nodes: int, share: Path) -> None:
        self._folder = home / "nodes" / cluster
        self._book = self._folder / "book"
        self._roots = [self._folder / str(index) for index in range(nodes)]
        self._agents = home / "agents"
        self._share = share

    @property
    def node_limit(self) -> int:
        return len(self._roots)

    def render(self, request: StartRequest) -> Sequence[NodeCommand]:
        ticket = {"number": 0, "after": [], "taken": 0}
        return [
            NodeCommand(node, self._argv(request, node, self._roots[node], ticket), for_agents(os.environ))
            for node in range(request.node_count)
        ]

    def submit(self, request: StartRequest) -> Handle:
        if request.node_count > self.node_limit:
            raise ClusterError(f"the job wants {request.node_count} nodes and the cluster has {self.node_limit}")
        roots = [str(root) for root in self._roots]
        result = shell.run(
            [*self._agent, "ticket", "take", str(self._book), request.job, str(request.node_count), *roots],
            for_agents(os.environ),
        )
        if result.code != 0:
            raise ClusterError(f"no ticket could be taken in {self._book}: {(result.err.strip().splitlines() or ['?'])[-1]}")
        ticket = json.loads(result.out)
        secrets = json.dumps(dict(request.secrets)).encode()
        nodes: list[dict[str, object]] = []
        handle = {
            "engine": "local",
            "host": socket.gethostname(),
            "ticket": ticket["number"],
            "mark": request.mark,
            "nodes": nodes,
        }
        with contextlib.ExitStack() as undo:
            undo.callback(self.cancel, handle)
            for node, index in enumerate(ticket["nodes"]):
                root = self._roots[index]
                own = {"number": ticket["number"], "taken": ticket["taken"], "after": ticket["after"][str(index)]}
                log = root / "logs" / f"{request.job}-{request.attempt}.log"
                pid = shell.spawn(self._argv(request, node, root, own), for_agents(os.environ), log, secrets)
                nodes.append({"index": index, "pid": pid, "started": processes.start_time(pid), "log": str(log)})
            undo.pop_all()
        return handle

    def poll(self, handle: Handle) -> Poll:
        if handle["host"] != socket.gethostname():
            return Poll(PollState.UNKNOWN, f"the job runs on {handle['host']}, whose processes can't be seen from here")
        gone = tuple(node for node, entry in enumerate(handle["nodes"]) if not _alive(entry))
        if gone:
            return Poll(PollState.GONE, self._why(handle, gone), gone)
        states = [self._state(handle, entry["index"]) for entry in handle["nodes"]]
        if "waiting" in states:
            return Poll(PollState.QUEUED, f"{states.count('waiting')} of {len(states)} nodes are taken by other jobs")
        return Poll(PollState.ALIVE)

    def cancel(self, handle: Handle) -> None:
        if handle["host"] != socket.gethostname():
            raise ClusterError(f"the job runs on {handle['host']}; end it there")
        # Agents first: they would otherwise see their ranks die and tell a story of their own. Their descendants go with them,
        # since one that has thrown away its environment can't be found later.
        agents = {entry["pid"] for entry in handle["nodes"] if _alive(entry)}
        family = {pid: processes.start_time(pid) for agent in agents for pid in (agent, *processes.descendants(agent))}
        left = processes.sweep(
            lambda: {pid for pid, started in family.items() if started is not None and processes.is_alive(pid, started)},
            grace=0.0,
            give_up=CANCEL_SECONDS,
        )
        left |= processes.sweep(lambda: processes.marked(handle["mark"]), grace=3.0, give_up=CANCEL_SECONDS)
        shell.run([*self._agent, "ticket", "drop", str(self._book), str(handle["ticket"])], for_agents(os.environ))
        if left:
            raise ClusterError(f"processes {sorted(left)} of the job would not end; end them by hand")

    @functools.cached_property
    def _agent(self) -> list[str]:
        """The agent's command, its archive built once for all nodes."""
        # -I: the submitter's PYTHON* variables and user site don't leak in; -S: no site-packages, a tenth of the start.
        return [sys.executable, "-I", "-S", str(archive.stored(self._agents))]

    def _argv(self, request: StartRequest, node: int, root: Path, ticket: dict[str, object]) -> tuple[str, ...]:
        return (
            *self._agent,
            "agent",
            f"--share={self._share}",
            f"--folder={request.folder}",
            f"--attempt={request.attempt}",
            f"--node={node}",
            f"--root={root}",
            f"--ticket={json.dumps(ticket)}",
        )

    def _state(self, handle: Handle, index: int) -> str:
        try:
            # The cluster's document may name fewer nodes by now: not self._roots.
            text = (self._folder / str(index) / "tickets" / f"{handle['ticket']}.state").read_text(encoding="utf-8")
            return str(json.loads(text)["state"])
        except (OSError, ValueError, KeyError):
            return "waiting"

    def _why(self, handle: Handle, gone: tuple[int, ...]) -> str:
        """What the first agent that went said last, before it had the share to say it on."""
        log = Path(handle["nodes"][gone[0]]["log"])
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
        last = f": {lines[-1]}" if lines else ""
        return f"the agent of node-{gone[0]} is gone{last}"


def _alive(entry: Handle) -> bool:
    return entry["started"] is not None and processes.is_alive(entry["pid"], entry["started"])
