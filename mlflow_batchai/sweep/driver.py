"""Drive a sweep in a detached process, one a sweep: start jobs while there is room, keep their followers, end the sweep's run.

It knows only what the sweep's runs say, so another process can go on when this one dies.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from mlflow_batchai import terminal
from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.reservation import locks
from mlflow_batchai.client import lookup, runner
from mlflow_batchai.client.console import JobConsole
from mlflow_batchai.client.signals import Signals
from mlflow_batchai.config import home
from mlflow_batchai.errors import BatchAIError, ClusterError, JobDetachedError, JobError, ShareError, TrackingError
from mlflow_batchai.follower import detached, notify, spawning
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.job.jobs import pause_after
from mlflow_batchai.sweep import search, sweeps
from mlflow_batchai.sweep.results import DELETED, STOPPED, TERMINATED, Results, Row, judge
from mlflow_batchai.sweep.starter import JobStarter
from mlflow_batchai.sweep.sweeps import Sweep
from mlflow_batchai.tracking import runs, stores

LOOK_SECONDS, TROUBLE_SECONDS = 1.0, 5.0
# Looks at which nobody drives the sweep, before that is said: its process may have met a store in trouble before it said so.
MOST_MISSED = 8
# How long the tracking store, the share or the cluster may be away.
PATIENCE_SECONDS = 600.0
# For how long a job that another machine submits, while the sweep is ended from here, may have a run and no folder yet.
SUBMIT_SECONDS = 120.0

Result = TypeVar("Result")

# The state of a sweep as of a job, for those who are told.
STATES = {"FINISHED": protocol.SUCCEEDED, "KILLED": TERMINATED, "FAILED": protocol.FAILED}


class _BusyError(ClusterError):
    """The cluster takes no more jobs while it has some of the sweep's, as where a scheduler has a limit."""


