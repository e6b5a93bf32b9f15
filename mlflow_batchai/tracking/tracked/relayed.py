"""What a relay has to do for scripts that use MLflow: one object that it asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mlflow_batchai.agent import records
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.tracking.tracked import files
from mlflow_batchai.tracking.tracked.files import RunFiles
from mlflow_batchai.tracking.tracked.models import ScriptModels
from mlflow_batchai.tracking.tracked.words import SHAPES, Words

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

# So long files are sent at a time while the job runs: metrics wait for them.
SECONDS = 5.0
KINDS = frozenset((*SHAPES, "artifact", "logged_model"))


class Tracked:
    """Brings to the run what scripts have logged, besides metrics.

    Args:
        gone: whether the run was deleted.
        memory: what ``remember`` returned in an earlier process, of whichever attempt.
    """

    def __init__(self, client: MlflowClient, job: Job, gone: Callable[[], bool], memory: Mapping[str, Any] | None) -> None:
        memory = memory or {}
        self._words = Words(client, job.plan.run_id, gone, memory.get("words", {}))
        self._files = RunFiles(client, job, memory.get("files", {}))
        self._models = ScriptModels(client, job, memory.get("models", {}))

    def remember(self) -> dict[str, Any]:
        """All that another process needs to go on, as JSON."""
        return {"words": self._words.remember(), "files": self._files.remember(), "models": self._models.remember()}

    def take(self, body: Record) -> bool:
        """Take the body of a ``report`` record of one of ``KINDS``; False if it can't be read."""
        if body["type"] == "artifact":
            return records.has(body, files.SHAPE) and self._take_file(body)
        return self._models.take(body) if body["type"] == "logged_model" else self._words.take(body)

    def _take_file(self, body: Record) -> bool:
        whose, _, path = body["path"].partition("/")
        model_id, _, inside = path.partition("/")
        if not files.is_path(body["path"]) or whose not in ("run", "models") or not (inside if whose == "models" else path):
            return False
        if whose == "run":
            self._files.take(path, body)
        else:
            self._models.take_file(model_id, inside, body["size"])
        return True

    @property
    def script_note(self) -> str:
        """What scripts have said of the run, for its description."""
        return self._words.script_note

    @property
    def crowded(self) -> bool:
        """Whether so much waits that it is to be sent before more is read."""
        return self._words.crowded or self._files.crowded

    def send(self) -> None:
        """Store what has come of params, tags and datasets; files, if many wait."""
        self._words.send()
        if self._files.crowded:
            self.send_files()

    def send_files(self) -> None:
        """Send some files, while the job runs."""
        self._files.send(SECONDS)

    def send_rest(self) -> list[str]:
        """Send all files: nothing more will be written. Sentences on what was left out."""
        return self._files.send()

    def make_models(self) -> list[str]:
        """Make the logged models. Sentences on those that can't be made."""
        return self._models.make()

    def notes(self) -> list[str]:
        """Sentences on what is not stored as it came."""
        return self._words.notes()
