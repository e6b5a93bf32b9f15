"""The jobs of a sweep before they exist: all of them checked first, then each made ready when its turn comes.

What opens storage is made for as long as a job may take, so a job is prepared anew when it is started; its code is
that of the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_batchai import runs, submitting
from mlflow_batchai.detached import Submitted
from mlflow_batchai.errors import BatchAIError, ParameterError
from mlflow_batchai.sweep.grid import shown
from mlflow_batchai.sweep.plan import SweepPlan, UnstartableError, code_hash
from mlflow_batchai.sweep.sweeps import Sweep

if TYPE_CHECKING:
    from mlflow.entities import Experiment

Say = Callable[[str], None]


class Jobs:
    """Makes the jobs of one project that differ in their parameters.

    Args:
        say: told each warning, once.
        progress: told (bytes sent, bytes to send) while files go up.
    """

    def __init__(
        self,
        source: submitting.Source,
        env_manager: str | None,
        cwd: Path,
        say: Say,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.source = source
        self._env_manager = env_manager
        self._cwd = cwd
        self._say = say
        self._said: set[str] = set()
        self._progress = progress
        self._first: submitting.Ready | None = None

    def check(self, combinations: Sequence[Mapping[str, str]]) -> submitting.Ready:
        """Work all of them out, and ask the nodes about the first: what they need is the same for all.

        Raises:
            ParameterError: a combination can't be used; the message says which.
            BatchAIError: no job of the project could run.
        """
        for number, combination in enumerate(combinations, 1):
            try:
                ready = self._prepare(combination)
            except ParameterError as error:
                which = shown(combination)
                raise ParameterError(f"{error} (combination {number} of {len(combinations)}: {which})") from error
            self._first = self._first or ready
        assert self._first is not None
        return submitting.check(self._first, self._tell)

    def submit(self, sweep: Sweep, experiment: Experiment, index: int) -> Submitted:
        """Start one of them."""
        ready = submitting.check(self._prepare(sweep.plan.combinations[index - 1]), self._tell)
        self._first = self._first or ready
        name = sweep.plan.job_name(index)
        named = dataclasses.replace(ready, prepared=dataclasses.replace(ready.prepared, name=name))
        return submitting.submit(named, sweep.tracking, experiment, name, tags=sweep.job_tags(index), progress=self._progress)

    def _prepare(self, combination: Mapping[str, str]) -> submitting.Ready:
        return submitting.prepare(self.source, combination, self._env_manager, self._tell, self._cwd, self._first)

    def _tell(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)


def read(
    uri: str, entry_point: str, version: str | None, settings: Mapping[str, Any], parameters: Mapping[str, Any], say: Say
) -> submitting.Source:
    """The project of a sweep; see ``submitting.read``."""
    return submitting.read(uri, entry_point, parameters, version, settings, say)


class JobsOfPlan:
    """The jobs of a sweep that another process has begun: its project is read when the first one is started.

    Args:
        say: told each warning, once.
        progress: as of ``Jobs``.
    """

    def __init__(self, plan: SweepPlan, say: Say, progress: Callable[[int, int], None] | None = None) -> None:
        self._plan = plan
        self._say = say
        self._progress = progress
        self._jobs: Jobs | None = None

    def submit(self, sweep: Sweep, experiment: Experiment, index: int) -> Submitted:
        """Start one of them.

        Raises:
            UnstartableError: the project is not here, or not what it was; or another user began the sweep.
            BatchAIError: the job could not be started.
        """
        if not sweep.is_own:
            raise UnstartableError(
                f"the plan of sweep {sweep.name} is not signed with this user's key, so no job is started as it says: take the"
                " key of who began it along (batchai key export, batchai key import), or start a sweep of your own"
            )
        self._jobs = self._jobs or self._read()
        return self._jobs.submit(sweep, experiment, index)

    def _read(self) -> Jobs:
        plan = self._plan
        try:
            source = read(plan.uri, plan.entry_point, plan.version, plan.settings, plan.combinations[0], self._say)
            jobs = Jobs(source, plan.env_manager, Path(plan.cwd), self._say, self._progress)
            ready = jobs.check(plan.combinations[:1])
        except BatchAIError as error:
            raise UnstartableError(f"jobs of sweep {plan.name} can't be started from here: {error}") from error
        if code_hash(ready.prepared.plan.code) != plan.code:
            raise UnstartableError(
                f"the project {runs.shown(plan.uri)} has changed since sweep {plan.name} was started, and jobs of other code"
                " can't be compared with those that ran: bring it back as it was and attach again, or end the sweep (batchai"
                f" sweep terminate {plan.name}) and start another"
            )
        return jobs
