"""Run a sweep to its end: start jobs while there is room, keep their followers, end the parent run.

It knows only what the sweep's runs say, so any process can go on when this one dies; one at a time does (``LeaderLock``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from mlflow_batchai import terminal
from mlflow_batchai.agent import protocol
from mlflow_batchai.client import attempts, lookup, runner
from mlflow_batchai.client.console import JobConsole
from mlflow_batchai.client.signals import Signals
from mlflow_batchai.cluster import clusters
from mlflow_batchai.config import home
from mlflow_batchai.errors import BatchAIError, ClusterError, JobDetachedError, JobError, ShareError, TrackingError
from mlflow_batchai.follower import detached, spawning
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.follower.starting import verdict_of
from mlflow_batchai.job.jobs import pause_after
from mlflow_batchai.sweep import sweeps
from mlflow_batchai.sweep.leader_lock import LeaderLock
from mlflow_batchai.sweep.results import DELETED, Results, judge
from mlflow_batchai.sweep.starter import UnstartableError
from mlflow_batchai.sweep.sweeps import Sweep
from mlflow_batchai.tracking import runs, stores

LOOK_SECONDS = 1.0
# How long the tracking store may be away.
PATIENCE_SECONDS = 600.0
# How often the start of one job, or of several in a row, may fail, and the pause after the first failure.
MOST_FAILURES, PAUSE_SECONDS = 3, 5.0


class Driver:
    """Drives a sweep, or watches while another process does.

    Args:
        submit: starts the job of a number.
        signals: the first Ctrl-C ends the sweep, or leaves it if signals don't cancel; other signals leave it.
        take_over: see ``LeaderLock``.
        fresh: this process has begun the sweep: if the first start fails, so has the sweep.
    """

    def __init__(
        self,
        sweep: Sweep,
        submit: Callable[[Sweep, int], Submitted],
        console: JobConsole,
        signals: Signals,
        take_over: bool = False,
        fresh: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._sweep, self._name = sweep, sweep.plan.name
        self._submit = submit
        self._console = console
        self._signals = signals
        self._fresh = fresh
        self._sleep = sleep
        self._mlflow = runs.client(sweep.tracking)
        self._lock = LeaderLock(self._mlflow, sweep.run_id, take_over)
        self._look()
        self._ended_before = set(self._jobs) - self._active
        self._said: set[str] = set()
        self._state = ""
        # Jobs that this process has started or found, and why others can't be followed.
        self._submitted: dict[int, Submitted] = {}
        self._unfollowed: dict[int, str] = {}
        self._cancelled: set[int] = set()
        self._failures: Counter[int] = Counter()
        self._failed_in_a_row: list[int] = []
        self._next_start = 0.0

    def run(self) -> None:
        """Stay until the parent run has ended.

        Raises:
            JobDetachedError: a signal says to leave.
            JobError: jobs can't be started or followed, or the parent run is deleted.
            TrackingError: the store was away for too long.
        """
        answered = time.monotonic()
        try:
            with self._signals.installed():
                self._signals.watching()
                while True:
                    begun = time.monotonic()
                    try:
                        if self._step():
                            return
                        answered = time.monotonic()
                    except Exception as error:
                        if not stores.may_pass(error):
                            raise
                        if self._signals.left:
                            continue  # the signal broke the call; the next step raises it
                        text = terminal.shown(" ".join(str(error).split())[:300])
                        why = f"the tracking store {self._sweep.tracking.uri} can't be asked: {text}"
                        if begun - answered > PATIENCE_SECONDS:
                            raise TrackingError(f"{why}; {self._left()}") from error
                        self._say_once(f"{why} (still trying)")
                    self._sleep(pause_after(time.monotonic() - begun, LOOK_SECONDS))
        except JobDetachedError as error:
            raise JobDetachedError(f"{error}; {self._left()}") from None
        finally:
            self._lock.release()
            self._console.close()

    def end_if_over(self) -> str:
        """End the parent run if all jobs have ended and no process leads; a sentence on how the sweep stands."""
        if self._lock.has_other_leader(self._parent):
            return f"{self._lock.leader} starts its jobs"
        if left := len(self._unstarted):
            return f"{left} of its jobs are not started, and nobody does that: batchai sweep attach {self._name}"
        if self._active:
            return f"{len(self._active)} of its jobs have not ended"
        self._end()
        return f"its jobs have ended, and its run is {self.status}"

    @property
    def results(self) -> Results:
        """The results as of the last look."""
        return judge(self._sweep.plan, self._jobs, protocol.now_ms())

    @property
    def status(self) -> str:
        """The parent run's status as of the last look."""
        return str(self._parent.info.status)

    def _look(self) -> None:
        parent, self._jobs = sweeps.read_runs(self._mlflow, self._sweep)
        if parent is None:
            raise JobError(
                f"the run of sweep {self._name} is deleted; jobs that run go on, no more are started"
                f" (mlflow runs restore --run-id {self._sweep.run_id})"
            )
        self._parent = parent
        self._is_cancelled = bool(parent.data.tags.get(runs.TAG_CANCEL))
        unstarted = [number for number in self._sweep.plan.numbers if number not in self._jobs]
        self._unstarted = [] if self._is_cancelled else unstarted
        there = {number: run.info for number, run in self._jobs.items() if run.info.lifecycle_stage == "active"}
        self._active = {number for number, info in there.items() if info.status in ("RUNNING", "SCHEDULED")}

    def _step(self) -> bool:
        """Look, and do what follows; whether the parent run has ended."""
        self._signals.check(self._cancel)
        self._look()
        self._tell()
        if self.status != "RUNNING":
            return True
        if self._is_cancelled:
            self._cancel_jobs()
        if not self._lock.acquire(self._parent):
            if self._lock.leader:
                self._say_once(f"{self._lock.leader} starts the jobs of sweep {self._name}; watching it")
            return False
        self._follow_jobs()
        self._start_jobs()
        if self._unstarted or self._active - set(self._unfollowed):
            return False
        if self._active:
            raise JobError(f"{self._unfollowed[min(self._active)]}; then: batchai sweep attach {self._name}")
        self._end()
        return True

    def _follow_jobs(self) -> None:
        """See to it that each job has a follower, whichever process has started the job."""
        for number in sorted(self._active - set(self._unfollowed)):
            try:
                if number in self._submitted:
                    detached.keep_follower(self._submitted[number])
                else:
                    self._submitted[number] = self._adopt(number)
            except lookup.NoFolderError as lost:
                if lost.unstarted:
                    # Without its number the run is no job's, so the job is started as if it had had no run.
                    self._mlflow.delete_tag(lost.run_id, sweeps.TAG_INDEX)
                    self._mlflow.delete_run(lost.run_id)
                else:
                    self._unfollowed[number] = str(lost)
            except ShareError as error:
                self._say_once(f"{error} (jobs go on; still looking for it)")
            except JobError as error:
                self._unfollowed[number] = str(error)
                self._console.say(f"job {self._sweep.plan.job_name(number)}: {error}")

    def _adopt(self, number: int) -> Submitted:
        """Follow a job that this process has not submitted; one whose submit was cut off is retried."""
        found = lookup.of_run(self._jobs[number], self._sweep.tracking)
        if found.job.attempt > 1 or found.job.handle() is not None or self._is_cancelled:
            detached.ensure_follower(found)
            return found
        why = "its submitter died before it had started every agent"
        # The verdict ends the agents that were started.
        found.job.claim_verdict(verdict_of(JobError(why)))
        try:
            attempts.retry(found, clusters.load(found.job.plan.cluster)[0], self._say_once)
        except BatchAIError as error:
            self._console.say(f"job {found.job.name}: {why}, and it could not be started again: {error}")
        return found

    def _start_jobs(self) -> None:
        room = self._sweep.plan.parallel - len(self._active - set(self._unfollowed))
        if room <= 0 or time.monotonic() < self._next_start:
            return
        # Jobs that have failed to start come after the others.
        for number in sorted(self._unstarted, key=self._failures.__getitem__)[:room]:
            self._signals.check(self._cancel)
            if self._signals.cancelled or not self._start(number):
                return

    def _start(self, number: int) -> bool:
        self._signals.submitting = True
        try:
            self._submitted[number] = self._submit(self._sweep, number)
        except KeyboardInterrupt:
            return False  # the second Ctrl-C has undone this submit; the next step ends the sweep
        except Exception as error:
            if stores.may_pass(error) or not (isinstance(error, BatchAIError) or stores.is_refusal(error)):
                raise
            self._count_failure(number, error)
            return False
        finally:
            self._signals.submitting = False
        self._failed_in_a_row.clear()
        self._look()
        return True

    def _count_failure(self, number: int, error: Exception) -> None:
        """Try the job again later, or give it up.

        Raises:
            JobError: no job can be started now.
        """
        self._look()
        what = f"job {self._sweep.plan.job_name(number)} could not be started: {error}"
        if self._fresh and not self._jobs:
            self._mlflow.set_tag(self._sweep.run_id, runs.TAG_REASON, runs.tag_text(str(error)))
            self._mlflow.set_terminated(self._sweep.run_id, "FAILED")
            raise JobError(what) from error
        self._failures[number] += 1
        self._failed_in_a_row.append(number)
        self._next_start = time.monotonic() + PAUSE_SECONDS * len(self._failed_in_a_row)
        are_several = len(set(self._failed_in_a_row)) >= MOST_FAILURES
        # Nor can the last job be blamed for an error that keeps every job from starting.
        is_shared = isinstance(error, ShareError | ClusterError | TrackingError) and len(self._failed_in_a_row) >= MOST_FAILURES
        if are_several or is_shared or isinstance(error, UnstartableError):
            raise JobError(f"{what}; {self._left()}") from error
        self._say_once(what)
        if self._failures[number] >= MOST_FAILURES:
            sweeps.add_failed_run(self._mlflow, self._sweep, number, str(error))
            self._look()

    def _cancel(self) -> None:
        """Ctrl-C: the sweep is to end, whichever process leads."""
        count = len(self._active)
        self._console.say(f"ending sweep {self._name} ({count} jobs); press Ctrl-C again to leave it to end by itself")
        self._mlflow.set_tag(self._sweep.run_id, runs.TAG_CANCEL, "true")

    def _cancel_jobs(self) -> None:
        for number in sorted(self._active - self._cancelled):
            try:
                found = self._submitted.get(number) or lookup.of_run(self._jobs[number], self._sweep.tracking)
                runner.cancel(found, "the sweep was ended")
                self._cancelled.add(number)
            except lookup.NoFolderError:
                self._cancelled.add(number)  # nothing of it runs; the leader deletes its run
            except ShareError as error:
                self._say_once(f"{error} (trying again)")

    def _end(self) -> None:
        """End the parent run, with the results."""
        self._look()
        run_id, found, best = self._sweep.run_id, self.results, self.results.best
        is_success = all(row.state in (protocol.SUCCEEDED, DELETED) for row in found.rows)
        status = "FINISHED" if is_success else "KILLED" if self._is_cancelled else "FAILED"
        tags = {sweeps.TAG_NOTE: found.description}
        if best is not None and found.metric is not None:
            tags[sweeps.TAG_BEST] = str(best.runId)
            tags[sweeps.TAG_BEST_METRIC] = f"{found.metric}={best.metrics[found.metric]!r}"
            # The time is the job's end, so that a process that writes the metrics again adds no points.
            runs.log_metrics(self._mlflow, run_id, best.metrics, int(self._jobs[best.index].info.end_time or 0))
        self._mlflow.log_dict(run_id, found.data(run_id, status), sweeps.RESULTS)
        for name, value in tags.items():
            self._mlflow.set_tag(run_id, name, runs.tag_text(value))
        self._mlflow.set_terminated(run_id, status)
        self._look()

    def _tell(self) -> None:
        """Tell which jobs have ended, and the counts of states."""
        found = self.results
        ended = set(self._jobs) - self._active - self._ended_before
        self._ended_before |= ended
        for row in found.rows:
            if row.index in ended:
                self._console.say(row.sentence(found.metric))
        state = "; ".join(part for part in (found.counts, found.summary) if part)
        if state == self._state:
            return
        self._state = state
        if self._unstarted or self._active:
            self._console.state(f"sweep {self._name}: {state}")
        if self._lock.held:
            self._mlflow.set_tag(self._sweep.run_id, sweeps.TAG_NOTE, runs.tag_text(found.description))

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._console.say(sentence)

    def _left(self) -> str:
        """Describe what happens to a sweep that this process leaves."""
        left = len(self._unstarted) if self._lock.held else 0
        waiting = f", {left} are not started until somebody attaches" if left else ""
        hint = f"batchai sweep attach {self._name} | batchai sweep terminate {self._name}"
        return f"{len(self._active)} job(s) of sweep {self._name} go on{waiting}: {hint}"


def start_process(sweep: Sweep) -> Path:
    """Start a detached process that drives a sweep; the file of its messages. Raises ``ClusterError`` if it can't."""
    log = home() / "sweeps" / f"{sweep.run_id}.log"
    command = ["-c", "from mlflow_batchai.cli import main; main()", "sweep", "attach", sweep.run_id, "--output", "table"]
    spawning.spawn(command, spawning.environment_for(sweep.tracking), log)
    return log
