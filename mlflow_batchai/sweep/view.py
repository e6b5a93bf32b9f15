"""A sweep as its runs show it now, and what a person is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlflow_batchai import runs
from mlflow_batchai.console import JobConsole
from mlflow_batchai.errors import JobError
from mlflow_batchai.node import protocol
from mlflow_batchai.sweep import sweeps
from mlflow_batchai.sweep.grid import shown
from mlflow_batchai.sweep.results import DELETED, Results, Row, describe, judge
from mlflow_batchai.sweep.sweeps import Sweep

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient


class View:
    """What the last look has shown.

    Attributes:
        jobs: number -> run, of those that were started.
        active: numbers of those that have not ended.
    """

    def __init__(self, sweep: Sweep, mlflow: MlflowClient, console: JobConsole) -> None:
        self._sweep = sweep
        self._mlflow = mlflow
        self._console = console
        self._parent: Run | None = None
        self.jobs: dict[int, Run] = {}
        self.active: set[int] = set()
        self._text = ""
        self._said: set[str] = set()
        self.look_at_all()
        self._told_ends = set(self.jobs) - self.active

    @property
    def parent(self) -> Run:
        """The sweep's run.

        Raises:
            JobError: it is deleted.
        """
        if self._parent is None:
            raise JobError(
                f"the run of sweep {self._sweep.name} is deleted; jobs that run go on, no more are started"
                f" (mlflow runs restore --run-id {self._sweep.run_id})"
            )
        return self._parent

    @property
    def status(self) -> str:
        """That of the sweep's run."""
        return str(self.parent.info.status)

    @property
    def ending(self) -> bool:
        """Whether somebody has asked for the sweep's end."""
        return bool(self.parent.data.tags.get(runs.TAG_CANCEL))

    @property
    def unstarted(self) -> list[int]:
        """Numbers of jobs that were not started."""
        return [index for index in self._sweep.plan.indices if index not in self.jobs]

    def look(self) -> None:
        """One search for all that have not ended; one more for everything when one has."""
        parent, running = sweeps.members(self._mlflow, self._sweep, unended=True)
        self.jobs.update(running)
        if parent is None or self.active - set(running):
            self.look_at_all()
        else:
            self._parent = parent
            self._note_active()

    def look_at_all(self) -> None:
        """One search for everything."""
        self._parent, self.jobs = sweeps.members(self._mlflow, self._sweep)
        self._note_active()

    def began(self, index: int, run_id: str) -> None:
        """A job was started."""
        self.jobs[index] = self._mlflow.get_run(run_id)
        self._note_active()

    def forget(self, index: int) -> None:
        """A job's run is no more: nothing of it had been started."""
        del self.jobs[index]
        self._note_active()

    def _note_active(self) -> None:
        self.active = {
            index
            for index, run in self.jobs.items()
            if run.info.status in ("RUNNING", "SCHEDULED") and run.info.lifecycle_stage == "active"
        }

    def results(self) -> Results:
        """What has become of the jobs."""
        return judge(self._sweep.plan, self.jobs, protocol.now_ms())

    def show(self, describes: bool) -> None:
        """Tell of jobs that have ended, and of how many are where.

        Args:
            describes: whether the description of the sweep's run is ours to write.
        """
        found = self.results()
        for row in found.rows:
            if row.index in self.jobs and row.index not in self.active and row.index not in self._told_ends:
                self._told_ends.add(row.index)
                self._console.say(_ended(row, found.metric))
        text = "; ".join(part for part in (found.counts, found.best_in_words) if part)
        if text != self._text:
            self._text = text
            if not found.all_ended:
                self._console.state(f"sweep {self._sweep.name}: {text}")
            if describes:
                self._mlflow.set_tag(self._sweep.run_id, sweeps.TAG_NOTE, runs.tag_text(describe(found)))

    def say_once(self, sentence: str) -> None:
        """A sentence, if it wasn't said before."""
        if sentence not in self._said:
            self._said.add(sentence)
            self._console.say(sentence)

    def goes_on(self, ours: bool) -> str:
        """What becomes of a sweep that we leave.

        Args:
            ours: whether nobody else starts its jobs.
        """
        name, left = self._sweep.name, len(self.unstarted)
        waiting = f", {left} are not started until somebody attaches" if left and ours else ""
        lines = f"batchai sweep attach {name} | batchai sweep terminate {name}"
        return f"{len(self.active)} job(s) of sweep {name} go on{waiting}: {lines}"

    def end(self) -> None:
        """All jobs have ended: so does the sweep's run, with what came of it."""
        found = self.results()
        everything = found.count(protocol.SUCCEEDED) + found.count(DELETED) == len(found.rows)
        status = "FINISHED" if everything else "KILLED" if self.ending else "FAILED"
        run_id, best = self._sweep.run_id, found.best
        tags = {sweeps.TAG_NOTE: describe(found)}
        if best is not None and found.metric is not None:
            tags[sweeps.TAG_BEST] = str(best.run_id)
            tags[sweeps.TAG_BEST_METRIC] = f"{found.metric}={best.metrics[found.metric]!r}"
            self._log_metrics(best)
        self._mlflow.log_dict(run_id, found.data(run_id, status), sweeps.RESULTS)
        for name, value in tags.items():
            self._mlflow.set_tag(run_id, name, runs.tag_text(value))
        self._mlflow.set_terminated(run_id, status)
        self._parent = self._mlflow.get_run(run_id)

    def _log_metrics(self, best: Row) -> None:
        """The sweep's own metrics are those of its best job, so that sweeps can be compared and sorted as jobs are."""
        # The same time whoever says it: what is said twice is kept once.
        at = int(self.jobs[best.index].info.end_time or 0)
        runs.log_metrics(self._mlflow, self._sweep.run_id, best.metrics, at)


def _ended(row: Row, metric: str | None) -> str:
    value = f", {metric} {row.metrics[metric]:.6g}" if metric is not None and metric in row.metrics else ""
    which = shown(row.parameters)
    why = f": {row.reason}" if row.state == protocol.FAILED and row.reason else ""
    return f"job {row.name} {row.state}{value}" + (f" ({which})" if which else "") + why
