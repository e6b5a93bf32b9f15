"""The agent's processes on this node: start them, read their output and reports, end them."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlflow_batchai.agent import records
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.processes import memory, proc, tasks
from mlflow_batchai.agent.processes.tasks import FULL_READ, Task
from mlflow_batchai.agent.transport.reports import ReportReader
from mlflow_batchai.agent.transport.shipper import Shipper

if TYPE_CHECKING:
    from mlflow_batchai.agent.containers.container import Container

PUMP_SECONDS = 0.2
# For reports that wait on the node's disk when its ranks have ended: as long as for the rest of what it has to send.
LAST_REPORTS_SECONDS = 60.0
LEAST_PUMP_SECONDS = 0.02
# For what ended tasks have left in their pipes.
DRAIN_SECONDS = 2.0
# Of what a job leaves when it ends well: nobody waits for it.
STRAGGLER_SECONDS = 1.0
# What has ended in a container is passed on by the engine's client, which then ends itself.
CLIENT_SECONDS = 2.0
# For a file system's own process to send the rest when it is no longer mounted, before it is asked to end; and then again.
SPARED_SECONDS = 5.0

# In a helper's environment: in a container, where the process we started is not the helper, it is told from others by that.
HELPER_VARIABLE = "BATCHAI_HELPER"


class Runtime:
    """All tasks of this agent, pumped from its one main thread.

    Attributes:
        held: file descriptors that ranks have to inherit, once the node is ours (``Reservation.acquire``).
        reported_models: what ranks said of saved models, the last of each path.
        trials: by its path what rank 0 said of a saved model that it has had tried, the last.
        registry: ``username`` and ``password`` for its image, or None.
    """

    def __init__(self, layout: NodeLayout, shipper: Shipper, secrets: Mapping[str, str]) -> None:
        self.layout = layout
        self.shipper = shipper
        self.secrets = dict(secrets)
        self.held: Sequence[int] | None = None
        self.container: Container | None = None
        self.registry: Mapping[str, str] | None = None
        self.tasks: dict[int, Task] = {}
        self.ranks: list[Task] = []
        self.helpers: list[Task] = []
        # Pids with the time of their start: they may live for days, and numbers come again.
        self._spared: dict[int, int | None] = {}
        self._started: list[Task] = []
        self._memory: dict[Task, memory.Counters] = {}
        self._last_pump = 0.0
        self._pipe_was_full = False
        self.reports = ReportReader(layout.spool)
        self.reported_models: list[dict[str, Any]] = []
        self.trials: dict[str, dict[str, Any]] = {}

    def start(
        self,
        task: Task,
        argv: list[str],
        environment: Mapping[str, str],
        cwd: str | None = None,
        stdin: bool = False,
        helper: bool = False,
        inside: bool = True,
        umask: int | None = None,
    ) -> Task:
        """Start a task; ranks and preparation hold the lock of the node open, where it has one.

        Args:
            stdin: whether it has a pipe as standard input, closed when the agent goes.
            helper: whether it goes on when ranks are ended, until ``stop_helpers``.
            inside: whether it runs in the job's container, where there is one.
            umask: default: the plan's.
        """
        cwd = cwd or self.layout.code
        if self.container and inside:
            environment = dict(environment, **({HELPER_VARIABLE: "1"} if helper else {}))
            argv, environment = self.container.argv_for(argv, environment, cwd, stdin)
        task.start(argv, cwd, environment, list(self.held or ()), stdin, self.layout.umask if umask is None else umask)
        self._memory[task] = self._counters()
        self.tasks[task.pid] = task
        self._started.append(task)
        (self.helpers if helper else self.ranks if task.rank is not None else []).append(task)
        return task

    def pump(self, timeout: float = PUMP_SECONDS) -> list[Task]:
        """Read what has come, ship reports, collect ended tasks. Returns tasks that have ended since the last call."""
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
        for pid, status in proc.reap().items():
            ended_task = self.tasks.pop(pid, None)
            if ended_task is not None:  # others are orphans that came to us as their subreaper
                ended_task.reaped(status)
                ended.append(ended_task)
        return ended

    def _take_reports(self) -> bool:
        """Whether there may be more. While the share stalls they stay on this node's disk."""
        if self.shipper.crowded:
            return True
        found = self.reports.read()
        for report in found:
            body = report.body
            if body.get("type") == "trial":
                self.trials[str(body.get("path"))] = body
            if body.get("type") == "model" and isinstance(body.get("meta"), dict):
                self.reported_models = [one for one in self.reported_models if one["path"] != body.get("path")]
                self.reported_models.append({**body, "path": str(body.get("path"))})
                # The example is large, and one of them is needed: it goes with the model that is chosen.
                body = dict(body, meta={key: value for key, value in body["meta"].items() if key != "example"})
            self.shipper.report(body, report.size, report.rank)
        unread, self.reports.unread = self.reports.unread, 0
        if unread:
            self.shipper.record(records.SKIPPED, lines=unread, files=0)
        return bool(self.reports.moved or unread)

    def how(self, task: Task) -> str:
        """Describe how a task ended, including a lack of memory if the kernel reports one."""
        why = None
        if task.exit_code == 128 + signal.SIGKILL:
            why = memory.ran_out(self._memory[task], self._counters(), memory.machine_bytes())
        return f"{task.verdict}: {why}" if why else task.verdict

    def _counters(self) -> memory.Counters:
        return memory.counters(self.container.first if self.container else os.getpid())

    def run_to_end(self, task: Task, check: Any = None) -> None:
        while task.status is None:
            self.pump()
            if check:
                check()
        self.drain([task])

    def drain(self, tasks: list[Task], seconds: float = DRAIN_SECONDS) -> None:
        """Read what ended tasks have left in their pipes."""
        until = time.monotonic() + seconds
        while any(task.descriptors for task in tasks) and time.monotonic() < until:
            self.pump(0.02)
        for task in tasks:
            task.flush()

    def _ours(self) -> set[int]:
        helpers = {task.pid for task in self.helpers if task.status is None} | self._alive_spared()
        for pid in list(helpers):
            helpers |= proc.descendants(pid)
        if self.container:
            helpers |= self.container.machinery()
        return self.family() - helpers

    def family(self) -> set[int]:
        """All processes of the job on this node but this one."""
        return proc.marked(self.layout.mark, self.layout.node) | proc.descendants(os.getpid())

    def spare(self, pids: set[int]) -> None:
        """Processes of mounts, tasks or not: ``end_everything`` and ``stop_helpers`` leave them to ``end_spared``."""
        self._spared.update((pid, proc.start_time(pid)) for pid in pids)

    def end_spared(self) -> None:
        """End the mounts' own processes. Once nothing of theirs is mounted they go by themselves, some only when they have
        sent what they still held: they are left that time."""
        until = time.monotonic() + SPARED_SECONDS
        while self._left_spared() and time.monotonic() < until:
            self._pump_for(0.05)
        if self._left_spared():
            proc.sweep(self._left_spared, grace=SPARED_SECONDS, sleep=self._pump_for, give_up=5.0)
        self._spared = {}

    def _alive_spared(self) -> set[int]:
        return {pid for pid, started in self._spared.items() if started is not None and proc.is_alive(pid, started)}

    def _left_spared(self) -> set[int]:
        return self._alive_spared() & self.family()

    def end_everything(self, cut_short: bool, rest: Callable[[], float] = lambda: math.inf) -> set[int]:
        """End every process of the job on this node, helpers excepted, and read the rest of their output.

        All of them are asked by SIGTERM at once, and have ``terminateSeconds`` of the plan to save what they have.

        Args:
            cut_short: False after a normal end, when only stragglers can be left.
            rest: seconds that this may still take (``proc.sweep``); output and reports that have not been read then are lost.

        Returns:
            Pids that would not go.
        """
        left: set[int] = set()
        grace = self.layout.plan.terminate_seconds if cut_short else STRAGGLER_SECONDS
        if self.container:
            begun = time.monotonic()
            left = self._end_inside(self.container, grace, rest)
            # Outside of it are only the clients, which follow.
            grace = max(min(grace, STRAGGLER_SECONDS), grace - (time.monotonic() - begun))
        if self.held is not None or self.tasks:
            left |= proc.sweep(self._ours, grace, sleep=self._pump_for, rest=rest)
        self.drain(self.ranks, min(DRAIN_SECONDS, rest()))
        # A rank may have reported between the last look at the spool and its end.
        until = time.monotonic() + LAST_REPORTS_SECONDS
        while self._take_reports() and time.monotonic() < until and rest() > 0:
            if self.shipper.crowded:
                if self.shipper.trouble or not self.shipper.is_alive():
                    break  # nobody takes them any more
                time.sleep(LEAST_PUMP_SECONDS)
        return left

    def _end_inside(self, container: Container, grace: float, rest: Callable[[], float]) -> set[int]:
        """End what runs in the container, helpers excepted; the clients that stand for it follow, each with its exit code."""
        begun = time.monotonic()
        held = tasks.waiting(container.members())
        tasks.hold(held)
        proc.sweep(lambda: container.members() - held, grace, sleep=self._pump_for, rest=rest)
        tasks.release(held)
        grace = max(STRAGGLER_SECONDS, grace - (time.monotonic() - begun))
        left = proc.sweep(container.members, grace, sleep=self._pump_for, rest=rest)
        until = time.monotonic() + min(CLIENT_SECONDS, rest())
        while any(task not in self.helpers for task in self.tasks.values()) and time.monotonic() < until:
            self.pump(0.02)
        return left

    def remove_container(self) -> None:
        """End and remove the job's container, with the helpers in it; nothing can be started in it any more."""
        container, self.container = self.container, None
        if container:
            error = container.remove()
            if error:
                self.shipper.note(error)

    def _pump_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.pump(seconds)
        rest = until - time.monotonic()
        if rest > 0.005:
            time.sleep(rest)

    def stop_helpers(self) -> None:
        helpers = [task for task in self.helpers if task.pid not in self._spared]
        for task in helpers:
            if task.status is None:
                proc.send({task.pid}, signal.SIGKILL)
        until = time.monotonic() + 2.0
        while any(task.status is None for task in helpers) and time.monotonic() < until:
            self.pump(0.02)

    def rank_results(self) -> list[dict[str, Any]]:
        return [
            {
                "rank": task.rank,
                "exitCode": task.exit_code,
                "signal": task.signal,
                "seconds": round((task.ended or time.monotonic()) - task.started, 3),
            }
            for task in self.ranks
        ]
