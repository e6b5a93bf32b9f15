"""Bringing a sweep to its end: its jobs are started as there is room for them, watched, ended, and its run with them.

Any process may do that, one at a time (``right``), and every process can die: what was started goes on by its own follower, and
what wasn't is started by whoever drives the sweep next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mlflow_batchai import attempts, detached, lookup, runner, runs, stores
from mlflow_batchai.cluster import clusters
from mlflow_batchai.console import JobConsole
from mlflow_batchai.detached import Submitted
from mlflow_batchai.errors import BatchAIError, JobDetachedError, JobError, ShareError, TrackingError
from mlflow_batchai.job.jobs import pause_after
from mlflow_batchai.signals import Signals
from mlflow_batchai.starting import verdict_of
from mlflow_batchai.sweep import sweeps
from mlflow_batchai.sweep.plan import UnstartableError
from mlflow_batchai.sweep.results import Results
from mlflow_batchai.sweep.right import Right
from mlflow_batchai.sweep.starts import Outcome, Starts
from mlflow_batchai.sweep.sweeps import Sweep
from mlflow_batchai.sweep.view import View

if TYPE_CHECKING:
    from mlflow.entities import Experiment

# How often the store is asked for all jobs, in one search.
LOOK_SECONDS = 1.0
# How often we look whether followers live that are no children of ours.
FOLLOWER_SECONDS = 5.0
# For how long the store may be away.
PATIENCE_SECONDS = 600.0


class Starter(Protocol):
    """What starts a job of a sweep."""

    def submit(self, sweep: Sweep, experiment: Experiment, index: int) -> Submitted:
        """Start one."""


class Driving:
    """Drives a sweep, or watches while another process does.

    Args:
        starter: starts its jobs.
        signals: the first Ctrl-C ends the sweep (or leaves it, where signals don't cancel); others leave it.
        take_over: see ``Right``.
        fresh: whether we have just begun the sweep: if none of its jobs can be started, its run ends.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        sweep: Sweep,
        starter: Starter,
        console: JobConsole,
        signals: Signals,
        take_over: bool = False,
        fresh: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._sweep = sweep
        self._starter = starter
        self._console = console
        self._signals = signals
        self._mlflow = runs.client(sweep.tracking)
        self._experiment = self._mlflow.get_experiment(sweep.experiment_id)
        self._right = Right(self._mlflow, sweep.run_id, take_over)
        self._view = View(sweep, self._mlflow, console)
        self._submitted: dict[int, Submitted] = {}
        self._asked_to_end: set[int] = set()
        # Jobs that nobody can follow now, and why: they are not waited for.
        self._left_alone: dict[int, str] = {}
        self._fresh = self._resumed = fresh
        self._sleep = sleep
        self._starts, self._next_followers = Starts(), 0.0

    def run(self) -> None:
        """Stay until the sweep's run has ended.

        Raises:
            JobDetachedError: told to leave; the message says what goes on.
            JobError: jobs can't be started, or nobody can follow them.
            TrackingError: the store was away for too long.
        """
        trouble: float | None = None
        try:
            with self._signals.installed():
                self._signals.watching()
                while True:
                    begun = time.monotonic()
                    try:
                        if self._round():
                            return
                        trouble = None
                    except Exception as error:
                        if not stores.may_pass(error):
                            raise
                        if self._signals.left:
                            continue  # the call was cut off by it; the next look says so
                        trouble = trouble or begun
                        self._bear(error, begun - trouble)
                    self._sleep(pause_after(time.monotonic() - begun, LOOK_SECONDS))
        except JobDetachedError as error:
            raise JobDetachedError(f"{error}; {self._goes_on()}") from None
        finally:
            self._right.release()
            self._console.close()

    def results(self) -> Results:
        """What has become of the jobs, as of the last look."""
        return self._view.results()

    @property
    def status(self) -> str:
        """That of the sweep's run, as of the last look."""
        return self._view.status

    # One look, and what follows from it.

    def _round(self) -> bool:
        """Look, and do what is to be done; whether the sweep's run has ended."""
        self._signals.check(self._cancel)
        view = self._view
        view.look()
        has_ended = view.status != "RUNNING"
        view.show(self._right.held)
        if has_ended:
            return True
        if view.ending:
            self._end_jobs()
        if not self._right.take(view.parent):
            view.say_once(f"{self._right.who or 'another process'} starts the jobs of sweep {self._sweep.name}; watching it")
            self._resumed = False
            return False
        if not self._resumed:
            self._resume()
        self._keep_followers()
        if not view.ending:
            self._start_more()
        if view.active - set(self._left_alone) or (view.unstarted and not view.ending):
            return False
        if left_alone := [why for index, why in self._left_alone.items() if index in view.active]:
            raise JobError(f"{left_alone[0]}; then: batchai sweep attach {self._sweep.name}")
        self._finish()
        return True

    def _goes_on(self) -> str:
        return self._view.goes_on(self._right.held)

    def _bear(self, error: Exception, seconds: float) -> None:
        """The store is away."""
        why = f"the tracking store {self._sweep.tracking.uri} can't be asked: {' '.join(str(error).split())[:300]}"
        if seconds > PATIENCE_SECONDS:
            raise TrackingError(f"{runs.shown(why)}; {self._goes_on()}") from error
        self._view.say_once(f"{runs.shown(why)} (still trying)")

    # Starting.

    def _resume(self) -> None:
        """What another process has begun: jobs that it had no time to start are begun again, the others get a follower."""
        for index in sorted(self._view.active - set(self._submitted)):
            try:
                found = lookup.of_run(self._view.jobs[index], self._sweep.tracking)
                if found.job.attempt == 1 and found.job.handle() is None and not self._view.ending:
                    self._begin_again(found)
                    self._view.began(index, found.run_id)
                else:
                    detached.ensure_follower(found)
                self._submitted[index] = found
            except lookup.NoFolderError as lost:
                if lost.unstarted:
                    # Without its number it is no job's run, and another one is started.
                    self._mlflow.delete_tag(lost.run_id, sweeps.TAG_INDEX)
                    self._mlflow.delete_run(lost.run_id)
                    self._view.forget(index)
                else:
                    self._left_alone[index] = str(lost)
        self._resumed = True

    def _begin_again(self, found: Submitted) -> None:
        """Who submitted a job died before all agents were started: those that came are told to go, and another one begins."""
        why = "its submitter died before it had started every agent"
        found.job.claim_verdict(verdict_of(JobError(why)))
        try:
            attempts.retry(found, clusters.load(found.job.plan.cluster)[0], self._view.say_once)
        except BatchAIError as error:
            self._console.say(f"job {found.job.name}: {why}, and it could not be started again: {error}")

    def _start_more(self) -> None:
        """Start as many as there is room for; a signal that comes meanwhile is heeded after each."""
        room = self._sweep.plan.parallel - len(self._view.active - set(self._left_alone))
        for index in self._starts.now(self._view.unstarted)[: max(0, room)]:
            self._signals.check(self._cancel)
            if self._signals.cancelled or not self._start(index):
                return

    def _start(self, index: int) -> bool:
        self._signals.submitting = True
        try:
            self._submitted[index] = self._starter.submit(self._sweep, self._experiment, index)
        except KeyboardInterrupt:
            self._resumed = False
            return False  # pressed twice: what was begun of this job is undone, and the sweep ends at the next look
        except Exception as error:
            # Whether it has a run is seen by looking again; one of which nothing was started is made anew.
            self._resumed = False
            if stores.may_pass(error):
                raise  # the store is away: that is waited for
            self._failed_start(index, error)
            return False
        finally:
            self._signals.submitting = False
        self._starts.succeeded()
        self._view.began(index, self._submitted[index].run_id)
        return True

    def _failed_start(self, index: int, error: Exception) -> None:
        if not (isinstance(error, BatchAIError) or stores.is_refusal(error)):
            raise error
        self._view.look_at_all()
        what = f"job {self._sweep.plan.job_name(index)} could not be started: {error}"
        if self._fresh and not self._view.jobs:
            self._mlflow.set_tag(self._sweep.run_id, runs.TAG_REASON, runs.tag_text(str(error)))
            self._mlflow.set_terminated(self._sweep.run_id, "FAILED")
            raise JobError(what) from error
        outcome = self._starts.failed(index, error)
        if outcome is Outcome.STOP or isinstance(error, UnstartableError):
            raise JobError(f"{what}; {self._goes_on()}") from error
        self._view.say_once(what)
        if outcome is Outcome.LOST:
            self._view.began(index, sweeps.lose(self._mlflow, self._sweep, index, str(error)))

    def _keep_followers(self) -> None:
        """Start followers that have died again; of those that aren't our children that costs a look at the share."""
        looks = time.monotonic() >= self._next_followers
        if looks:
            self._next_followers = time.monotonic() + FOLLOWER_SECONDS
        for index in sorted(self._view.active - set(self._left_alone)):
            submitted = self._submitted.get(index)
            if submitted is None or (submitted.follower is None and not looks):
                continue
            try:
                detached.keep_follower(submitted)
            except ShareError as error:
                self._view.say_once(f"{error} (jobs go on; still looking for it)")
            except JobError as error:
                self._left_alone[index] = str(error)
                self._console.say(f"job {submitted.job.name}: {error}")

    # Ending.

    def _cancel(self) -> None:
        """Ctrl-C: the sweep is to end, whoever drives it."""
        count = len(self._view.active)
        self._console.say(f"ending sweep {self._sweep.name} ({count} jobs); press Ctrl-C again to leave it to end by itself")
        self._mlflow.set_tag(self._sweep.run_id, runs.TAG_CANCEL, "true")

    def _end_jobs(self) -> None:
        for index in sorted(self._view.active - self._asked_to_end):
            try:
                found = self._submitted.get(index) or lookup.of_run(self._view.jobs[index], self._sweep.tracking)
                runner.cancel(found, "the sweep was ended")
                self._asked_to_end.add(index)
            except lookup.NoFolderError:
                self._asked_to_end.add(index)  # nothing of it runs; whoever drives the sweep forgets it
            except ShareError as error:
                self._view.say_once(f"{error} (trying again)")

    def _finish(self) -> None:
        """All jobs have ended: so does the sweep's run, with what came of it."""
        self._view.look_at_all()
        self._view.end()


def end_if_over(sweep: Sweep) -> str:
    """End the run of a sweep whose jobs have all ended, where nobody drives it; a sentence on how it stands."""
    mlflow = runs.client(sweep.tracking)
    view, right = View(sweep, mlflow, JobConsole(1)), Right(mlflow, sweep.run_id)
    if right.driver(view.parent):
        return f"{right.who} starts its jobs"
    if view.unstarted and not view.ending:
        return f"{len(view.unstarted)} of its jobs are not started, and nobody does that: batchai sweep attach {sweep.name}"
    if view.active or not right.take(view.parent):
        return f"{len(view.active)} of its jobs have not ended"
    try:
        view.end()
    finally:
        right.release()
    return f"its jobs have ended, and its run is {view.status}"
