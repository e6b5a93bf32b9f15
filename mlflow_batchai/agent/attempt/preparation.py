"""Prepare a node for training: the training interpreter and the job's own preparation, cached where allowed."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Callable

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.environments import kept, trainenv
from mlflow_batchai.agent.layout import archive_path
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.plan import Plan
from mlflow_batchai.agent.processes.tasks import Task
from mlflow_batchai.agent.runtime import Runtime
from mlflow_batchai.agent.transport.shipper import Shipper


def logged_task(shipper: Shipper, name: str, rank: int | None = None) -> Task:
    """A task whose output goes into the rank's log, without a rank into the preparation's."""
    return Task(name, rank, lambda task, stream, lines: shipper.log(rank, stream, lines))


class Preparation:
    """The steps before any rank, on one node.

    Args:
        variables: the job's environment on this node, as it is by then.

    Attributes:
        below: the folder of the interpreter over which the job has an environment of its own; empty: it has none.
    """

    def __init__(self, runtime: Runtime, check: Callable[[], None], variables: Callable[[], dict[str, str]]) -> None:
        self.runtime, self.layout, self.shipper = runtime, runtime.layout, runtime.shipper
        self.plan: Plan = runtime.layout.plan
        self._check = check
        self._variables = variables
        self._python = sys.executable
        self._made = ""
        self.below = ""

    def interpreter(self) -> str:
        """Absolute path of the interpreter that trains; in a container the image's, empty if it has none.

        With a job preparation it is in an environment of the job's own, which ``job_preparation`` makes.
        """
        environment = self.plan.environment
        if self.runtime.container:
            python = self.runtime.container.python
        elif environment:
            with self._disk(protocol.ENVIRONMENT_FAILED, "building the training environment"):
                python = trainenv.build(self.layout, environment, self._run, self._wait, self.say, self._variables())
                self._made = kept.making(os.path.dirname(os.path.dirname(python)))
        else:
            python = trainenv.interpreter(self.layout, os.environ)
        self.shipper.note("training interpreter: %s" % (python or "none"))
        self._python = python
        if self.layout.venv is None:
            return python
        if trainenv.is_wrapper(python):
            self.shipper.note(
                f"{python} is a script: the job has no environment of its own over it, and preparation may change it"
            )
            return python
        self.below = os.path.dirname(python)
        return os.path.join(self.layout.venv, "bin", "python")

    def job_preparation(self) -> None:
        """Run ``jobPreparation``, unless an earlier job of the same content has left its result on this disk.

        Raises:
            Failure: it exited with another code than 0.
        """
        if not self.plan.preparation:
            return
        folder = self.layout.prepared
        if folder is None:
            with self._disk(protocol.NODE_SETUP_FAILED, "job preparation"):
                self._prepare()
            return
        once = kept.once(folder, self._wait, self.say, "the same job preparation", self._stamp)
        with self._disk(protocol.NODE_SETUP_FAILED, "job preparation"), once as needed:
            if needed:
                os.mkdir(folder)
                self._prepare()
            else:
                self.shipper.note(f"job preparation: done before ({self.plan.preparation_cache})")

    def _stamp(self) -> str:
        """The interpreter that it was done for; what it installed into an environment goes when that is made anew."""
        if self.runtime.container:
            return f"{self.runtime.container.identity} {self._python}"
        return " ".join(filter(None, ["venv", trainenv.described(self.layout, self._python), self._made]))

    def say(self, text: str) -> None:
        self.shipper.record("phase", urgent=True, phase=text, node=self.layout.node)
        self.shipper.note(text)

    def _prepare(self) -> None:
        if self.layout.venv and self.below:
            made = self._run([self._python, "-I", archive_path(), "overlay", self.layout.venv], {}, "the job's environment")
            if made.exit_code != 0:
                raise Failure(
                    protocol.ENVIRONMENT_FAILED,
                    f"the job's own environment over {self._python} on {self.layout.node_id} can't be made: it {made.verdict}",
                    node=self.layout.node,
                    exit_code=made.exit_code,
                    tail=list(made.tail),
                )
        self.say("job preparation")
        task = logged_task(self.shipper, "job preparation")
        self.runtime.start(task, ["bash", "-c", self.plan.preparation], self._variables())
        self.runtime.run_to_end(task, self._check)
        if task.exit_code != 0:
            raise Failure(
                protocol.JOB_PREPARATION_FAILED,
                f"job preparation on {self.layout.node_id} {self.runtime.how(task)}",
                node=self.layout.node,
                exit_code=task.exit_code,
                tail=list(task.tail),
            )

    def _run(self, argv: list[str], environment: Mapping[str, str], name: str) -> Task:
        task = logged_task(self.shipper, name)
        self.runtime.start(task, argv, dict(self._variables(), **environment), cwd=self.layout.temp)
        self.runtime.run_to_end(task, self._check)
        return task

    @contextlib.contextmanager
    def _disk(self, code: str, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error is self.shipper.broken:
                raise
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                sentence = trainenv.full_disk(self.layout, doing)
            else:
                sentence = f"{doing} on {trainenv.named(self.layout)} can't use the disk: {error}"
            raise Failure(code, sentence, node=self.layout.node) from error

    def _wait(self) -> None:
        self.runtime.pump(0.05)
        self._check()
