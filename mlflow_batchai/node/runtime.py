"""The agent's processes on this node: starting them, reading their output and reports, ending them."""

import os
import select
import signal
import time
from typing import Any, Dict, List, Mapping, Optional, Set

from mlflow_batchai.node import processes
from mlflow_batchai.node.layout import NodeLayout
from mlflow_batchai.node.reports import ReportReader
from mlflow_batchai.node.shipper import Shipper
from mlflow_batchai.node.tasks import FULL_READ, Task

PUMP_SECONDS = 0.2
LEAST_PUMP_SECONDS = 0.02
TERMINATE_SECONDS = 5.0


class Runtime:
    """All tasks of this agent, pumped from its one main thread."""

    def __init__(self, layout: NodeLayout, shipper: Shipper, secrets: Mapping[str, str]) -> None:
        self.layout = layout
        self.shipper = shipper
        self.secrets = dict(secrets)
        self.node_lock: Optional[int] = None
        self.tasks: Dict[int, Task] = {}
        self.ranks: List[Task] = []
        self.helpers: List[Task] = []
        self._started: List[Task] = []
        self._last_pump = 0.0
        self._pipe_was_full = False
        self.reports = ReportReader(layout.spool)
        self.reported_models: List[str] = []

    def start(
        self,
        task: Task,
        argv: List[str],
        environment: Mapping[str, str],
        cwd: Optional[str] = None,
        stdin: bool = False,
        helper: bool = False,
    ) -> Task:
        """Start a task; ranks and preparation hold the node's lock open."""
        keep = [] if self.node_lock is None else [self.node_lock]
        task.start(argv, cwd or self.layout.code, environment, keep, stdin)
        self.tasks[task.pid] = task
        self._started.append(task)
        (self.helpers if helper else self.ranks if task.rank is not None else []).append(task)
        return task

    def pump(self, timeout: float = PUMP_SECONDS) -> List[Task]:
        """Read what has come, ship reports, collect ended tasks.

        Returns:
            Tasks that have ended since the last call.
        """
        by_descriptor = {descriptor: task for task in self._started for descriptor in task.descriptors}
        pause = self._last_pump + LEAST_PUMP_SECONDS - time.monotonic()
        if pause > 0 and not self._pipe_was_full:
            # A rank that writes all the time must not wake us for every line; its pipe holds the rest.
            time.sleep(min(pause, timeout))
        if self.shipper.busy:
            time.sleep(min(timeout, LEAST_PUMP_SECONDS))
        elif by_descriptor:
            poller = select.poll()
            for descriptor in by_descriptor:
                poller.register(descriptor, select.POLLIN)
            ready = poller.poll(max(0.0, timeout - max(0.0, pause)) * 1000)
            most = max((by_descriptor[descriptor].read(descriptor) for descriptor, _ in ready), default=0)
            self._pipe_was_full = most >= FULL_READ
        else:
            time.sleep(timeout)
        self._last_pump = time.monotonic()
        self._take_reports()
        self._started = [task for task in self._started if task.status is None or task.descriptors]
        ended = []
        for pid, status in processes.reap().items():
            ended_task = self.tasks.pop(pid, None)
            if ended_task is not None:  # others are orphans that came to us as their subreaper
                ended_task.reaped(status)
                ended.append(ended_task)
        return ended

    def _take_reports(self) -> None:
        for record in self.reports.read():
            if record.get("type") == "model":
                self.reported_models.append(str(record.get("path")))
            self.shipper.record("report", body=record)

    def run_to_end(self, task: Task, check: Any = None) -> None:
        """Pump until a started task has ended and its output is read."""
        while task.status is None:
            self.pump()
            if check:
                check()
        self.drain([task])

    def drain(self, tasks: List[Task], seconds: float = 2.0) -> None:
        """Read what ended tasks have left in their pipes."""
        until = time.monotonic() + seconds
        while any(task.descriptors for task in tasks) and time.monotonic() < until:
            self.pump(0.02)
        for task in tasks:
            task.flush()

    def _ours(self) -> Set[int]:
        helpers = {task.pid for task in self.helpers if task.status is None}
        return (processes.marked(self.layout.mark, self.layout.node) | processes.descendants(os.getpid())) - helpers

    def end_everything(self, kill_first: bool) -> Set[int]:
        """End every process of the job on this node, helpers excepted, and read the rest of their output.

        Args:
            kill_first: False after a normal end, when only stragglers can be left.

        Returns:
            Pids that would not go.
        """
        left: Set[int] = set()
        if self.node_lock is not None or self.tasks:
            left = processes.sweep(self._ours, TERMINATE_SECONDS if kill_first else 1.0, sleep=lambda s: self._pump_for(s))
        self.drain(self.ranks)
        # A rank may have reported between the last look at the spool and its end.
        self._take_reports()
        return left

    def _pump_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.pump(seconds)
        rest = until - time.monotonic()
        if rest > 0.005:
            time.sleep(rest)

    def stop_helpers(self) -> None:
        """End the rendezvous server and the like."""
        for task in self.helpers:
            if task.status is None:
                processes.send({task.pid}, signal.SIGKILL)
        until = time.monotonic() + 2.0
        while any(task.status is None for task in self.helpers) and time.monotonic() < until:
            self.pump(0.02)

    def rank_results(self) -> List[Dict[str, Any]]:
        """How each rank of this node ended."""
        return [
            {
                "rank": task.rank,
                "exitCode": task.exit_code,
                "signal": task.signal,
                "seconds": round((task.ended or time.monotonic()) - task.started, 3),
            }
            for task in self.ranks
        ]