class Driver:
    """Drives one sweep. ``starter``: makes what starts jobs; called when the first one is to be started."""

    def __init__(
        self,
        sweep: Sweep,
        starter: Callable[[], JobStarter],
        say: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._sweep, self._name = sweep, sweep.plan.name
        self._starter = functools.cache(starter)
        self._say = say
        self._sleep = sleep
        self._mlflow = runs.client(sweep.tracking)
        self._submitted: dict[int, Submitted] = {}
        self._unfollowed: dict[int, str] = {}
        self._cancelled: set[int] = set()
        self._shown: set[int] = set()
        self._medians = search.Medians(self._mlflow, sweep.plan)
        self._submits_elsewhere_until = 0.0

    def run(self) -> None:
        """Stay until the sweep's run has ended.

        Raises:
            BatchAIError: another machine drives it, jobs can't be started or followed, its run is deleted, or the store, the
                share or the cluster was away for too long.
        """
        _repeat(self._begin, self._say, self._sleep)
        _repeat(self._step, self._say, self._sleep)

    def _begin(self) -> bool:
        """Say in the sweep's run who drives it."""
        tags = sweeps.look(self._mlflow, self._sweep).tags
        if why := _driven_elsewhere(self._sweep, tags):
            raise JobError(why)
        if _host(tags) != socket.gethostname():
            self._submits_elsewhere_until = time.monotonic() + SUBMIT_SECONDS
        self._mlflow.set_tag(self._sweep.run_id, sweeps.TAG_DRIVER, json.dumps(proc.identity()))
        return True

    def _step(self) -> bool:
        """Look, and do what follows; whether the sweep's run has ended."""
        seen = sweeps.look(self._mlflow, self._sweep)
        if seen.status != "RUNNING":
            self._cancel(seen)  # a job whose submit had begun when another process ended the sweep
            return True
        for number in sorted(seen.active - set(self._unfollowed)):
            self._follow(seen.jobs[number], number)
        self._cancel(seen)
        self._stop_early(seen)
        if self._shown != (ended := set(seen.jobs) - seen.active):
            self._shown = ended
            self._show(judge(self._sweep.plan, seen.jobs, protocol.now_ms()))
        room = self._sweep.plan.parallel - len(seen.active - set(self._unfollowed))
        for number in seen.unstarted[: max(0, room)]:
            try:
                self._start(self._starter(), number, not (seen.jobs or self._submitted))
            except ClusterError as error:
                if seen.active - set(self._unfollowed):
                    raise _BusyError(str(error)) from error
                raise
        if seen.unstarted or seen.active - set(self._unfollowed):
            return False
        if seen.active:
            raise JobError(f"{self._unfollowed[min(seen.active)]}; then: batchai sweep attach {self._name}")
        self._end()
        return True

    def _cancel(self, seen: sweeps.Seen) -> None:
        """End the jobs of a sweep that is to end, each once."""
        for number in sorted((seen.active & set(self._submitted)) - self._cancelled) if seen.is_cancelled else ():
            runner.cancel(self._submitted[number], "the sweep was ended")
            self._cancelled.add(number)

    def _stop_early(self, seen: sweeps.Seen) -> None:
        """End the jobs that have fallen behind, each once; they say so before it is asked for, in case this process dies."""
        for number in sorted((seen.active & set(self._submitted)) - self._cancelled) if self._sweep.plan.stop else ():
            run = seen.jobs[number]
            why = run.data.tags.get(sweeps.TAG_STOPPED) or self._medians.behind(seen.jobs, number)
            if why:
                self._mlflow.set_tag(run.info.run_id, sweeps.TAG_STOPPED, why)
                runner.cancel(self._submitted[number], why, "")
                self._cancelled.add(number)

    def _follow(self, run: Any, number: int) -> None:
        """See to it that a job has a follower, whichever process has started the job."""
        try:
            if number in self._submitted:
                detached.keep_follower(self._submitted[number])
            else:
                found = lookup.of_run(run, self._sweep.tracking)
                detached.ensure_follower(found)
                self._submitted[number] = found
        except lookup.NoFolderError as lost:
            if lost.unstarted and time.monotonic() < self._submits_elsewhere_until:
                return
            if lost.unstarted:
                # Without its number the run is no job's, so the job is started as if it had had no run.
                self._mlflow.delete_tag(lost.run_id, sweeps.TAG_INDEX)
                self._mlflow.delete_run(lost.run_id)
            else:
                self._unfollowed[number] = str(lost)
        except JobError as error:
            self._unfollowed[number] = str(error)
            self._say(f"job {self._sweep.plan.job_name(number)}: {error}")

    def _start(self, starter: JobStarter, number: int, is_first: bool) -> None:
        """Start a job; one that can't be has failed, and if it is the first of all, so has the sweep."""
        try:
            self._submitted[number] = starter.submit(number)
        except Exception as error:
            if _may_pass(error) or not (isinstance(error, BatchAIError) or stores.is_refusal(error)):
                raise
            if not is_first:
                sweeps.add_failed_run(self._mlflow, self._sweep, number, str(error))
                return
            what = f"job {self._sweep.plan.job_name(number)} could not be started: {error}"
            runs.fail(self._mlflow, self._sweep.run_id, runs.tag_text(what))
            starter.tell(protocol.FAILED, what)
            raise JobError(what) from error

    def _end(self) -> None:
        """End the sweep's run, with the results."""
        seen = sweeps.look(self._mlflow, self._sweep)
        found = judge(self._sweep.plan, seen.jobs, protocol.now_ms())
        run_id, best = self._sweep.run_id, self._show(found)
        is_success = all(row.state in (protocol.SUCCEEDED, STOPPED, DELETED) for row in found.rows)
        status = "FINISHED" if is_success else "KILLED" if seen.is_cancelled else "FAILED"
        if best is not None:
            # The time is the job's end, so that a process that writes the metrics again adds no points.
            runs.log_metrics(self._mlflow, run_id, best.metrics, int(seen.jobs[best.index].info.end_time or 0))
        self._mlflow.log_dict(run_id, found.data(run_id, status), sweeps.RESULTS)
        if figure := search.importances(self._sweep.plan, seen.jobs, self._say):
            self._mlflow.log_figure(run_id, figure, sweeps.IMPORTANCES)
        self._mlflow.set_terminated(run_id, status)
        # Afterwards, so that no second process tells it again.
        try:
            if notify.is_wanted(self._sweep.plan.told, STATES[status]):  # else the project may be needed no more
                self._starter().tell(STATES[status], "; ".join(filter(None, (found.counts, found.summary))))
        except BatchAIError as error:
            self._say(f"nobody was told of the end of sweep {self._name}: {error}")

    def _show(self, found: Results) -> Row | None:
        """Have the sweep's run say which job is the best, and return that."""
        tags, best = {sweeps.TAG_NOTE: found.description}, found.best
        if best is not None and found.metric is not None:
            tags[sweeps.TAG_BEST] = str(best.runId)
            tags[sweeps.TAG_BEST_METRIC] = f"{found.metric}={best.metrics[found.metric]!r}"
        for name, value in tags.items():
            self._mlflow.set_tag(self._sweep.run_id, name, runs.tag_text(value))
        return best


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, ShareError | ClusterError | TrackingError) or stores.may_pass(error)


