"""The relay: what is new in the job folder goes into one MLflow run, and the run says how the job is.

What is known lies beside the lease (``job/lease.py``): another relay goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.job.completeness import log_totals, missing, totals_of
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease
from mlflow_batchai.job.metrics import Pace
from mlflow_batchai.job.sent import SentFiles
from mlflow_batchai.job.states import JobState
from mlflow_batchai.tracking import collect, runs
from mlflow_batchai.tracking.description import Description, Facts
from mlflow_batchai.tracking.intake import Intake
from mlflow_batchai.tracking.jobfiles import JobFiles
from mlflow_batchai.tracking.lastthings import LastThings
from mlflow_batchai.tracking.sending import Outputs

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

MOST_NOTES = 100
# The share of its time that a relay gives to logs which are sent whole again and again, at most: one part in so many.
LOG_PARTS = 10
FIRST_LOG_SECONDS, LONGEST_LOG_SECONDS = 15.0, 300.0
# How often it is tried to send what says what runs.
FILES_SECONDS = 5.0


class Relay:
    """Moves the events, logs, outputs and model of one attempt of a job into its run.

    Args:
        job: the job, at that attempt.
        client: an MLflow client of the run's store.
        lease: acquired already; its memory is where we go on. Of an earlier attempt's all stays but how far it had come.
    """

    def __init__(self, job: Job, client: MlflowClient, lease: Lease) -> None:
        self._job = job
        self._client = client
        self._lease = lease
        self._run_id = job.plan.run_id
        memory = lease.memory
        self._begun = int(memory.get("attempt", 1)) == job.attempt
        here = memory if self._begun else {}
        self._state = str(here.get("state", protocol.QUEUED))
        # Of an attempt that another follower has begun its run may say so still.
        self._waits: str | None = None if self._begun and job.attempt > 1 else ""
        self._files = JobFiles(client, job, memory.get("environment"))
        self._next_files = time.monotonic()
        self._logs = collect.Logs(client, job)
        self._next_logs = time.monotonic() + FIRST_LOG_SECONDS
        self._log_interval = FIRST_LOG_SECONDS
        self._last = LastThings(job, lease, self._answers)
        self._outputs = Outputs(client, job, SentFiles(job, lease.number))
        self._description = Description(client, self._run_id)
        self._pace: Pace | None = None
        self.notes: list[str] = list(memory.get("notes", []))
        # Of logs and outputs: what lies on the share only, which `batchai gc` leaves there.
        self._left_out: list[str] = list(memory.get("leftOut", []))
        # What agents have counted and nobody has read: of earlier attempts, and of this one once it is over.
        self._missing_before = [sentence for sentence in memory.get("missing", []) if self._is_of_another(sentence)]
        self._missing: list[str] = []
        self._intake = Intake(
            client,
            job,
            memory,
            self._begun,
            gone=self.run_gone,
            note=self._note,
            environment=self._files.take,
            save=self._save,
        )

    def _is_of_another(self, sentence: str) -> bool:
        """Whether a sentence is of an earlier attempt: what is missing of this one is found out anew."""
        return self._job.attempt > 1 and not sentence.endswith(self._which)

    @property
    def _which(self) -> str:
        return f" (attempt {self._job.attempt})"

    def step(self, to_the_end: bool = False) -> int:
        """Relay what is new; the number of segments that were read. ``to_the_end``: nothing more will be written."""
        self._lease.check(exactly=to_the_end)
        return self._intake.read(to_the_end)

    def _save(self) -> None:
        self._lease.check()
        self._lease.save(self._memory())

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes and len(self.notes) < MOST_NOTES:
            self.notes.append(sentence)

    def heard(self, node: int) -> int:
        """How many of a node's segments have been read."""
        return self._intake.heard(node)

    @property
    def ending(self) -> bool:
        """Whether an agent has said that it failed or stops."""
        return self._intake.ending

    def _memory(self) -> Record:
        return {
            "attempt": self._job.attempt,
            **self._intake.remember(),
            "environment": self._files.remember(),
            "state": self._state,
            "notes": list(self.notes),
            "leftOut": list(self._left_out),
            "missing": list(self._missing_before),
        }

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
        self._pace = self._intake.pace or self._pace
        job, step = self._job, self._intake.last_step
        note = self._intake.tracked.script_note
        return Facts(job.plan, job.attempt, state, job.hosts, self._waits or "", self._pace, step, sending, notes, note)

    def cancel_wanted(self) -> bool:
        """Whether someone has set the run's tag ``batchai.cancel`` (in MLflow's own UI, say)."""
        tags = self._client.get_run(self._run_id).data.tags
        return tags.get(runs.TAG_CANCEL, "").lower() in ("true", "1", "yes")

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
            self._logs.send()
            self._intake.tracked.send_files()
        finally:
            ended = time.monotonic()
            self._log_interval = min(self._log_interval * 1.5, LONGEST_LOG_SECONDS)
            self._next_logs = ended + max(self._log_interval, LOG_PARTS * (ended - begun))

    def pass_on(self) -> None:
        """The attempt is over and the job goes on with another one: send the rest of what it said, and its logs.

        Raises:
            ShareError: a share over the network is away, perhaps for a moment: call it again.
        """
        notes = self._send_rest(goes_on=True)
        self._lease.check()
        left = {"leftOut": [*self._left_out, *notes], "missing": self._missing}
        self._lease.save({**self._memory(), "notes": [*self.notes, *notes], **left})

    def _send_rest(self, goes_on: bool = False) -> list[str]:
        """The attempt is over: send the rest of what it said, and its logs; sentences on what could not be sent."""
        self._begin()
        self.step(to_the_end=True)
        self._pace = self._intake.pace or self._pace
        self._intake.finish()
        left_out = self._last.once("logs", lambda: self._logs.send(complete=True))
        known = totals_of(self._job)
        mended = self._last.once("rest of logs", lambda: self._logs.mend(log_totals(known)))
        found = (*missing(known, self._intake.cursor, self._intake.received), *mended)
        which = self._which if goes_on or self._job.attempt > 1 else ""
        self._missing = [*self._missing_before, *(sentence + which for sentence in found)]
        return left_out + self._last.once("artifacts", self._intake.tracked.send_rest)

    def finish(self, state: JobState) -> None:
        """The job has its verdict: send the rest, the outputs and the model, then end the run.

        What can't be sent is told in the run's tags; the run ends in any case, with the job's status.

        Raises:
            Exception: the store is away, or the share for a moment: call it again; what was sent stays so.
        """
        left_out = self._send_rest()
        outputs = self._outputs
        left_out += self._last.once("outputs", lambda: outputs.send(lambda text: self._show_sending(state, text)))
        self._lease.sending = ""
        # A job that has succeeded needs its checkpoints no more; where it has not, they may be all that it has left.
        there = (outputs.checkpoints if state.execution_state != protocol.SUCCEEDED else "", outputs.excluded)
        kept = [sentence for sentence in there if sentence]
        notes = [*self.notes, *left_out, *kept, *self._last.once("job", self._files.send)]
        notes += self._last.once("logged models", self._intake.tracked.make_models)
        if state.execution_state == protocol.SUCCEEDED:
            notes += self._last.once("model", lambda: collect.log_model(self._client, self._job, self._intake.models))
        self._lease.check()
        left_out = list(dict.fromkeys([*self._left_out, *left_out]))
        self._end_run(state, notes, left_out)
        left = {"leftOut": left_out, "onlyThere": kept, "missing": self._missing}
        self._lease.save({**self._memory(), **left}, finished=True)

    def _show_sending(self, state: JobState, text: str) -> None:
        """Say how far the outputs have come: in the description, and to who watches the lease."""
        begins = not self._lease.sending
        self._lease.sending = text
        if begins:
            self._lease.check()
            self._lease.save({})
        self._description.show(self._facts(state, self.notes, text))

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(self._run_id, tags=[RunTag(key, value) for key, value in tags.items() if value])

    def _end_run(self, state: JobState, notes: list[str], left_out: list[str]) -> None:
        tags = {
            runs.TAG_STATE: state.execution_state,
            runs.TAG_STARTED: "" if state.start_time is None else runs.time_text(state.start_time),
            runs.TAG_EXIT_CODE: "" if state.exit_code is None else str(state.exit_code),
            runs.TAG_ERROR_CODE: state.error_code,
            runs.TAG_REASON: state.reason[-runs.LONGEST_TAG :],
            runs.TAG_COMPLETE: "false" if self._missing or left_out or self._intake.lacks else "true",
        }
        notes = [*self._missing, *notes, *self._intake.told()]
        if notes:
            tags[runs.TAG_NOTES] = "\n".join(notes)[: runs.LONGEST_TAG]
        tags = {key: runs.tag_text(value) for key, value in tags.items()}
        tags |= self._description.tags(self._facts(state, notes))
        self._set_tags(tags)
        self._client.set_terminated(self._run_id, state.run_status, end_time=state.end_time)
