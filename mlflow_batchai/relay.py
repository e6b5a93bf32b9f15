"""The relay: what is new in the job folder goes into one MLflow run.

The cursor lies beside the lease (``lease.py``); what is replayed after a crash MLflow drops, since the points are the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mlflow_batchai import models
from mlflow_batchai.errors import BatchAIError, ModelError, ShareError
from mlflow_batchai.jobs import EventReader, Job, JobState
from mlflow_batchai.lease import Lease, LeaseLostError
from mlflow_batchai.metrics import MetricFold, Point
from mlflow_batchai.node import protocol
from mlflow_batchai.node.protocol import Record
from mlflow_batchai.places import output_places
from mlflow_batchai.shares.base import Share, open_share
from mlflow_batchai.shares.directory import DirectoryShare

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

LONGEST_TAG = 5000
BATCH = 1000
FIRST_LOG_SECONDS, LONGEST_LOG_SECONDS = 15.0, 300.0


class Relay:
    """Moves one job's events, logs, outputs and model into its run.

    Args:
        job: the job.
        client: an MLflow client of the run's store.
        lease: acquired already; its memory is where we go on.
    """

    def __init__(self, job: Job, client: MlflowClient, lease: Lease) -> None:
        self._job = job
        self._client = client
        self._lease = lease
        self._run_id = str(job.plan["runId"])
        memory = lease.memory
        self._reader = EventReader(job, memory.get("cursor"))
        self._metrics = MetricFold(job.plan["metrics"], memory.get("metrics"))
        self._models: list[Record] = list(memory.get("models", []))
        self._dropped = int(memory.get("dropped", 0))
        self._state = str(memory.get("state", protocol.QUEUED))
        # Points that the store has not taken yet: they wait for it, and the cursor is not saved before them.
        self._pending: list[Point] = []
        self._unsaved = False
        self._logged_size = -1
        self._next_logs = time.monotonic() + FIRST_LOG_SECONDS
        self._log_interval = FIRST_LOG_SECONDS
        self.notes: list[str] = []

    def step(self) -> int:
        """Relay what is new; the number of segments that were read."""
        self._lease.check()
        count = 0
        for _, _, records in self._reader.read():
            self._unsaved = True
            self._pending += self._metrics.feed(records)
            for record in records:
                self._take(record)
            count += 1
        self._send()
        if self._unsaved:
            self._lease.check()
            self._lease.save(self._memory())
            self._unsaved = False
        return count

    def _memory(self) -> Record:
        return {
            "cursor": dict(self._reader.cursor),
            "metrics": self._metrics.remember(),
            "models": list(self._models),
            "dropped": self._dropped,
            "state": self._state,
        }

    def _take(self, record: Record) -> None:
        if record["k"] == "report" and record["body"].get("type") == "model":
            self._models.append(record["body"])
        elif record["k"] == "dropped":
            self._dropped += int(record["lines"])

    def _send(self) -> None:
        while self._pending:
            batch = self._pending[:BATCH]
            self._log(batch)
            del self._pending[: len(batch)]

    def _log(self, points: list[Point]) -> None:
        """Store points; one that MLflow will never take is told of, so that it doesn't hold up the others for ever."""
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        try:
            metrics = [Metric(point.key, point.value, point.timestamp, point.step) for point in points]
            self._client.log_batch(self._run_id, metrics=metrics)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE" or self.run_gone():
                raise
            if len(points) == 1:
                self.notes.append(f"metric '{points[0].key}' at step {points[0].step} was refused: {error.message}")
                return
            middle = len(points) // 2
            self._log(points[:middle])
            self._log(points[middle:])

    def run_gone(self) -> bool:
        """Whether the run was deleted: then there is nothing left to relay into."""
        try:
            return bool(self._client.get_run(self._run_id).info.lifecycle_stage != "active")
        except Exception as error:  # a store that can't be reached says nothing of the run
            return getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST"

    def show_state(self, state: JobState) -> None:
        """Bring the run's status and tags to the job's state, when that has changed."""
        if state.execution_state == self._state or state.ended:
            return
        self._lease.check()
        self._state = state.execution_state
        self._client.set_tag(self._run_id, "batchai.executionState", state.execution_state)
        self._client.update_run(self._run_id, status=state.run_status)

    def cancel_wanted(self) -> bool:
        """Whether someone has set the run's tag ``batchai.cancel`` (in MLflow's own UI, say)."""
        tags = self._client.get_run(self._run_id).data.tags
        return tags.get("batchai.cancel", "").lower() in ("true", "1", "yes")

    def logs_when_due(self) -> None:
        """Upload the logs so far, at growing intervals: an artifact is always sent whole."""
        if time.monotonic() < self._next_logs:
            return
        size = sum(entry.size for entry in self._job.share.list(self._job.paths.stdouterr))
        if size != self._logged_size:
            self._upload(self._job.share, self._job.paths.stdouterr, "stdouterr")
            self._logged_size = size
        self._log_interval = min(self._log_interval * 1.5, LONGEST_LOG_SECONDS)
        self._next_logs = time.monotonic() + self._log_interval

    def finish(self, state: JobState) -> None:
        """The job has its verdict: send the rest, the outputs and the model, then end the run.

        What fails here is told in the run's tags; the run ends in any case, with the job's status.
        """
        self.step()
        self._pending += self._metrics.finish()
        self._send()
        # A store that fails below brings us here again: notes of that time are not kept.
        notes = list(self.notes)
        with self._noting("logs", notes):
            self._upload(self._job.share, self._job.paths.stdouterr, "stdouterr")
        with self._noting("outputs", notes):
            self._upload_outputs()
        if state.execution_state == protocol.SUCCEEDED:
            with self._noting("model", notes):
                notes += self._log_model()
        self._lease.check()
        self._end_run(state, notes)
        self._lease.save(self._memory(), finished=True)

    def _end_run(self, state: JobState, notes: list[str]) -> None:
        from mlflow.entities import RunTag

        tags = {
            "batchai.executionState": state.execution_state,
            "batchai.exitCode": "" if state.exit_code is None else str(state.exit_code),
            "batchai.errorCode": state.error_code,
            "batchai.reason": state.reason[-LONGEST_TAG:] if len(state.reason) > LONGEST_TAG else state.reason,
        }
        if self._dropped:
            notes.append(f"{self._dropped} log lines were dropped while the share stalled")
        if self._metrics.repeated:
            notes.append(f"{self._metrics.repeated} metric values came for a step that had one; the first stands")
        if notes:
            tags["batchai.notes"] = "\n".join(notes)[:LONGEST_TAG]
        self._client.log_batch(self._run_id, tags=[RunTag(key, value) for key, value in tags.items() if value])
        self._client.set_terminated(self._run_id, state.run_status, end_time=state.end_time)

    @contextlib.contextmanager
    def _noting(self, what: str, notes: list[str]) -> Iterator[None]:
        self._lease.check()
        try:
            yield
        except LeaseLostError:
            raise
        except BatchAIError as error:
            notes.append(str(error))
        except Exception as error:  # MLflow raises whatever its store raises; the run must end all the same
            notes.append(f"{what}: {type(error).__name__}: {error}")

    def _upload(self, share: Share, path: str, artifact: str) -> None:
        """Send a folder of a share to the run's artifacts, as it is now."""
        if isinstance(share, DirectoryShare):
            folder = share.local(path)
            if folder.is_dir():
                self._client.log_artifacts(self._run_id, str(folder), artifact)
            return
        with TemporaryDirectory(prefix="batchai-") as scratch:
            target = Path(scratch) / "folder"
            _download(share, path, target)
            if target.is_dir():
                self._client.log_artifacts(self._run_id, str(target), artifact)

    def _upload_outputs(self) -> None:
        sent: set[tuple[str, str]] = set()
        for place in output_places(self._job.plan):
            key = (place["share"], place["path"])
            if key in sent:
                continue
            sent.add(key)
            artifact = "outputs/" + place["suffix"] if place["suffix"] else "outputs"
            self._upload(open_share(place["share"]), place["path"], artifact)

    def _log_model(self) -> tuple[str, ...]:
        """Make the model, unless a relay that was cut off after that has made it; sentences on what it lacks."""
        wanted = self._job.plan["model"]
        if wanted is None:
            return ()
        chosen = self._choose_model(wanted.get("path"))
        if chosen is None:
            raise ModelError(
                f"no saved model was found at '{wanted['path']}' in the output directories"
                if wanted.get("path")
                else "batchai.yaml asks for a model and no .h5 or .keras file was saved in an output directory"
            )
        facts = models.ModelFacts.from_record(chosen["meta"])
        # A run that was named with --run-id may lie in another experiment than the command line's.
        experiment_id = self._client.get_run(self._run_id).info.experiment_id
        job, register = str(self._job.plan["job"]), wanted.get("register")
        reference = models.find_logged(
            self._client, experiment_id=experiment_id, run_id=self._run_id, job=job, facts=facts, register=register
        )
        if reference is None:
            with self._local_file(chosen["path"]) as file:
                reference = models.log_model(
                    self._client,
                    experiment_id=experiment_id,
                    run_id=self._run_id,
                    file=file,
                    facts=facts,
                    name=wanted.get("name") or "model",
                    register=register,
                    job=job,
                )
        self._client.set_tag(self._run_id, "batchai.model", reference.model_uri)
        if reference.version:
            self._client.set_tag(self._run_id, "batchai.modelVersion", f"models:/{register}/{reference.version}")
        return reference.notes

    def _choose_model(self, path: str | None) -> Record | None:
        """The record of the configured file; without one the last that a rank reported, else the last that was found."""
        if path:
            ending = "/" + path.strip("/")
            fitting = [record for record in self._models if str(record["path"]).endswith(ending)]
        else:
            fitting = self._models
        reported = [record for record in fitting if not record.get("found")]
        best = reported or fitting
        return best[-1] if best else None

    @contextlib.contextmanager
    def _local_file(self, path: str) -> Iterator[Path]:
        """A file that a rank named by its path on the node, as a file here."""
        share, inside = self._on_share(path)
        if isinstance(share, DirectoryShare):
            yield share.local(inside)
            return
        with TemporaryDirectory(prefix="batchai-") as scratch:
            target = Path(scratch) / inside.rpartition("/")[2]
            target.write_bytes(share.read(inside))
            yield target

    def _on_share(self, path: str) -> tuple[Share, str]:
        for place in output_places(self._job.plan):
            marker = place["path"] + "/"
            _, found, inside = path.partition("/" + marker)
            if found:
                return open_share(place["share"]), marker + inside
        raise ShareError(f"the saved model {path} lies in no output directory; save it under $AZ_BATCHAI_OUTPUT_<ID>")


def _download(share: Share, path: str, target: Path) -> None:
    for entry in share.list(path):
        if entry.is_directory:
            _download(share, f"{path}/{entry.name}", target / entry.name)
        else:
            target.mkdir(parents=True, exist_ok=True)
            (target / entry.name).write_bytes(share.read(f"{path}/{entry.name}"))