def _repeat(step: Callable[[], Result], say: Callable[[str], None], sleep: Callable[[float], None]) -> Result:
    """Repeat a step until it returns something true, which is returned; errors that may pass are said once and waited for."""
    said, last_success = "", time.monotonic()
    while True:
        begun, pause = time.monotonic(), LOOK_SECONDS
        try:
            if result := step():
                return result
            last_success = begun
        except Exception as error:
            if isinstance(error, _BusyError):
                last_success = begun
            if not _may_pass(error) or begun - last_success > PATIENCE_SECONDS:
                raise
            pause = TROUBLE_SECONDS
            if said != (text := terminal.shown(" ".join(str(error).split())[:300])):
                said = text
                say(f"{text} (still trying)")
        sleep(pause_after(time.monotonic() - begun, pause))


def _identity(tags: Mapping[str, str]) -> dict[str, Any]:
    """The process that drives the sweep, or has driven it, as its tag says; anybody can write a tag."""
    try:
        found = dict(json.loads(tags.get(sweeps.TAG_DRIVER, "{}")))
    except (ValueError, TypeError):
        return {}
    return found if all(isinstance(found.get(key), int) for key in ("pid", "started")) else {}


def _host(tags: Mapping[str, str]) -> str:
    """The machine that drives the sweep, or has driven it; this one if none is known."""
    return str(_identity(tags).get("host", socket.gethostname()))


def _driven_elsewhere(sweep: Sweep, tags: Mapping[str, str]) -> str:
    """A sentence if another machine's process drives a sweep that is not to end; only that machine knows whether it lives."""
    host = _host(tags)
    if host == socket.gethostname() or tags.get(runs.TAG_CANCEL):
        return ""
    return (
        f"the jobs of sweep {sweep.plan.name} are started on {host}; if that machine is gone for good, delete the tag"
        f" {sweeps.TAG_DRIVER} of run {sweep.run_id} and attach again"
    )


def _is_driven(sweep: Sweep, tags: Mapping[str, str]) -> bool:
    """Whether the sweep's tag names a process that drives it, as far as this machine can tell."""
    return proc.is_certainly_alive(_identity(tags)) or bool(_driven_elsewhere(sweep, tags))


def _log(sweep: Sweep) -> Path:
    return home() / "sweeps" / f"{sweep.run_id}.log"


def ensure(sweep: Sweep) -> int | None:
    """Start the process that drives a sweep, unless it runs or the sweep has ended; its process id.

    Raises:
        ClusterError: it can't be started.
    """
    seen = sweeps.look(runs.client(sweep.tracking), sweep)
    if seen.status != "RUNNING" or _is_driven(sweep, seen.tags):
        return None
    return spawning.spawn(["-m", "mlflow_batchai.sweep", sweep.run_id], spawning.environment_for(sweep.tracking), _log(sweep))


