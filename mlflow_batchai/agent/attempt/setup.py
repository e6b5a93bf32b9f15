"""Run the cluster's setup task on a node: once per boot and content, with its output on a share."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import IO, Callable

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.environment import allowed
from mlflow_batchai.agent.layout import expand
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.plan import SetupTask
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.processes.tasks import Task
from mlflow_batchai.agent.runtime import Runtime
from mlflow_batchai.agent.share.base import LogFile
from mlflow_batchai.agent.share.mounted import MountedShare

# It may install much; one that hangs must not keep a node for ever.
SECONDS = 3600.0
BLOCK = 1 << 20
# An administrator's: what it installs by sudo has to serve the job's user.
UMASK = 0o022
STREAMS = {"out": "stdout", "err": "stderr"}


class SetupTaskRun:
    """The plan's setup task on a node that has been taken: the node's lock keeps two from running at once.

    Args:
        check: raises if the attempt is to end. The job's own time limit is none of its business.

    Attributes:
        folder: the task's own on the node's disk, kept from job to job: its last output, its working directory ``wd``, and
            ``done``, which holds the boot that it has run well in.
    """

    def __init__(
        self,
        runtime: Runtime,
        task: SetupTask,
        check: Callable[[], None],
        secrets: Mapping[str, str],
        name: str,
        gpus: int,
    ) -> None:
        self._runtime, self._layout, self._shipper = runtime, runtime.layout, runtime.shipper
        self._check = check
        self._secrets = secrets
        self._name = name
        self._gpus = gpus
        self._task = task
        self._files: dict[str, IO[bytes]] = {}
        self.folder = os.path.join(self._layout.root, "setup", self._task.id)

    def run(self) -> None:
        """Run it, unless it has run here well since the node's last boot.

        Raises:
            Failure: it exited with another code than 0, or took too long.
        """
        boot = proc.boot_id()
        if boot and proc.kernel_text(self._done) == boot:
            self._shipper.note(f"setup task: done since the last boot ({self._task.id})")
            return
        self._shipper.record("phase", urgent=True, phase="setup task", node=self._layout.node)
        self._shipper.note(f"setup task ({self._task.id})")
        directory = os.path.join(self.folder, "wd")
        os.makedirs(directory, exist_ok=True)
        task = Task("setup task", None, self._keep)
        try:
            for stream in STREAMS:
                self._files[stream] = open(self._file(stream), "wb")  # noqa: SIM115 (closed below)
            argv = ["bash", "-c", self._task.command]
            self._runtime.start(task, argv, self._environment(), cwd=directory, inside=False, umask=UMASK)
            until = time.monotonic() + SECONDS
            self._runtime.run_to_end(task, lambda: self._go_on(task, until))
        finally:
            # Who has left a process behind is not heard any more.
            for file in self._files.values():
                file.close()
            self._files = {}
            self._ship()
        if task.exit_code != 0:
            raise self._failure(task, task.verdict)
        with open(self._done, "w", encoding="ascii") as marker:
            marker.write(boot)

    @property
    def _done(self) -> str:
        return os.path.join(self.folder, "done")

    def _file(self, stream: str) -> str:
        return os.path.join(self.folder, STREAMS[stream] + ".txt")

    def _keep(self, task: Task, stream: str, lines: bytes) -> None:
        if stream in self._files:
            self._files[stream].write(lines)
            # Who looks on the node while it runs, or after it was killed, sees all.
            self._files[stream].flush()

    def _go_on(self, task: Task, until: float) -> None:
        self._check()
        if time.monotonic() > until:
            raise self._failure(task, f"took longer than {SECONDS:.0f} s")

    def _failure(self, task: Task, how: str) -> Failure:
        return Failure(
            protocol.SETUP_TASK_FAILED,
            f"the cluster's setup task on {self._layout.node_id} ({self._name}) {how}",
            node=self._layout.node,
            exit_code=task.exit_code,
            tail=list(task.tail),
        )

    def _environment(self) -> dict[str, str]:
        """Environment of the setup task: the node, the cluster's mounts and its own variables, nothing of the job."""
        environment = allowed(os.environ)
        environment["AZ_BATCHAI_MOUNT_ROOT"] = self._layout.cluster_mounts
        environment["AZ_BATCHAI_NUM_GPUS"] = str(self._gpus)
        for entry in self._task.environment_variables:
            environment[entry.name] = expand(entry.value, environment)
        environment.update(self._secrets)
        environment[protocol.MARK_VARIABLE] = self._layout.mark
        environment[protocol.NODE_VARIABLE] = str(self._layout.node)
        return environment

    def _ship(self) -> None:
        """Append its output to the logs; a share that doesn't take them is no reason to end the job."""
        try:
            for stream, kind in STREAMS.items():
                self._append(self._file(stream), "{}-{}.txt".format(kind, re.sub(r"[^\w.-]", "-", self._name)))
        except OSError as error:
            sentence = "the setup task's output could not all be written to its logs; it lies in %s: %s"
            self._shipper.note(sentence % (self.folder, error))

    def _append(self, source: str, name: str) -> None:
        path = f"{self._task.logs.path}/{name}"
        log: LogFile | None = None
        with open(source, "rb") as file:
            for block in iter(lambda: file.read(BLOCK), b""):
                log = log or self._log(path)
                log.append(block)
                log.flush(last=True)
        if log:
            log.close()

    def _log(self, path: str) -> LogFile:
        index = self._task.logs.volume
        if index is None:
            return self._layout.control.log_file(path)
        return MountedShare(self._layout.mount_path(self._layout.plan.volumes[index])).log_file(path)
