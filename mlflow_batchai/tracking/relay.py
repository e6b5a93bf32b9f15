"""The relay: write what is new in the job folder into its MLflow run, with the job's state.

Each thing goes there once, wherever a relay is cut off: what is known lies beside the lease (``job/lease.py``), another relay
goes on from there, and MLflow drops points that are replayed, since they are the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mlflow_batchai.agent import protocol, records
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.agent.transport.reports import LOST, points_of
from mlflow_batchai.errors import BatchAIError, ShareError, ShareNotFoundError
from mlflow_batchai.job.completeness import log_totals, missing, totals_of
from mlflow_batchai.job.events import EventReader
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease, LeaseLostError
from mlflow_batchai.job.metrics import MetricFold, Point, SampleFold
from mlflow_batchai.job.sent import SentFiles
from mlflow_batchai.job.states import JobState
from mlflow_batchai.terminal import printable
from mlflow_batchai.tracking import runs, stores
from mlflow_batchai.tracking.description import Description, Facts
from mlflow_batchai.tracking.jobfiles import JobFiles
from mlflow_batchai.tracking.logs import Logs
from mlflow_batchai.tracking.models.job_model import log_model
from mlflow_batchai.tracking.outputs import Outputs
from mlflow_batchai.tracking.script_calls import calls

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

BATCH = 1000
# What is sent twice costs MLflow ten times as much.
MOST_UNCERTAIN = 10 * BATCH
MOST_NOTES, MOST_NAMES_SHOWN = 100, 20
WAITED = ", which waited too long for their node's disk"
# Keys in one record of what a rank had to drop.
MOST_LOST = 10_000
# The share of its time that a relay gives to logs which are sent whole again and again, at most: one part in so many.
LOG_PARTS = 10
FIRST_LOG_SECONDS, LONGEST_LOG_SECONDS = 15.0, 300.0
# How often it is tried to send what says what runs.
FILES_SECONDS = 5.0
# For how long a share over the network may be away (this machine slept), or a store refuse a thing though it answers (where it
# keeps artifacts is away), before that thing is given up. A store that doesn't answer at all is waited for: see ``retrying``.
AWAY_SECONDS = 300.0
_LOST: records.Shape = {
    "values": lambda value: isinstance(value, dict) and len(value) <= MOST_LOST and all(map(records.is_count, value.values()))
}
_MODEL: records.Shape = {"path": records.is_text, "meta": records.is_mapping}


class Relay:
    """Moves the events, logs, outputs and model of one attempt of a job into its run.

    Args:
        lease: acquired already; its memory is where we go on. Of an earlier attempt's all stays but how far it had come.
    """

    def __init__(self, job: Job, client: MlflowClient, lease: Lease) -> None:
        self._job = job
        self._client = client
        self._lease = lease
        self._run_id = job.plan.run_id
        memory = lease.memory
        self._begun = same = int(memory.get("attempt", 1)) == job.attempt
        here = memory if same else {}
        self._state = str(here.get("state", protocol.QUEUED))
        # Of an attempt that another follower has begun its run may say so still.
        self._waits: str | None = None if same and job.attempt > 1 else ""
        self._files = JobFiles(client, job, memory.get("environment"))
        self._next_files = time.monotonic()
        self._logs = Logs(client, job)
        self._next_logs = time.monotonic() + FIRST_LOG_SECONDS
        self._log_interval = FIRST_LOG_SECONDS
        # Of an ended attempt: what was sent -> what could not be sent of it; and since when the present thing is tried.
        self._done: dict[str, list[str]] = {}
        self._since: float | None = None
        self._outputs = Outputs(client, job, SentFiles(job, lease.number))
        # Whether nothing more is written there, though the job has not ended.
        self._outputs_whole = False
        self._description = Description(client, self._run_id)
        self.notes: list[str] = list(memory.get("notes", []))
        # Of logs and outputs: what lies on the share only, which `batchai gc` leaves there.
        self._left_out: list[str] = list(memory.get("leftOut", []))
        # What agents have counted and nobody has read: of earlier attempts, and of this one once it is over.
        self._missing_before = [sentence for sentence in memory.get("missing", []) if self._is_of_another(sentence)]
        self._missing: list[str] = []
        self._reader = EventReader(job, here.get("cursor"), bool(here.get("ending")))
        self._metrics = MetricFold(job.plan.metrics, memory.get("metrics"), same)
        self._pace = self._metrics.pace
        self._samples = SampleFold(job.node_count, memory.get("samples"), same)
        # Saved models that ranks have reported.
        self._models: list[Record] = list(memory.get("models", []))
        self._calls = calls.ScriptCalls(client, job, self.run_gone, memory.get("tracked"))
        self._dropped = int(memory.get("dropped", 0))
        self._refused = int(memory.get("refused", 0))
        # Of each rank of this attempt how many records have come, and points in them.
        self._received: dict[str, list[int]] = {rank: list(count) for rank, count in here.get("reports", {}).items()}
        # What ranks had to drop: name -> how often.
        self._lost: dict[str, int] = dict(memory.get("lost", {}))
        # What could not be read: lines, files.
        self._skipped: list[int] = list(memory.get("skipped", [0, 0]))
        # Points that the store has not taken yet: they wait for it, and nothing is saved before them.
        self._pending: list[Point] = []
        self._unsaved = False
        # How many points would be sent again by the next relay, if we died now.
        self._uncertain = 0

    def _is_of_another(self, sentence: str) -> bool:
        """Whether a sentence is of an earlier attempt: what is missing of this one is found out anew."""
        return self._job.attempt > 1 and not sentence.endswith(self._which)

    @property
    def _which(self) -> str:
        return f" (attempt {self._job.attempt})"

    def _memory(self) -> Record:
        return {
            "attempt": self._job.attempt,
            "cursor": dict(self._reader.cursor),
            "ending": self._reader.ending,
            "metrics": self._metrics.remember(),
            "samples": self._samples.remember(),
            "models": list(self._models),
            "tracked": self._calls.remember(),
            "reports": {rank: list(count) for rank, count in self._received.items()},
            "lost": dict(self._lost),
            "dropped": self._dropped,
            "refused": self._refused,
            "skipped": list(self._skipped),
            "environment": self._files.remember(),
            "state": self._state,
            "notes": list(self.notes),
            "leftOut": list(self._left_out),
            "missing": list(self._missing_before),
        }

    def heard(self, node: int) -> int:
        """Number of a node's segments that were read."""
        return self._reader.cursor.get(protocol.agent_writer(node), 0)

    @property
    def ending(self) -> bool:
        """Whether an agent has reported a failure or a stop."""
        return self._reader.ending

    # Events: metrics, and what scripts have logged.

    def step(self, to_the_end: bool = False) -> int:
        """Relay what is new; the number of segments that were read. ``to_the_end``: nothing more will be written."""
        self._lease.check(exactly=to_the_end)
        count = 0
        for _, _, found in self._reader.read(to_the_end):
            # A backlog of hours does not go through memory at once, and in whole batches, since a call costs as much for a few.
            if self._calls.crowded or self._uncertain >= MOST_UNCERTAIN:
                self._store()  # the cursor is behind the segment before this one
            self._send(BATCH)
            self._unsaved = True
            self._pending += self._metrics.feed(found)
            self._pending += self._samples.feed(found)
            for record in found:
                self._take(record)
            count += 1
        self._store()
        return count

    def _store(self) -> None:
        self._send()
        self._calls.send()
        if self._unsaved:
            self._lease.check()
            self._lease.save(self._memory())
            self._unsaved = False
            self._uncertain = 0

    def _take(self, record: Record) -> None:
        if record["k"] == "phase":
            self._outputs_whole = record["phase"] == protocol.CHECKING
        if record["k"] == "report":
            self._count(record)
        if record["k"] == "report" and record["body"].get("type") == "model":
            if records.has(record["body"], _MODEL):
                self._models.append(record["body"])
            else:
                self._skipped[0] += 1
        elif record["k"] == "report" and record["body"].get("type") in calls.KINDS:
            self._skipped[0] += not self._calls.take(record["body"])
        elif record["k"] == "environment":
            self._files.take(record)
        elif record["k"] == "dropped":
            self._dropped += record["lines"]
        elif record["k"] == records.SKIPPED:
            self._skipped = [self._skipped[0] + record["lines"], self._skipped[1] + record["files"]]

    def _count(self, record: Record) -> None:
        body, rank = record["body"], record.get("r")
        if body.get("type") == LOST:
            for name, count in body["values"].items() if records.has(body, _LOST) else ():
                if name in self._lost or len(self._lost) < MOST_LOST:
                    self._lost[name] = self._lost.get(name, 0) + count
        elif isinstance(rank, int) and records.is_count(rank) and rank < self._job.plan.ranks:
            count = self._received.setdefault(str(rank), [0, 0])
            count[0] += 1
            count[1] += points_of(body)

    def _send(self, least: int = 1) -> None:
        """Send what waits, as long as there are so many points."""
        while len(self._pending) >= least:
            batch = self._pending[:BATCH]
            stores.log_what_is_taken(batch, self._log, self._refuse, self.run_gone)
            del self._pending[: len(batch)]
            self._uncertain += len(batch)

    def _log(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(point.key, point.value, point.timestamp, point.step) for point in points]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _refuse(self, point: Point, why: str) -> None:
        self._refused += 1
        self._note(f"metric '{point.key}' at step {point.step} was refused: {why}")

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes and len(self.notes) < MOST_NOTES:
            self.notes.append(sentence)

    def _not_as_it_came(self) -> list[str]:
        """Sentences on what was not stored as it came."""
        lines, files = self._skipped
        counts = [
            (self._dropped, "log lines were dropped while the share stalled"),
            (lines, "lines of what agents and ranks had reported could not be read, and were left out"),
            (files, "event files were damaged or missing on the share, and were left out"),
            (self._metrics.repeated, "metric values came for a step that had one; the first stands"),
            (self._metrics.unread + self._samples.unread, "metric values were no numbers, and were left out"),
        ]
        lost = [
            f"missing are {count} " + (f"values of '{printable(name)}'" if name else "params, tags and files") + WAITED
            for name, count in sorted(self._lost.items())[:MOST_NAMES_SHOWN]
        ]
        names = self._metrics.names.notices()
        more = [f"{len(names) - MOST_NAMES_SHOWN} more names of metrics were changed"] if len(names) > MOST_NAMES_SHOWN else []
        counted = [*(f"{count} {what}" for count, what in counts if count), *names[:MOST_NAMES_SHOWN], *more]
        return [*lost, *counted, *self._metrics.refused[:MOST_NAMES_SHOWN], *self._calls.notes()]

    # The run: its state and description.

    def run_gone(self) -> bool:
        """Whether the run was deleted: then there is nothing left to relay into.

        A store that can't be reached says nothing of the run. Nor does one that doesn't know it: a server may have come back
        with another database, and results that were relayed into nothing would be lost.
        """
        try:
            return bool(self._client.get_run(self._run_id).info.lifecycle_stage != "active")
        except Exception:
            return False

    def run_ended(self) -> bool:
        """Whether the run has its end: another relay has finished it, or a person has. False if the store can't say."""
        try:
            return bool(self._client.get_run(self._run_id).info.status not in ("SCHEDULED", "RUNNING"))
        except Exception:  # a store that can't be reached says nothing of the run
            return False

    def _answers(self) -> bool:
        try:
            self._client.get_run(self._run_id)
        except Exception:
            return False
        return True

    def _begin(self) -> None:
        """Once, for an attempt after the first: its run waits again, and says nothing more of the one before."""
        if self._begun:
            return
        self._lease.check()
        runs.begin_attempt(self._client, self._run_id, self._job.attempt)
        if self.notes:
            self._client.set_tag(self._run_id, runs.TAG_NOTES, runs.tag_text("\n".join(self.notes)))
        self._begun = True
        self._lease.save(self._memory())

    def show_state(self, state: JobState) -> None:
        """Bring the run's status and tags to the job's state, when that has changed."""
        self._begin()
        if state.execution_state == self._state or state.ended:
            return
        self._lease.check()
        tags = {runs.TAG_STATE: state.execution_state}
        if state.start_time is not None:
            tags[runs.TAG_STARTED] = runs.time_text(state.start_time)
        if self._job.attempt > 1:
            tags |= runs.sizes(self._job.plan)  # it may have fewer nodes than the one before
        self._set_tags(tags)
        self._client.update_run(self._run_id, status=state.run_status)
        self._state = state.execution_state
        self._set_right()

    def _set_right(self) -> None:
        """A call may hang until another relay has taken over, and be carried out after that one has ended the run.

        Of all that we send this only would do harm: points are the same, and MLflow drops them; tags and times of the end come
        from the verdict; outputs are what lies on the share. But a run must not be RUNNING again for ever.
        """
        if self._lease.finished() and (end := self._job.state()).ended:
            self._client.set_tag(self._run_id, runs.TAG_STATE, end.execution_state)
            self._client.set_terminated(self._run_id, end.run_status, end_time=end.end_time)

    def show_waits(self, what: str) -> None:
        """Say what the attempt waits for before it is started; nothing: for its nodes only, as any job does."""
        if what == self._waits:
            return
        self._begin()
        self._lease.check()
        if what:
            self._client.set_tag(self._run_id, runs.TAG_REASON, runs.tag_text(what))
        else:
            runs.forget(self._client, self._run_id, [runs.TAG_REASON])
        self._waits = what

    def describe(self, state: JobState) -> None:
        """Bring the run's description up to date, when it is due."""
        self._description.show(self._facts(state, self.notes))

    def _facts(self, state: JobState, notes: list[str], sending: str = "") -> Facts:
        # Once the job is over there is no epoch that is being trained.
        self._pace = self._metrics.pace or self._pace
        job, step, note = self._job, self._metrics.last_step, self._calls.script_note
        return Facts(job.plan, job.attempt, state, job.hosts, self._waits or "", self._pace, step, sending, notes, note)

    def files_when_due(self) -> None:
        """Upload what says what runs, as soon as it is there."""
        if time.monotonic() >= self._next_files:
            self._next_files = time.monotonic() + FILES_SECONDS
            self._files.send()

    def logs_when_due(self) -> None:
        """Upload the logs so far, at growing intervals, the longer the longer it takes: an artifact is always sent whole."""
        begun = time.monotonic()
        if begun < self._next_logs:
            return
        try:
            try:
                self._logs.send()
            finally:
                self._calls.send_files()
        finally:
            ended = time.monotonic()
            self._log_interval = min(self._log_interval * 1.5, LONGEST_LOG_SECONDS)
            self._next_logs = ended + max(self._log_interval, LOG_PARTS * (ended - begun))

    def outputs_when_whole(self) -> None:
        """Upload the outputs while node 0 still tries the model; ``finish`` sends what is missing then."""
        if self._outputs_whole:
            self._outputs_whole = False
            with contextlib.suppress(ShareError):
                self._outputs.send()

    def pass_on(self) -> None:
        """Send the rest of an ended attempt's records and logs before the job goes on with the next.

        Raises:
            ShareError: a share over the network is away, perhaps for a moment: call it again.
        """
        notes = self._send_rest(goes_on=True)
        self._lease.check()
        left = {"leftOut": [*self._left_out, *notes], "missing": self._missing}
        self._lease.save({**self._memory(), "notes": [*self.notes, *notes], **left})

    def _send_rest(self, goes_on: bool = False) -> list[str]:
        """Send the rest of an ended attempt's records and logs; return sentences on what could not be sent."""
        self._begin()
        self.step(to_the_end=True)
        self._pace = self._metrics.pace or self._pace
        self._pending += self._metrics.finish()
        self._send()
        left_out = self._once("logs", lambda: self._logs.send(complete=True))
        known = totals_of(self._job)
        mended = self._once("rest of logs", lambda: self._logs.mend(log_totals(known)))
        found = (*missing(known, self._reader.cursor, self._received), *mended)
        which = self._which if goes_on or self._job.attempt > 1 else ""
        self._missing = [*self._missing_before, *(sentence + which for sentence in found)]
        return left_out + self._once("artifacts", self._calls.send_rest)

    def finish(self, state: JobState) -> None:
        """The job has its verdict: send the rest, the outputs and the model, then end the run.

        What can't be sent is told in the run's tags; the run ends in any case, with the job's status.

        Raises:
            Exception: the store is away, or the share for a moment: call it again; what was sent stays so.
        """
        left_out = self._send_rest()
        outputs = self._outputs
        left_out += self._once("outputs", lambda: outputs.send(lambda text: self._show_sending(state, text)))
        self._lease.sending = ""
        # A job that has succeeded needs its checkpoints no more; where it has not, they may be all that it has left.
        there = (outputs.checkpoints if state.execution_state != protocol.SUCCEEDED else "", outputs.excluded)
        kept = [sentence for sentence in there if sentence]
        notes = [*self.notes, *left_out, *kept, *self._once("job", self._files.send)]
        notes += self._once("logged models", self._calls.make_models)
        if state.execution_state == protocol.SUCCEEDED:
            notes += self._once("model", lambda: log_model(self._client, self._job, self._models))
        self._lease.check()
        left_out = list(dict.fromkeys([*self._left_out, *left_out]))
        self._end_run(state, notes, left_out)
        left = {"leftOut": left_out, "onlyThere": kept, "missing": self._missing}
        self._lease.save({**self._memory(), **left}, finished=True)

    def _show_sending(self, state: JobState, text: str) -> None:
        """Show how far the outputs are: in the description, and in the lease."""
        begins = not self._lease.sending
        self._lease.sending = text
        if begins:
            self._lease.check()
            self._lease.save({})
        self._description.show(self._facts(state, self.notes, text))

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        runs.set_tags(self._client, self._run_id, {key: value for key, value in tags.items() if value})

    def _end_run(self, state: JobState, notes: list[str], left_out: list[str]) -> None:
        # Something that ranks have said was left out, by agents or by this relay.
        lacks = bool(self._dropped or any(self._skipped) or self._lost or self._refused)
        tags = {
            runs.TAG_STATE: state.execution_state,
            runs.TAG_STARTED: "" if state.start_time is None else runs.time_text(state.start_time),
            runs.TAG_EXIT_CODE: str(state.exit_code or ""),
            runs.TAG_ERROR_CODE: state.error_code,
            runs.TAG_REASON: state.reason[-runs.LONGEST_TAG :],
            runs.TAG_COMPLETE: "false" if self._missing or left_out or lacks else "",
        }
        notes = [*self._missing, *notes, *self._not_as_it_came()]
        if notes:
            tags[runs.TAG_NOTES] = "\n".join(notes)[: runs.LONGEST_TAG]
        tags = {key: runs.tag_text(value) for key, value in tags.items()}
        tags |= self._description.tags(self._facts(state, notes))
        self._set_tags(tags)
        self._client.set_terminated(self._run_id, state.run_status, end_time=state.end_time)

    def _once(self, what: str, send: Callable[[], Sequence[str]]) -> list[str]:
        """Send a thing of an ended attempt, if it hasn't been sent; sentences on what could not be sent of it.

        A store that is away makes the relay begin anew: what was sent is not sent again.

        Args:
            send: returns such sentences; what it raises is one, too, unless it may pass.

        Raises:
            Exception: the thing may be taken if it is sent again: call again.
            LeaseLostError: another relay has taken over.
        """
        if what not in self._done:
            self._lease.check()
            self._since = self._since or time.monotonic()
            try:
                self._done[what] = list(send())
            except LeaseLostError:
                raise
            except Exception as error:  # MLflow raises whatever its store raises; the run must end all the same
                if self._may_pass(error, time.monotonic() - self._since < AWAY_SECONDS):
                    raise
                ours = isinstance(error, BatchAIError)
                self._done[what] = [str(error) if ours else f"{what}: {type(error).__name__}: {error}"]
            else:
                # What was given up once is not waited for again, thing by thing.
                self._since = None
        return list(self._done[what])

    def _may_pass(self, error: Exception, retry: bool) -> bool:
        if isinstance(error, ShareError):
            return retry and self._job.index is not None and not isinstance(error, ShareNotFoundError)
        # What is said of a model hides what the store has said.
        return (retry and stores.may_pass(error.__cause__ or error)) or not self._answers()