def _lock(sweep: Sweep) -> IO[str] | None:
    """The sweep's lock on this machine, free as soon as its process has ended; None: another process has it."""
    path = home() / "sweeps" / f"{sweep.run_id}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")  # never removed: the next process must lock the same one
    if locks.try_lock(file.fileno()):
        return file
    file.close()
    return None


def main() -> None:
    """Drive the sweep of a run id, in a process of its own."""

    def say(sentence: str) -> None:
        print(f"batchai: {terminal.printable(sentence)}", file=sys.stderr, flush=True)

    stores.bound_calls()
    tracking = runs.absolute(os.environ["MLFLOW_TRACKING_URI"], Path("/"))
    try:
        sweep = _repeat(lambda: sweeps.of_run(sweeps.find(tracking, sys.argv[1]), tracking), say, time.sleep)
        lock = _lock(sweep)
        if lock is not None:
            with lock:
                Driver(sweep, lambda: JobStarter(sweep, say), say).run()
    except BatchAIError as error:
        say(str(error))
        sys.exit(1)


def watch(sweep: Sweep, console: JobConsole, signals: Signals) -> tuple[Results, str]:
    """See that a sweep is driven, and tell how its jobs end, until its run has ended; its results and the run's status.

    Args:
        signals: the first Ctrl-C ends the sweep, or leaves it if signals don't cancel; other signals leave it.

    Raises:
        JobDetachedError: a signal says to leave.
        JobError: no process drives the sweep any more, or none of its jobs could be started.
        TrackingError: the store was away for too long.
    """
    mlflow, plan = runs.client(sweep.tracking), sweep.plan
    seen = sweeps.look(mlflow, sweep)
    told, state, missed = set(seen.jobs) - seen.active, "", 0
    process = ensure(sweep)
    if elsewhere := _driven_elsewhere(sweep, seen.tags):
        console.say(elsewhere)

    def cancel() -> None:
        console.say(f"ending sweep {plan.name} ({len(seen.active)} jobs); press Ctrl-C again to leave it to end by itself")
        mlflow.set_tag(sweep.run_id, runs.TAG_CANCEL, "true")

    def step() -> bool:
        nonlocal seen, state, missed, process
        signals.check(cancel)
        seen = sweeps.look(mlflow, sweep)
        found = judge(plan, seen.jobs, protocol.now_ms())
        ended = set(seen.jobs) - seen.active - told
        told.update(ended)
        for row in found.rows:
            if row.index in ended:
                console.say(row.sentence(found.metric))
        if state != (state := "; ".join(filter(None, (found.counts, found.summary)))) and (seen.unstarted or seen.active):
            console.state(f"sweep {plan.name}: {state}")
        # Ours ends if another one has the lock, which may not have written its tag yet.
        is_driven = (process is not None and proc.start_time(process) is not None) or _is_driven(sweep, seen.tags)
        missed = 0 if is_driven else missed + 1
        if missed > MOST_MISSED and process is None:
            # Another process drove it when we came, and has ended since.
            process, missed = ensure(sweep), 0
        if seen.status == "RUNNING" and missed > MOST_MISSED:
            raise JobError(
                f"nobody drives sweep {plan.name} any more: {_last_line(_log(sweep))}; batchai sweep attach {plan.name}"
            )
        return seen.status != "RUNNING"

    try:
        with signals.installed():
            signals.watching()
            _repeat(step, console.say, time.sleep)
    except JobDetachedError as error:
        hint = f"batchai sweep attach {plan.name} | batchai sweep terminate {plan.name}"
        raise JobDetachedError(f"{error}; sweep {plan.name} goes on: {hint}") from None
    finally:
        console.close()
    if seen.status == "FAILED" and not seen.jobs:
        raise JobError(seen.tags.get(runs.TAG_REASON, f"sweep {plan.name} has failed"))
    return judge(plan, seen.jobs, protocol.now_ms()), seen.status


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        lines = []
    return next((line.removeprefix("batchai: ").strip() for line in reversed(lines) if line.strip()), f"see {log}")
