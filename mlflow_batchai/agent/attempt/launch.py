"""Run the job's command on one node: what the ranks meet at on node 0, the ranks, and their exits."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.attempt import frameworks, ranks
from mlflow_batchai.agent.attempt.preparation import logged_task
from mlflow_batchai.agent.layout import archive_path
from mlflow_batchai.agent.outcome import Failure, Stop
from mlflow_batchai.agent.peers import Peers
from mlflow_batchai.agent.plan import Plan
from mlflow_batchai.agent.processes.tasks import Task
from mlflow_batchai.agent.runtime import PUMP_SECONDS, Runtime

RENDEZVOUS_SECONDS = 60.0


class Launch:
    """Starts a prepared node's part of the command, and watches it."""

    def __init__(
        self, runtime: Runtime, peers: Peers, known: ranks.Known, counts: Sequence[int], check: Callable[[], None]
    ) -> None:
        self._runtime, self._layout, self._shipper = runtime, runtime.layout, runtime.shipper
        self._plan: Plan = runtime.layout.plan
        self._peers = peers
        self._known = known
        self._counts = counts
        self._check = check
        self._framework = frameworks.of(self._plan.framework)
        self._server: Task | None = None
        self._slots = [slot for slot in ranks.slots_of(self._plan, counts) if slot.node == self._layout.node]

    def serve(self) -> tuple[str, int]:
        """Node 0: prepare what the ranks meet at; its address and port, port 0 where the framework needs none."""
        sizes = ranks.spread(self._plan.process_count, self._counts)
        return self._framework.serve(self._peers.addresses(), sizes, self._start_server)

    def _start_server(self, arguments: Sequence[str]) -> int:
        said: list[bytes] = []
        task = Task("rendezvous server", None, lambda task, stream, lines: said.append(lines) if stream == "out" else None)
        argv = [self._known.python, archive_path(), *arguments]
        self._runtime.start(task, argv, ranks.job_variables(self._layout, self._known), stdin=True, helper=True)
        self._server = task
        until = time.monotonic() + RENDEZVOUS_SECONDS
        while (port := _port(b"".join(said))) is None:
            self._runtime.pump(0.02)
            self._check()
            self.check_server("did not start", until)
        return port

    def check_server(self, what: str = "has ended", until: float = math.inf) -> None:
        """Raise Failure if Horovod's rendezvous server has ended, or it is too late for it."""
        task = self._server
        if task is None or (task.status is None and time.monotonic() <= until):
            return
        self._runtime.drain([task])
        sentence = task.tail[-1] if task.tail else "it said nothing" if task.status is None else self._runtime.how(task)
        where = f" in the image {self._plan.container.image}" if self._plan.container else ""
        raise Failure(
            protocol.RENDEZVOUS_FAILED,
            f"Horovod's rendezvous server {what} on node-0{where}: {sentence}",
            node=0,
            tail=list(task.tail),
        )

    def start(self, rendezvous: Mapping[str, Any]) -> None:
        layout = self._layout
        for slot in self._slots:
            task = logged_task(self._shipper, f"rank {slot.rank}", slot.rank)
            environment = ranks.rank_environment(
                layout,
                self._known,
                slot,
                rendezvous,
                self._peers.network[slot.node]["name"],
                self._peers.announces[layout.node]["cores"],
                archive_path(),
            )
            self._runtime.start(task, ranks.argv(self._plan), environment)
        self._shipper.record("started", urgent=True, node=layout.node, ranks=[slot.rank for slot in self._slots])
        self._shipper.note(f"started {len(self._slots)} rank(s): {self._plan.command}")

    def watch(self) -> None:
        """Return when all ranks of this node have ended well.

        A node without ranks (customToolkit on several nodes) stays taken until node 0's command has ended; node 0 itself, if it
        has none, waits for the others later.
        """
        running = len(self._slots)
        while running or (not self._slots and self._layout.node and not self._peers.done):
            running -= self._look(PUMP_SECONDS)
            try:
                self._check()
            except Stop as stop:
                # A peer's failure is often the consequence of one here that we have not seen yet.
                if not stop.asked:
                    self._look(0.0)
                raise

    def _look(self, timeout: float) -> int:
        """Pump once; the number of ranks that have ended well, and a Failure if one has not."""
        ended = [task for task in self._runtime.pump(timeout) if task.rank is not None]
        failed = [task for task in ended if task.exit_code != 0]
        if failed:
            raise self._failure(failed)
        return len(ended)

    def _failure(self, failed: list[Task]) -> Failure:
        self._runtime.drain(failed, 1.0)
        failures = [
            Failure(
                protocol.JOB_FAILED,
                f"{task.name} on {self._layout.node_id} {self._runtime.how(task)}",
                node=self._layout.node,
                rank=task.rank,
                exit_code=task.exit_code,
                tail=list(task.tail),
                signalled=bool(task.signal or (task.exit_code or 0) > 128),
            )
            for task in failed
        ]
        return min(failures, key=lambda failure: failure.is_consequence and not failure.signalled)


def _port(said: bytes) -> int | None:
    """Port in the rendezvous server's output; None for other lines, which its interpreter prints at its start."""
    for line in said.splitlines():
        try:
            found = json.loads(line.decode("utf-8"))
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("port"), int):
            return int(found["port"])
    return None
