"""Prepare and submit the jobs of a sweep: one project, read once, with many sets of parameters."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from mlflow_batchai import terminal
from mlflow_batchai.agent.plan import plain
from mlflow_batchai.client import submitting
from mlflow_batchai.errors import BatchAIError, JobError, ParameterError
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.sweep.parameters import shown
from mlflow_batchai.sweep.sweeps import Sweep, SweepPlan
from mlflow_batchai.tracking import runs


class UnstartableError(JobError):
    """No job of the sweep can be started from here; trying again does not help."""


class JobStarter:
    """Submits jobs of a sweep. All of them have the code that the first one was prepared with.

    Args:
        say: told each warning.
        progress: told (bytes sent, bytes to send) while files are sent.

    Attributes:
        first: the job whose code all have, once it was checked.
    """

    def __init__(self, say: Callable[[str], None], progress: Callable[[int, int], None] | None = None) -> None:
        self._say = say
        self._progress = progress
        self.first: submitting.Ready | None = None

    def check(self, plan: SweepPlan) -> submitting.Ready:
        """Read the project, prepare all of its jobs, and ask the nodes about the first: all jobs need the same of them.

        Raises:
            ParameterError: a combination can't be used; the message says which.
            BatchAIError: no job of the project could run.
        """
        parameters = plan.combinations[0]
        source = submitting.read(plan.uri, plan.entry_point, parameters, plan.version, plan.settings, self._say)
        first: submitting.Ready | None = None
        for number, parameters in enumerate(plan.combinations, 1):
            try:
                ready = submitting.prepare(source, parameters, plan.env_manager, self._say, Path(plan.cwd), first)
            except ParameterError as error:
                which = f"combination {number} of {len(plan.combinations)}: {shown(parameters)}"
                raise ParameterError(f"{error} ({which})") from error
            first = first or ready
        assert first is not None
        return submitting.check(first, self._say)

    def submit(self, sweep: Sweep, number: int) -> Submitted:
        """Start a job.

        Raises:
            UnstartableError: the project is not here or has changed, or another user began the sweep.
            BatchAIError: the job could not be started.
        """
        first = self.first = self.first or self._resume(sweep)
        plan, name = sweep.plan, sweep.plan.job_name(number)
        # Prepared again: credentials of storage are made for the time that a job may take.
        parameters = plan.combinations[number - 1]
        ready = submitting.prepare(first.source, parameters, plan.env_manager, self._say, Path(plan.cwd), first)
        ready = submitting.check(ready, self._say)
        ready = dataclasses.replace(ready, prepared=dataclasses.replace(ready.prepared, name=name))
        experiment = runs.client(sweep.tracking).get_experiment(sweep.experiment_id)
        tags = sweep.job_tags(number)
        return submitting.submit(ready, sweep.tracking, experiment, name, tags=tags, progress=self._progress)

    def _resume(self, sweep: Sweep) -> submitting.Ready:
        """Read the project of a sweep that another process began."""
        plan = sweep.plan
        if not sweep.is_own:
            raise UnstartableError(
                f"the plan of sweep {plan.name} is not signed with this user's key, so no job is started as it says: take the"
                " key of who began it along (batchai key export, batchai key import), or start a sweep of your own"
            )
        try:
            ready = self.check(dataclasses.replace(plan, combinations=plan.combinations[:1]))
        except BatchAIError as error:
            raise UnstartableError(f"jobs of sweep {plan.name} can't be started from here: {error}") from error
        if code_hash(ready) != plan.code:
            raise UnstartableError(
                f"the project {terminal.shown(plan.uri)} has changed since sweep {plan.name} was started, and jobs of other"
                " code can't be compared with those that ran: bring it back as it was and attach again, or end the sweep"
                f" (batchai sweep terminate {plan.name}) and start another"
            )
        return ready


def code_hash(ready: submitting.Ready) -> str:
    """The hash of the project's files, as a job's plan lists them."""
    return hashlib.sha256(json.dumps(plain(ready.prepared.plan.code), sort_keys=True).encode()).hexdigest()
